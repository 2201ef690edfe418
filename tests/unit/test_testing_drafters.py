"""The reference drafters draw what they say, and the check of declared laws sees through node numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.models.table import TableModel
from specdec.rng import CounterRng
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import stand
from specdec.testing.tables import TableVerifier
from specdec.testing.truth import drafts, drawn, untruth
from specdec.tree import check, from_lists
from specdec.types import PAD, Budget, DraftTree, Draws, Kind

Q = TableModel.random(4, 2, seed=1)
ZEROS = TableModel.random(4, 2, seed=2, zeros=0.6)
VERIFIER = TableVerifier(TableModel.random(4, 2, seed=3))
LEVELS = ["i", "w", "p", ["ii", "i"], ["ww", "w"], ["www"], ["rp"], ["rpp"], ["pr"], ["wi"], ["pI"], ["pIw"], ["wW"], ["iii"], []]


def tree_of(drafter, contexts=((1, 2),), budget=None, seeds=None):
    at = stand(drafter, VERIFIER, contexts)
    budget = budget or Budget.of(12, batch=len(contexts))
    source = CounterRng(seeds or range(len(contexts))).round(range(len(contexts)), at.positions, torch.device("cpu"))
    tree = drafter.propose(at.drafter, at.pending, budget, source)
    check(tree, at.pending, budget, 4, sums=True)
    return tree


@pytest.mark.parametrize("levels", LEVELS, ids=str)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("model", [Q, ZEROS], ids=["full", "zeros"])
def test_declared_laws_are_true(levels, merge, model):
    found = drafts(TableDrafter(model, levels, other=ZEROS, merge=merge), VERIFIER, [(1, 2)], (3, 3, 3))
    assert untruth(found).defect < 1e-12


def test_stopping_behind_a_drawn_token_is_true_and_uneven_rows_are_uneven():
    for drafter in (TableDrafter(Q, "iii", stop_below=0.4), TableDrafter(Q, ["rp", "i"], uneven=True)):
        found = drafts(drafter, VERIFIER, [(0, 1), (1, 0), (2, 2)], (6, 3, 2))
        for root in ((0, 1), (1, 0), (2, 2)):
            assert untruth([branch for branch in found if branch.root == root]).defect < 1e-12
    tree = tree_of(TableDrafter(Q, ["rp", "i"], uneven=True), [(1, 0), (0, 1), (0, 2)])
    assert (tree.parents >= 0).sum(-1).tolist() == [0, 2, 4]


def test_merging_keeps_every_draw():
    law = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    drafter = TableDrafter(TableModel(law.expand(4, 4)), ["iii", "i"], merge=True)
    sizes = set()
    for seed in range(20):
        tree = tree_of(drafter, seeds=[seed])
        assert int((tree.draws.node >= 0).sum()) == 6
        children = tree.tokens[0, 1:][tree.parents[0, 1:] == 0].tolist()
        assert len(children) == len(set(children))
        sizes.add(int((tree.parents >= 0).sum()))
    assert sizes <= {2, 3, 4, 5, 6} and len(sizes) > 2
    apart = tree_of(TableDrafter(TableModel(law.expand(4, 4)), ["iii", "i"]))
    assert int((apart.parents >= 0).sum()) == 6


def test_without_replacement_ends_with_its_support():
    law = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    tree = tree_of(TableDrafter(TableModel(law.expand(4, 4)), ["www", "i"]))
    top = [token for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True) if parent == 0]
    assert sorted(top) == [0, 1] and int((tree.parents >= 0).sum()) == 4


def test_points_are_the_most_likely_in_order_and_the_rest_is_the_rest():
    law = torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64)
    tree = tree_of(TableDrafter(TableModel(law.expand(4, 4)), ["rpp"]))
    assert tree.tokens[0, 2:].tolist() == [1, 3] and int(tree.tokens[0, 1]) in (0, 2)
    assert tree.draws.kind.tolist() == [[Kind.IID, Kind.POINT, Kind.POINT]]
    assert torch.allclose(tree.laws[0, 0], torch.tensor([2 / 3, 0, 1 / 3, 0]).double())


def test_declared_dtype_is_the_one_drawn_in():
    tree = tree_of(TableDrafter(Q, "ii", dtype=torch.float32))
    assert tree.laws.dtype == torch.float32
    found = drafts(TableDrafter(Q, "ii", dtype=torch.float32), VERIFIER, [(1, 2)], (2, 2, 1), slack=1e-5)
    assert untruth(found, slack=1e-5).defect < 1e-12  # the declared numbers are the weights drawn from, in proportion


def test_levels_are_checked():
    with pytest.raises(ValueError, match="of p, i, w, r"):
        TableDrafter(Q, "ix")
    with pytest.raises(ValueError, match="capitals need the argument other"):
        TableDrafter(Q, "iI")


def test_a_draw_is_told_without_node_numbers():
    """The same draft with its nodes numbered another way."""
    law = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]], dtype=torch.float64)

    def tree(tokens, parents, node):
        shape = from_lists([(tokens, parents)])
        draws = Draws(torch.tensor([node]), torch.full((1, 3), int(Kind.IID)), torch.zeros(1, 3, dtype=torch.int64))
        return DraftTree(shape.tokens, shape.parents, draws, law)

    one = tree([0, 1, 2, 3], [-1, 0, 0, 1], [1, 2, 3])
    other = tree([0, 2, 1, 3], [-1, 0, 0, 2], [2, 1, 3])
    assert drawn(one, 4) == drawn(other, 4)
    assert drawn(one, 4) != drawn(replace(other, tokens=torch.tensor([[0, 2, 1, 2]])), 4)


def test_probes_and_padding_are_no_draws():
    shape = from_lists([([0, 1, 2], [-1, 0, 1]), ([3, 1], [-1, 0])])
    draws = Draws(torch.tensor([[2], [-1]]), torch.zeros(2, 1, dtype=torch.int64), torch.full((2, 1), -1))
    (first,), second = drawn(DraftTree(shape.tokens, shape.parents, draws), 4)
    assert first.above == (-1, (1,)) and first.path == (1, 2) and first.law == (0, 0, 1, 0) and second == ()
    assert int(shape.parents[1, 2]) == PAD
