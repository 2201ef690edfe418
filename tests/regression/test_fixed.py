"""One test for every fault that was found and mended; each states the property that was broken."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import specdec
from specdec import ContextDrafter, DraftTree, Draws, FixedPlanner, Kind, NullDrafter, Verification
from specdec.models.tiny import TinyTarget
from specdec.rng import CounterRng, Purpose, derive_seeds
from specdec.tree import draw_law, follow

V = 17
TARGET = TinyTarget(vocab_size=V, seed=3)
CPU = torch.device("cpu")


class Replay(ContextDrafter):
    """Drafts a given text, wherever the row stands in it."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def guess(self, ids: list[torch.Tensor], budget: specdec.Budget) -> list[list[int]]:
        return [self.text[len(row) : len(row) + int(k)] for row, k in zip(ids, budget.depth, strict=True)]


def test_target_noise_is_shared_by_all_parts_of_a_source() -> None:
    source = CounterRng([5]).round([0], [9], CPU)
    assert source.part(1)._uniform(Purpose.TARGET, 2) == source._uniform(Purpose.TARGET, 2)
    assert source.part(1)._uniform(Purpose.DRAFT, 2) != source._uniform(Purpose.DRAFT, 2)


def test_match_follows_every_twin() -> None:
    """Two siblings hold one token, and only the second has the child that the target draws next: both are on the path."""
    tree = DraftTree(torch.tensor([[0, 5, 5, 7]]), torch.tensor([[-1, 0, 0, 2]]))
    logp = torch.full((1, 4, V), -torch.inf, dtype=torch.float64)
    logp[0, 0, 5] = logp[0, 1, 7] = logp[0, 2, 7] = logp[0, 3, 1] = 0.0
    for acceptor in (specdec.MatchAcceptor(), specdec.CoupledAcceptor(), specdec.GreedyAcceptor()):
        out = acceptor.accept(tree, Verification(logp), CounterRng([1]).round([0], [3], CPU))
        assert (out.count.tolist(), out.path[0, :3].tolist(), out.next_token.tolist()) == ([3], [0, 2, 3], [1])
    assert follow(tree, logp.argmax(-1)).tolist() == [3]


def test_a_law_that_was_dropped_is_not_taken_for_a_point_mass() -> None:
    kind = torch.tensor([[int(Kind.IID)]])
    tree = DraftTree(torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]), Draws(torch.tensor([[1]]), kind, torch.tensor([[0]])))
    with pytest.raises(ValueError, match="return_rounds='all'"):
        draw_law(tree, torch.tensor([0]), torch.float64, 4)


def test_an_incompatible_rule_is_refused_before_anything_is_shown() -> None:
    with pytest.raises(ValueError, match="needs do_sample=True"):
        specdec.stream(TARGET, [[1]], drafter=NullDrafter(), acceptor=specdec.MatchAcceptor())


def test_parts_are_not_asked_to_select_no_rows() -> None:
    class Strict(NullDrafter):
        def select(self, state: None, rows: list[int]) -> None:
            assert rows, "a batch of no rows"

    out = specdec.generate(TARGET, [[1], [2, 3]], drafter=Strict(), max_new_tokens=0)
    assert out.finish_reason == ["length", "length"]


def test_integers_of_other_makes_are_seeds() -> None:
    assert derive_seeds(np.int64(3), 2) == derive_seeds(3, 2)


def test_a_budget_of_no_rows_says_what_is_wrong() -> None:
    assert specdec.Budget.of([]).nodes.tolist() == []
    with pytest.raises(ValueError, match="one number of at least 0 per row"):
        specdec.Budget.of([1], [1, 2])


# ------------------------------------------------------------------------------------------- laws that are none


class Poison:
    """Makes what follows one token no law at all."""

    pure = True

    def __init__(self, token: int, value: float) -> None:
        self.token, self.value = token, value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where((input_ids[:, -1] == self.token)[:, None], self.value, scores)


PROMPT = [1, 2, 3]
RULES = {
    "greedy": {},
    "coupled": {"do_sample": True, "seed": 2, "acceptor": specdec.CoupledAcceptor()},
    "match": {"do_sample": True, "seed": 2, "acceptor": specdec.MatchAcceptor()},
    "rejection": {"do_sample": True, "seed": 2, "acceptor": specdec.RejectionAcceptor()},
}


def text_of(rule: str, **options: object) -> list[int]:
    planner = FixedPlanner(4)
    out = specdec.generate(TARGET, [PROMPT], **{"max_new_tokens": 12, "eos_token_id": [], "planner": planner, **RULES[rule], **options})
    return out.new_tokens[0].tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", RULES)
def test_a_rejected_branch_without_a_law_does_not_matter(rule: str, value: float) -> None:
    banned = {"suppress_tokens": [5], "drafter": Replay(PROMPT + [5] * 20)}  # never accepted: its probability is zero
    assert text_of(rule, logits_processor=[Poison(5, value)], **banned) == text_of(rule, **banned)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_node_without_a_law_matters_if_the_text_goes_on_there(rule: str, value: float) -> None:
    clean = text_of(rule, drafter=NullDrafter())
    last = clean[4]
    poisoned = {"drafter": Replay(PROMPT + clean), "logits_processor": [Poison(last, value)]}
    assert text_of(rule, eos_token_id=[last], **poisoned) == clean[: clean.index(last) + 1]
    with pytest.raises(FloatingPointError, match="row 0, node"):
        text_of(rule, **poisoned)
