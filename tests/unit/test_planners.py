"""How much is drafted, as acceptance comes and goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec
from specdec import AdaptivePlanner, Budget, ContextDrafter, NGramDrafter
from specdec.models.tiny import TinyTarget
from specdec.warp import Warper


def outcome(accepted: tuple[int, ...], attempted: tuple[int, ...]) -> specdec.Round:
    """A round of which nothing but this is known."""
    done = object.__new__(specdec.Round)
    vars(done).update(accepted=accepted, attempted=attempted)
    return done


def learn(planner: AdaptivePlanner, state: Any, *rounds: tuple[int, int]) -> Any:
    for accepted, attempted in rounds:
        state = planner.observe(state, outcome((accepted,) * len(state), (attempted,) * len(state)))
    return state


def planned(planner: AdaptivePlanner, state: Any) -> list[int]:
    return planner.plan(state, [9] * len(state)).nodes.tolist()


def begin(planner: AdaptivePlanner, batch: int = 1) -> Any:
    return planner.begin(specdec.Context(batch, specdec.TargetFacts(9), Warper([], batch=batch), True, 99))


def test_it_drafts_to_the_full_where_all_is_accepted_and_nothing_where_nothing_is() -> None:
    planner = AdaptivePlanner(8)
    assert planned(planner, learn(planner, begin(planner), *[(8, 8)] * 5)) == [8]
    assert planned(planner, learn(planner, begin(planner), *[(0, 1)] * 20)) == [0]


def test_the_length_is_the_one_with_the_most_tokens_in_the_time() -> None:
    """Against the closed form, after so many rounds of one kind that the prior is forgotten: half of the first tokens stand, and all
    behind them but the third."""
    planner = AdaptivePlanner(12, first=0.2, more=0.05, memory=0.999)
    state = begin(planner)
    for _ in range(3000):
        state = learn(planner, state, (0, 1), (2, 3))
    a, b = 0.5, 0.5

    def speed(k: int) -> float:
        return 1.0 if k == 0 else (1 + a * (1 - b**k) / (1 - b)) / (1.2 + 0.05 * (k - 1))

    assert planned(planner, state) == [max(range(13), key=speed)]


def test_what_does_not_pay_is_tried_again_after_a_while() -> None:
    planner = AdaptivePlanner(8)
    state = learn(planner, begin(planner), *[(0, 1)] * 30)
    assert planned(planner, state) == [0]
    waited = next(n for n in range(200) if planned(planner, learn(planner, state, *[(0, 0)] * n)) != [0])
    assert 5 <= waited < 60


def test_rows_are_judged_each_by_itself() -> None:
    planner = AdaptivePlanner(8)
    state = begin(planner, 3)
    for _ in range(20):
        state = planner.observe(state, outcome((8, 0, 0), (8, 1, 0)))
    plan = planned(planner, state)
    assert plan[0] == 8 and plan[1] == 0 and plan[2] > 0
    assert planned(planner, planner.select(state, [1, 0])) == [0, 8]
    assert planner.plan(state, [9] * 3).depth.tolist() == plan


def test_free_tokens_are_always_drafted() -> None:
    planner = AdaptivePlanner(6, first=0.0, more=0.0)
    assert planned(planner, learn(planner, begin(planner), *[(0, 1)] * 100)) == [6]
    assert planned(AdaptivePlanner(0), begin(AdaptivePlanner(0))) == [0]


@pytest.mark.parametrize("bad", [{"nodes": -1}, {"memory": 1.0}, {"memory": -0.1}, {"first": -1.0}, {"more": -0.5}])
def test_what_is_no_plan_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="nodes|memory"):
        AdaptivePlanner(**bad)


class Wrong(ContextDrafter):
    """Never right."""

    def guess(self, ids: list[torch.Tensor], budget: Budget) -> list[list[int]]:
        return [[16] * int(k) for k in budget.depth]


def test_in_the_loop_it_stops_drafting_what_is_rejected_and_changes_no_text() -> None:
    target, options = TinyTarget(17, seed=3), {"max_new_tokens": 60, "eos_token_id": [], "suppress_tokens": [16]}
    prompts = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5]]
    plain = specdec.generate(target, prompts, drafter=specdec.NullDrafter(), **options)
    for drafter in (Wrong(), NGramDrafter()):
        for session in (None, specdec.Session()):
            out = specdec.generate(target, prompts, drafter=drafter, planner=AdaptivePlanner(8), session=session, **options)
            assert out.sequences.tolist() == plain.sequences.tolist()
            if isinstance(drafter, Wrong):
                assert out.stats.drafted < 60 * 3 * 8 / 3 and out.stats.accepted == 0
