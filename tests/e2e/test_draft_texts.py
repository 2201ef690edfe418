"""Texts that a draft model helped to write: always its own where it is the target, and never seen in them where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from processors import Memory

import specdec
from specdec import Budget, Context, FixedPlanner, Kind, NullDrafter, Planner
from specdec.drafters import EarlyExitDrafter, ModelDrafter
from specdec.models.tiny import TinyTarget

pytestmark = pytest.mark.slow

V = 11
TARGET = TinyTarget(V, seed=3)
DRAFT = TinyTarget(V, hidden_size=16, num_layers=1, seed=4)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]


class ByLength(Planner):
    """Each row's budget follows from its own length: 0 to 4 nodes, and none at all for a long stretch."""

    def begin(self, ctx: Context) -> None:
        return None

    def plan(self, state: None, lengths: Sequence[int]) -> Budget:
        return Budget.of([0 if 12 <= n < 34 else (7 * n + n // 3) % 5 for n in lengths])

    def observe(self, state: None, round: Any) -> None:
        return None

    def select(self, state: None, rows: Sequence[int]) -> None:
        return None


OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "cut": {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "penalty": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "greedy penalty": {"repetition_penalty": 1.3},
    "walked": {"do_sample": True, "logits_processor": [Memory()], "top_k": 6},
    "greedy walked": {"logits_processor": [Memory()]},
    "prefix": {"do_sample": True, "prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + row + i) % V for i in range(4)]},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("planner", [FixedPlanner(4), ByLength()], ids=["fixed", "by length"])
def test_a_target_that_drafts_for_itself_is_always_right(name, planner):
    # max_length, so that the rows end one by one
    found = specdec.generate(TARGET, PROMPTS, drafter=ModelDrafter(TARGET), planner=planner, max_length=42, seed=1, **OPTIONS[name])
    assert found.stats.drafted > 20 and found.stats.accepted == found.stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "greedy penalty", "greedy walked"])
def test_the_text_is_that_of_plain_decoding(name):
    options = {**OPTIONS[name], "max_length": 30}
    plain = specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), **options)
    for drafter in (ModelDrafter(DRAFT), ModelDrafter(DRAFT, logits_processor=[Memory()]), EarlyExitDrafter(TARGET, 1)):
        found = specdec.generate(TARGET, PROMPTS, drafter=drafter, planner=ByLength(), **options)
        assert found.sequences.equal(plain.sequences) and found.stats.accepted < found.stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut", "penalty", "walked"])
def test_a_row_comes_out_as_it_does_alone(name):
    options = {**OPTIONS[name], "drafter": ModelDrafter(DRAFT), "planner": ByLength(), "max_length": 24}
    batch = specdec.generate(TARGET, PROMPTS, seed=[5, 6, 7], **options)
    for row, prompt in enumerate(PROMPTS):
        alone = specdec.generate(TARGET, [prompt], seed=[5 + row], **options)
        assert alone.new_tokens[0].equal(batch.new_tokens[row])


def test_points_from_a_sampled_law_are_not_always_right_and_never_show():
    drafter = ModelDrafter(TARGET, sample=False)
    assert drafter.draws == {Kind.POINT} and ModelDrafter(TARGET).draws == {Kind.POINT, Kind.IID}
    found = specdec.generate(TARGET, PROMPTS, drafter=drafter, do_sample=True, max_new_tokens=30, seed=1, return_rounds=True)
    assert 0 < found.stats.accepted < found.stats.drafted
    assert all(done.tree.draws.kinds <= {Kind.POINT} for done in found.rounds)
