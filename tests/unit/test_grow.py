"""The shapes of drafted trees, and what a draft on its way draws, from what, and where it has no room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import Budget, DraftTree, Kind
from specdec.acceptors import RejectionAcceptor, TraversalAcceptor
from specdec.drafters.grow import Grower, Shape, chain, iid, mixed, points, without_replacement
from specdec.models.table import TableModel
from specdec.rng import CounterRng, Purpose, Source
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import expected_tokens, one_round
from specdec.testing.tables import TableVerifier
from specdec.tree import check, depths, draw_law
from specdec.types import PAD

GROWERS = {
    "chain": chain(),
    "iid": iid(3, 2),
    "without replacement": without_replacement(2, 3, 1),
    "mixed": mixed(3, 1, 2),
    "points": points(2, 2),
    "merged": iid(3, 2, merge=True),
    "ending": Grower(("rpp", "iw"), repeat=False),
}
FULL = [0.4, 0.3, 0.2, 0.1]


def grown(
    grower: Shape, budget: Budget, laws: Any = FULL, seeds: Sequence[int] = (0,), source: Source | None = None, **level: Any
) -> DraftTree:
    """A draft whose law is the same below every node of a row."""
    law = laws if isinstance(laws, torch.Tensor) else torch.tensor(laws, dtype=torch.float64)
    law, pending = law.expand(len(seeds), -1), torch.arange(len(seeds)) % 4
    source = source or CounterRng(list(seeds)).round(range(len(seeds)), [5] * len(seeds), torch.device("cpu"))
    growth = grower.begin(pending, budget)
    while growth.more:
        growth.level(law[:, None].expand(-1, growth.last.stop - growth.last.start, -1), source, **level)
    tree = growth.tree()
    check(tree, pending, budget, law.shape[1], sums=level.get("floor") is None)
    assert tree.draws.kinds <= grower.draws and tree.height == growth.height
    return tree


def rows(tree: DraftTree) -> list[list[tuple[int, int, int]]]:
    """(token, parent, kind) of each row's nodes in order, numbered without the padding."""
    found = []
    for tokens, parents, kinds in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.draws.kind.tolist(), strict=True):
        kept = [node for node, parent in enumerate(parents) if parent != PAD]
        found.append([(tokens[node], kept.index(parents[node]), kinds[node - 1]) for node in kept[1:]])
    return found


# ---------------------------------------------------------------------------------------------------------------- shapes


def test_the_usual_shapes():
    assert [grower.levels for grower in (chain(), iid(3, 2), without_replacement(2), mixed(3, 1), points(2, 1))] == [
        ("i",), ("iii", "ii"), ("ww",), ("rpp", "r"), ("pp", "p")
    ]  # fmt: skip
    assert mixed(3, 1).chosen() == points(3, 1) and iid(2, merge=True).chosen() == points(2)
    assert mixed(2).draws == {Kind.IID, Kind.POINT} and without_replacement(2).draws == {Kind.WITHOUT_REPLACEMENT}
    assert [grower.chains for grower in (chain(), mixed(1), iid(1, 2), iid(2, 1))] == [True, True, False, False]
    assert len({chain(), iid(1), Grower(("i",), merge=True)}) == 2  # equal ones are one


def test_what_is_no_shape_is_refused():
    for wrong in ((), (2, 0), (-1,)):
        for shape in (iid, without_replacement, mixed, points):
            with pytest.raises(ValueError, match="widths: got .* at least 1"):
                shape(*wrong)
    with pytest.raises(ValueError, match="of p, i, w, r"):
        Grower(("ix",))
    with pytest.raises(ValueError, match="other: capitals"):
        grown(Grower(("iI",)), Budget.of(2))


def test_the_last_level_repeats_until_the_budget_ends():
    tree = grown(points(3, 2, 1), Budget.of(17))
    assert depths(tree.parents)[0].tolist() == [0, *[1] * 3, *[2] * 6, *[3] * 6, *[4] * 2]
    assert tree.parents[0].tolist() == [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert grown(chain(), Budget.of(5)).parents[0].tolist() == [-1, 0, 1, 2, 3, 4]
    assert grown(Grower(("pp", "p"), repeat=False), Budget.of(17)).parents[0].tolist() == [-1, 0, 0, 1, 2]
    assert grown(points(2), Budget.of(17, 2)).tokens.shape == (1, 7)
    assert grown(points(3, 2), Budget.of(16, 4, 1)).parents[0].tolist() == [-1, 0, 1, 2]  # numbers 0, 3 and 9 of the shape
    for nothing in (Budget.of(0), Budget.of(3, 0), Budget.of(3, 3, 0)):
        assert grown(mixed(2), nothing).tokens.shape == (1, 1)
    assert grown(Grower(()), Budget.of(3)).tokens.shape == (1, 1)


@given(data=st.data())
def test_a_row_has_the_shape_and_the_draws_that_it_has_alone(data):
    """Its room is decided by its own budget, and every draw keeps its number."""
    grower = GROWERS[data.draw(st.sampled_from(sorted(GROWERS)))]
    each = data.draw(st.lists(st.tuples(*[st.integers(0, limit) for limit in (9, 4, 3)]), min_size=1, max_size=4))
    tree = grown(grower, Budget.of(*zip(*each, strict=True)), seeds=range(len(each)))
    assert tree.tokens.shape[1] <= 1 + max(nodes for nodes, _, _ in each)
    for row, (nodes, depth, width) in enumerate(each):
        alone = grown(grower, Budget.of([nodes] * (row + 1), [depth] * (row + 1), [width] * (row + 1)), seeds=range(row + 1))
        assert rows(tree)[row] == rows(alone)[row]


@pytest.mark.parametrize("name", ["chain", "iid", "without replacement", "mixed", "points"])
def test_where_there_is_room_does_not_depend_on_what_was_drawn(name):
    shapes = {tuple(grown(GROWERS[name], Budget.of(9), seeds=[seed]).parents[0].tolist()) for seed in range(20)}
    assert len(shapes) == 1


# ----------------------------------------------------------------------------------------------------------------- draws


class Noted(Source):
    """Keeps what was asked for."""

    def __init__(self, inner: Source) -> None:
        self.inner, self.asked = inner, []

    def categorical(self, weights: Any, purpose: Purpose, number: int, active: Any = None) -> Any:
        self.asked.append((number, weights.clone(), active.clone()))
        return self.inner.categorical(weights, purpose, number, active)

    def accept(self, *args: Any) -> Any:
        raise AssertionError("a draft flips no coins")

    def part(self, index: int) -> Source:
        raise AssertionError("nor does it take parts")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GROWERS)
def test_declared_are_the_weights_that_were_drawn_from(name, dtype):
    laws = torch.softmax(3 * torch.randn(2, 8, dtype=torch.float64), -1).to(dtype)
    source = Noted(CounterRng([0, 1]).round(range(2), [0, 0], torch.device("cpu")))
    tree = grown(GROWERS[name], Budget.of([9, 4]), laws, (0, 1), source)
    sampled = [number for number, kind in enumerate(tree.draws.kind[0].tolist()) if kind != Kind.POINT]
    assert [number for number, _, _ in source.asked] == sampled  # the address of a draw is its place
    for number, weights, active in source.asked:
        assert active.equal(tree.draws.node[:, number] >= 0)
        law = draw_law(tree, torch.full((2,), number), dtype, 8)
        for row in active.nonzero()[:, 0].tolist():
            torch.testing.assert_close(weights[row] / weights[row].sum(), law[row], rtol=1e-6, atol=0)
            if tree.draws.kind[row, number] == Kind.IID:
                assert weights[row].equal(tree.laws[row, tree.draws.law[row, number]])


def test_points_are_the_most_likely_and_of_equals_the_lowest():
    assert grown(points(4), Budget.of(4, 1), [0.2, 0.3, 0.2, 0.3]).tokens[0, 1:].tolist() == [1, 3, 0, 2]
    assert rows(grown(points(4), Budget.of(4, 1), [0.5, 0.0, 0.5, 0.0])) == [[(0, 0, 0), (2, 0, 0)]]  # the others can't follow
    scores = torch.tensor([-5.0, -torch.inf, -7.0, torch.nan])[:3]
    assert [token for token, _, _ in rows(grown(points(3), Budget.of(3, 1), scores, floor=-torch.inf))[0]] == [0, 2]
    for bad in (torch.nan, -torch.inf):
        assert rows(grown(points(3), Budget.of(3), torch.full((4,), bad), floor=-torch.inf)) == [[]]


def test_a_draw_that_has_no_mass_left_is_not_made():
    one, two = [0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]
    assert rows(grown(without_replacement(3), Budget.of(3, 1), one)) == [[(1, 0, 2)]]
    assert sorted(rows(grown(without_replacement(3), Budget.of(3, 1), two))[0]) == [(0, 0, 2), (2, 0, 2)]
    assert rows(grown(mixed(2), Budget.of(2, 1), one)) == [[(1, 0, 0)]]
    assert rows(grown(mixed(2), Budget.of(2, 1), two)) == [[(2, 0, 1), (0, 0, 0)]]
    assert len(rows(grown(iid(3), Budget.of(3, 1), one))[0]) == 3
    assert rows(grown(iid(2), Budget.of(2, 1), torch.full((4,), torch.nan))) == [[]]


def test_the_rest_is_what_the_points_leave_that_have_room():
    """The last family of a budget may be cut behind its sampled child, which then is drawn from the whole law."""
    tree = grown(mixed(3), Budget.of([3, 2, 1, 3], [1] * 4, [3, 3, 3, 1]), seeds=range(4))
    wanted = [[0, 0, 2 / 3, 1 / 3], [0, 0.3 / 0.6, 0.2 / 0.6, 0.1 / 0.6], FULL, FULL]
    torch.testing.assert_close(tree.laws[:, 0], torch.tensor(wanted, dtype=torch.float64))
    assert [len(row) for row in rows(tree)] == [3, 2, 1, 1]


def test_below_a_node_that_is_shut_nothing_grows():
    growth, law = points(2).begin(torch.tensor([3]), Budget.of(6)), torch.tensor([FULL])
    source = CounterRng([0]).round([0], [0], torch.device("cpu"))
    growth.level(law[:, None], source)
    torch.testing.assert_close(growth.likelihood(), torch.tensor([[0.4, 0.3]]))
    growth.level(law[:, None].expand(-1, 2, -1), source, torch.tensor([[False, True]]))
    assert growth.parents.tolist() == [[-1, 0, 0, PAD, PAD, 2, 2]]
    assert growth.tree().draws.node.tolist() == [[1, 2, -1, -1, 5, 6]]


def test_only_what_was_drawn_is_declared():
    """A shape may draw further down than the budget goes."""
    tree = grown(Grower(("p", "i")), Budget.of(1))
    assert tree.draws.kinds == {Kind.POINT} and tree.laws is None
    assert grown(Grower(("p", "i")), Budget.of(2)).draws.kinds == {Kind.POINT, Kind.IID}


def test_merged_draws_share_their_node_and_its_children():
    for seed in range(10):
        tree = grown(iid(3, 2, merge=True), Budget.of(9, 2), seeds=[seed])
        assert int((tree.draws.node >= 0).sum()) == 9
        for parent in set(tree.parents[0].tolist()) - {PAD, -1}:
            children = [token for token, above in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True) if above == parent]
            assert len(children) == len(set(children))
        first = tree.draws.node[0, :3].tolist()
        below = tree.parents[0].gather(0, tree.draws.node[0, 3:]).tolist()
        assert below == [first[0]] * 2 + [first[1]] * 2 + [first[2]] * 2


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_mixed_level_accepts_what_its_closed_form_says(width):
    """The mass of the points, and of the rest the overlap with what it was drawn from (Hu et al. 2025, arXiv 2502.18779)."""
    prompt = (1, 2)
    for seed in range(6):
        target, draft = TableModel.random(4, 2, seed=seed), TableModel.random(4, 2, seed=seed + 50)
        p, q = (model.law(torch.tensor([prompt]))[0] for model in (target, draft))
        top = q.argsort(descending=True)[: width - 1]
        rest = q.index_fill(0, top, 0.0)
        rest = rest / rest.sum()
        wanted = float(p[top].sum() + torch.minimum(p, rest).index_fill(0, top, 0.0).sum())
        drafter = TableDrafter(draft, mixed(width).levels)
        for acceptor in (RejectionAcceptor(), TraversalAcceptor()):
            law = one_round(drafter, TableVerifier(target), acceptor, [prompt], (width, 1, width))[prompt]
            assert abs(expected_tokens(law) - 1 - wanted) < 1e-12
