"""Bad input is refused with an error that says where: laws and trees that are none, and acceptors that write or answer nonsense."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from specdec.acceptors import MatchAcceptor, RejectionAcceptor
from specdec.base import Acceptor, ContextDrafter, Drafter
from specdec.loop import decode
from specdec.models.table import TableModel
from specdec.planning import FixedPlanner
from specdec.rng import CounterRng
from specdec.testing import certify
from specdec.testing.battery import battery
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import endless
from specdec.testing.purity import Touched, untouched
from specdec.testing.tables import TableVerifier
from specdec.tree import chain, check, check_answer, from_lists
from specdec.types import Acceptance, Budget, DraftTree, Draws, Kind, Verification

V = 3
PENDING = torch.tensor([1, 1])
LAW = torch.tensor([[[0.5, 0.25, 0.25]] * 2] * 2, dtype=torch.float64)


def sampled(laws: torch.Tensor = LAW, tokens: tuple[tuple[int, int], ...] = ((0, 1), (0, 1))) -> DraftTree:
    return chain([list(row) for row in tokens], PENDING, laws)


def with_entry(row: int, law: int, *values: float) -> torch.Tensor:
    laws = LAW.clone()
    laws[row, law] = torch.tensor(values, dtype=torch.float64)
    return laws


def seen(tree: DraftTree) -> None:
    check(tree, PENDING, Budget.of(9, batch=2), V, sums=True)


# ------------------------------------------------------------------------------------------------------------ laws and trees


NAN = float("nan")


@pytest.mark.parametrize(
    ("laws", "said"),
    [
        (with_entry(1, 0, 0.5, 0.25, 0.5), r"row 1, draw 0 \(node 1\) has a law that is negative, NaN or does not sum to one"),
        (with_entry(0, 1, 0.4, 0.2, 0.2), r"row 0, draw 1 \(node 2\) has a law .* does not sum to one"),
        (with_entry(1, 1, 0.5, 0.25, NAN), r"row 1, draw 1 \(node 2\) has a law that is negative, NaN"),
        (with_entry(1, 1, 0.5, NAN, 0.25), r"row 1, draw 1 \(node 2\) landed where its declared law has no mass"),
        (with_entry(0, 0, 1.25, 0.0, -0.25), r"row 0, draw 0 \(node 1\) has a law that is negative"),
        (with_entry(1, 0, 0.0, 0.5, 0.5), r"row 1, draw 0 \(node 1\) landed where its declared law has no mass"),
    ],
)
def test_a_law_that_is_none(laws, said):
    seen(sampled())
    with pytest.raises(ValueError, match=said):
        seen(sampled(laws))


@pytest.mark.parametrize(
    ("laws", "said"),
    [
        (LAW[:, :, :2], r"laws must be \[2, K, 3\], got \[2, 2, 2\]"),
        (LAW[:, :1], r"row 0, draw 1 \(node 2\) needs one of the 1 laws"),
    ],
)
def test_laws_of_a_wrong_shape(laws, said):
    with pytest.raises(ValueError, match=said):
        seen(replace(sampled(), laws=laws))


def test_a_child_before_its_parent():
    with pytest.raises(ValueError, match=r"row 1, node 1 \(token 0, parent 2\) needs a parent before it"):
        seen(from_lists([([1, 0, 0], [-1, 0, 1]), ([1, 0, 0], [-1, 2, 0])]))


def test_a_draw_on_no_node():
    tree = sampled()
    for node, where in ((5, r"row 0, draw 1 \(node 5\) must land on a drafted node"), (0, r"row 0, draw 1 \(node 0\) must land")):
        landed = tree.draws.node.clone()
        landed[0, 1] = node
        with pytest.raises(ValueError, match=where):
            seen(replace(tree, draws=replace(tree.draws, node=landed)))


class Held(Drafter):
    """Drafts one given tree."""

    draws: frozenset[Kind] = frozenset(Kind)

    def __init__(self, tree):
        self.tree = tree

    def begin(self, ctx):
        return None

    def propose(self, state, pending, budget, source):
        return self.tree

    def observe(self, state, commit, round=None):
        return None

    def select(self, state, rows):
        return None


def first_round(drafter, acceptor, prompts=((2, 1), (0, 1))):
    verifier = TableVerifier(TableModel.random(V, 1, seed=0))
    calls = decode(
        verifier, [torch.tensor(prompt) for prompt in prompts], endless(prompts, acceptor.greedy, 8), drafter=drafter, acceptor=acceptor,
        planner=FixedPlanner(2), rng=CounterRng([0, 1]),
    )  # fmt: skip
    return next(calls)


@pytest.mark.parametrize("rule", [RejectionAcceptor(), MatchAcceptor()])
def test_the_loop_refuses_a_bad_law_before_anything_is_accepted(rule):
    assert first_round(Held(sampled()), rule).emitted
    with pytest.raises(ValueError, match=r"row 1, draw 0 \(node 1\) has a law that is negative, NaN or does not sum to one"):
        first_round(Held(sampled(with_entry(1, 0, 0.5, 0.25, 0.5))), rule)


def test_a_guess_of_a_wrong_kind():
    class Guess(ContextDrafter):
        def guess(self, ids, budget):
            return [[0]] * (len(ids) + 1)

    with pytest.raises(ValueError, match="one list of token ids for each of the 2 rows"):
        first_round(Guess(), MatchAcceptor())


# ------------------------------------------------------------------------------------------------------------------ acceptors


class Altered(Acceptor):
    """An honest rule whose arguments or answer are tampered with."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def __init__(self, *, writes=lambda tree, verification: None, answers=lambda got: got):
        self.writes, self.answers = writes, answers

    def accept(self, tree, verification, source):
        got = MatchAcceptor().accept(tree, verification, source)
        self.writes(tree, verification)
        return self.answers(got)


def write(tensor, *where):
    tensor[where] = 0


def tampered(got, **changes):
    """The answer with other fields, past the annotations that are executed in tests: users have none that speak first."""
    other = object.__new__(Acceptance)
    vars(other).update({**vars(got), **changes})
    return other


LEVEL = next(cell for cell in battery() if (cell.shape, cell.proposal) == ("level 2", "iid"))


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        (lambda tree, verification: write(verification.scores, 3, 1, 2), "verification.scores was written at row 3, node 1, entry 2"),
        (lambda tree, verification: write(tree.tokens, 5, 2), "tree.tokens was written at row 5, node 2"),
        (lambda tree, verification: write(tree.laws, 4, 0, 1), "tree.laws was written at row 4, law 0, entry 1"),
        (lambda tree, verification: write(tree.draws.node, 2, 1), "tree.draws.node was written at row 2, draw 1"),
    ],
)
def test_an_acceptor_that_writes_into_its_arguments(writes, said):
    """The rows are those of the batch that was being looked at."""
    (row,) = certify(Altered(writes=writes), cells=[LEVEL])
    assert row["verdict"] == "fail" and row["reason"].startswith(f"Touched: {said}"), row["reason"]


def test_the_first_change_is_told_with_both_values():
    scores = torch.zeros(2, 3, 4)
    with pytest.raises(Touched, match=r"at row 1, node 0, entry 3 \(0, now 7\): records are frozen"), untouched(v=Verification(scores)):
        scores[1, 0, 3], scores[1, 2, 0] = 7, 8
    whole = torch.zeros(2)
    with pytest.raises(Touched, match=r"was written \(it was \[2\] and is \[3\]\)"), untouched(v=whole):
        whole.resize_(3)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (lambda got: tampered(got, path=got.path[0]), r"acceptance: path is \[\d\] torch.int64; allowed is \[2, D\] torch.int64"),
        (lambda got: tampered(got, count=got.count[:, None]), r"acceptance: count is \[2, 1\]"),
        (lambda got: tampered(got, count=got.count.int()), r"acceptance: count is \[2\] torch.int32; allowed is \[2\] torch.int64"),
        (lambda got: tampered(got, next_token=got.next_token.double()), r"acceptance: next_token is \[2\] torch.float64"),
        (lambda got: tampered(got, next_token=got.next_token + 9), r"row 0 .* the next token lies outside the vocabulary"),
        (lambda got: tampered(got, count=got.count * 0), r"row 0 .* count must be at least 1"),
        (lambda got: tampered(got, count=got.count + 9), r"row 0 .* count must be at least 1 and at most"),
        (lambda got: tampered(got, path=got.path + 40 * (got.path == 0)), r"row 0, node 40 .* is no node of the tree"),
        (lambda got: tampered(got, path=torch.where(got.path == 0, 1, got.path)), r"row 0, node 1 .* is not the root"),
    ],
)
def test_an_acceptor_that_answers_nonsense(answers, said):
    """Through the loop, as in `generate`: it trusts no answer."""
    with pytest.raises(ValueError, match=said):
        first_round(TableDrafter(TableModel.random(V, 1, seed=1), "ii"), Altered(answers=answers))


def test_a_path_that_jumps_or_steps_on_a_probe():
    tree = DraftTree(torch.tensor([[1, 0, 2, 0]]), torch.tensor([[-1, 0, 0, 1]]))
    one, token = torch.tensor([3]), torch.tensor([0])
    check_answer(tree, Acceptance(torch.tensor([[0, 1, 3]]), one, token), V)
    with pytest.raises(ValueError, match=r"row 0, node 3 \(path \[0, 2, 3\], .*\) is no child of the node before it"):
        check_answer(tree, Acceptance(torch.tensor([[0, 2, 3]]), one, token), V)
    bare = replace(tree, draws=Draws(torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([[-1]])))
    with pytest.raises(ValueError, match=r"row 0, node 3 .* is a node on which no draw landed"):
        check_answer(bare, Acceptance(torch.tensor([[0, 1, 3]]), one, token), V)
    with pytest.raises(ValueError, match=r"row 0, node 0 .* should be -1, behind the end of the path"):
        check_answer(tree, Acceptance(torch.tensor([[0, 1, 3, 0]]), one, token), V)
