"""Draft models beside the real one: itself, of which every token stands, and a reference draft as good as draft models are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from torch import Tensor

import specdec
from specdec import Budget, FixedPlanner
from specdec.acceptors import RejectionAcceptor
from specdec.base import Context, Planner
from specdec.drafters import ModelDrafter
from specdec.rng import CounterRng
from specdec.testing.audit import reference_draft
from specdec.types import DraftTree, Round, Verification

pytestmark = [pytest.mark.real, pytest.mark.slow]

QUESTIONS = ["Name three rivers of Europe.", "Explain how a bicycle stays upright."]
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}


@pytest.fixture(scope="module")
def draft(smollm2):
    return reference_draft(smollm2[0])


class Cycle(Planner):
    """Another budget every round, nothing among them."""

    def begin(self, ctx: Context) -> Iterator[int]:
        return cycle((4, 0, 1, 7, 0, 0, 2))

    def plan(self, state: Iterator[int], lengths: Sequence[int]) -> Budget:
        return Budget.of(next(state), batch=len(lengths))

    def observe(self, state: Iterator[int], round: Round) -> Iterator[int]:
        return state

    def select(self, state: Iterator[int], rows: Sequence[int]) -> Iterator[int]:
        return state


@pytest.mark.parametrize("planner", [FixedPlanner(4), Cycle()], ids=["chains of 4", "changing lengths"])
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_of_a_model_that_drafts_for_itself_every_token_stands(smollm2, chat, planner, options):
    """One token that the draft model had not read, or had read twice, would show in all that follows."""
    model, _ = smollm2
    prompts = [chat(question)[0] for question in QUESTIONS]
    found = specdec.generate(
        model, prompts, drafter=ModelDrafter(model), planner=planner, max_new_tokens=48, seed=[1, 2], return_rounds=True, **options
    )
    stats = found.stats
    assert stats.attempted_by_depth == stats.accepted_by_depth and stats.accepted > stats.emitted // 2
    cut = 0
    for done in found.rounds or ():
        for row, reason in enumerate(done.finish_reason):
            drafted = int((done.tree.parents[row] >= 0).sum())
            assert done.accepted[row] == drafted or reason is not None, "only the end of the text may leave a drafted token out"
            cut += drafted - done.accepted[row]
    assert stats.accepted == stats.drafted - cut


def test_the_reference_draft_is_as_good_as_meant(smollm2, chat, draft):
    """Alpha, the chance that the first drafted token stands, is the overlap of the two laws (Leviathan et al. 2023, theorem 3.5)."""
    model, _ = smollm2
    prompts = [chat(question)[0] for question in QUESTIONS]
    overlaps, stood = [], []
    for done in specdec.stream(model, prompts, drafter=ModelDrafter(draft), acceptor=RejectionAcceptor(), planner=FixedPlanner(4),
                               max_new_tokens=64, seed=[1, 2], keep_all=True, **SAMPLED):  # fmt: skip
        for row, attempted in enumerate(done.attempted):
            if attempted and done.tree.laws is not None:
                overlaps.append(float(torch.minimum(done.verification.logp[row, 0].exp(), done.tree.laws[row, 0]).sum()))
                stood.append(done.accepted[row] > 0)
    alpha, spread = sum(overlaps) / len(overlaps), math.sqrt(sum(a * (1 - a) for a in overlaps))
    assert 0.6 <= alpha <= 0.8
    assert abs(sum(stood) - sum(overlaps)) < 5 * spread


# ---------------------------------------------------------------------------------- the law of the first token, over many draws

DRAWS, BATCH = 1000, 50
ERROR = 1e-6


def g_test(tokens: Sequence[int], law: Tensor) -> tuple[float, int, float]:
    """G, its degrees of freedom, and the chance of one as large if this is the law. Rare cells, where less than 5 are expected, are one."""
    expected = law.double() / law.double().sum() * len(tokens)
    observed = torch.bincount(torch.tensor(tokens), minlength=len(law)).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    g = 2 * float(torch.special.xlogy(observed, observed / expected).sum())
    freedom = len(expected) - 1
    return g, freedom, float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(g / 2).double()))


def test_the_g_test_knows_right_from_wrong():
    law = torch.tensor([0.5, 0.3, 0.15, 0.049, *[0.00001] * 100])
    tokens = torch.multinomial(law, 2000, replacement=True).tolist()
    g, freedom, chance = g_test(tokens, law)
    assert freedom == 4 and 0.001 < chance < 0.999
    assert g_test(tokens, law**0.8)[2] < ERROR
    # 9.488 is the .95 quantile of the law with 4 degrees of freedom
    assert float(torch.special.gammaincc(torch.tensor(2.0).double(), torch.tensor(9.488 / 2).double())) == pytest.approx(0.05, abs=1e-5)


def first(tree: DraftTree, verification: Verification, seeds: Sequence[int], position: int) -> list[int]:
    """The first token that the acceptor would emit."""
    source = CounterRng(seeds).round(range(len(seeds)), [position] * len(seeds), torch.device("cpu"))
    found = RejectionAcceptor().accept(tree, verification, source)
    return torch.where(found.count > 1, tree.tokens[:, 1], found.next_token).tolist()


def test_the_first_token_has_the_targets_law(smollm2, draft):
    """Many first rounds with a draft of the reference kind. Tokens of the draft model itself, and tokens accepted under a law
    that it did not draw from, are told apart by the same test."""
    model, tokenizer = smollm2
    prompt = tokenizer("The weather")["input_ids"]
    with torch.no_grad():
        law, drafts = (each(torch.tensor([prompt])).logits[0, -1].softmax(-1) for each in (model, draft))
    assert law.max() < 0.2 and 0.6 < float(torch.minimum(law, drafts).sum()) < 0.8
    emitted: list[int] = []
    drafted: list[int] = []
    lied: list[int] = []
    for start in range(0, DRAWS, BATCH):
        seeds = list(range(start, start + BATCH))
        rounds = specdec.stream(
            model, [prompt] * BATCH, drafter=ModelDrafter(draft), acceptor=RejectionAcceptor(), planner=FixedPlanner(4), max_new_tokens=5,
            seed=seeds, keep_all=True, **SAMPLED,
        )  # fmt: skip
        (done,) = islice(rounds, 1)
        tree, tokens = done.tree, [row[0] for row in done.emitted]
        assert tree.laws is not None and tokens == first(tree, done.verification, seeds, len(prompt) - 1)
        flat = tree.laws.sqrt()
        emitted += tokens
        drafted += tree.tokens[:, 1].tolist()
        lied += first(replace(tree, laws=flat / flat.sum(-1, keepdim=True)), done.verification, seeds, len(prompt) - 1)
    g, freedom, chance = g_test(emitted, law)
    assert freedom > 15 and chance > ERROR, f"G = {g:.1f} with {freedom} degrees of freedom"
    assert g_test(drafted, drafts)[2] > ERROR
    assert g_test(drafted, law)[2] < ERROR, "the draft's own tokens"
    assert g_test(lied, law)[2] < ERROR, "the draft's law was not the declared one"
