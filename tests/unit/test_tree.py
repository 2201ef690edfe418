"""Tree algebra against what a person would do by walking up the parents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import tree as T
from specdec.types import PAD, ROOT, Budget, DraftTree, Draws, Kind

forests = st.integers(1, 7).flatmap(
    lambda n: st.lists(
        st.integers(1, n).flatmap(lambda k: st.tuples(*[st.integers(0, max(i - 1, 0)) for i in range(k)])), min_size=1, max_size=3
    )
)


def build(forest: list[tuple[int, ...]]) -> torch.Tensor:
    nodes = max(map(len, forest))
    return torch.tensor([[ROOT, *row[1:], *[PAD] * (nodes - len(row))] for row in forest])


def up(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@given(forests)
def test_derived_quantities(forest: list[tuple[int, ...]]) -> None:
    parents = build(forest)
    mask, depth = T.ancestors(parents), T.depths(parents)
    for b, row in enumerate(parents.tolist()):
        for node in range(len(row)):
            path = up(row, node)
            assert mask[b, node].nonzero()[:, 0].tolist() == sorted(path)
            assert depth[b, node] == len(path) - 1
    for node in range(parents.shape[1]):
        path, count = T.path_to(parents, torch.full((len(parents),), node))
        for b, row in enumerate(parents.tolist()):
            if row[node] != PAD:
                assert path[b, : count[b]].tolist() == up(row, node)
                assert (path[b, count[b] :] == -1).all()


@given(forests, st.data())
def test_follow_is_a_walk(forest: list[tuple[int, ...]], data: st.DataObject) -> None:
    parents = build(forest)
    draw = lambda: torch.tensor(data.draw(st.lists(st.lists(st.integers(0, 1), min_size=parents.shape[1], max_size=parents.shape[1]),  # noqa: E731
                                                   min_size=len(parents), max_size=len(parents))))  # fmt: skip
    tree, choice = DraftTree(draw(), parents), draw()
    reached = T.follow(tree, choice)
    for b, row in enumerate(parents.tolist()):
        paths = [up(row, node) for node in range(len(row)) if row[node] != PAD]
        good = [p for p in paths if all(tree.tokens[b, c] == choice[b, a] for a, c in zip(p, p[1:], strict=False))]
        assert int(reached[b]) == max(good, key=lambda p: (len(p), -p[-1]))[-1]


def test_probes_are_never_followed() -> None:
    tree = T.chain([[5, 6, 7]])
    probes = DraftTree(tree.tokens, tree.parents, Draws(torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([[-1]])))
    assert T.follow(probes, torch.tensor([[6, 7, 0]])).tolist() == [1]
    assert T.acceptable(probes).tolist() == [[False, True, False]]


def test_law_of_a_draw_knows_its_elder_siblings() -> None:
    law = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]], dtype=torch.float64)
    wor, iid, point = int(Kind.WITHOUT_REPLACEMENT), int(Kind.IID), int(Kind.POINT)
    kind = torch.tensor([[wor, iid, wor, point, wor]])
    draws = Draws(node=torch.tensor([[1, 1, 2, 3, 4]]), kind=kind, law=torch.tensor([[0, 1, 0, -1, 0]]))
    tree = DraftTree(torch.tensor([[0, 3, 2, 1, 0]]), torch.tensor([[-1, 0, 0, 0, 1]]), draws, law)
    laws = torch.stack([T.draw_law(tree, torch.tensor([i]), torch.float64, 4)[0] for i in range(5)])
    expected = torch.tensor(
        [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [1 / 6, 2 / 6, 3 / 6, 0], [0, 1, 0, 0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64
    )
    torch.testing.assert_close(laws, expected, rtol=0, atol=1e-15)
    order, parent = T.sort_draws(tree)
    assert order.tolist() == [[0, 1, 2, 3, 4]] and parent.tolist() == [[0, 0, 0, 0, 1]]


def test_chain() -> None:
    tree = T.chain([[1, 2], [], [3]], [9, 8, 7])
    assert tree.tokens.tolist() == [[9, 1, 2], [8, 0, 0], [7, 3, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, -2, -2], [-1, 0, -2]]
    assert tree.draws.kinds == {Kind.POINT}
    assert T.chain([[4, 5]]).tokens.tolist() == [[4, 5]]
    laws = torch.full((1, 2, 3), 1 / 3)
    assert T.chain([[1, 2]], [0], laws).draws.kinds == {Kind.IID}
    with pytest.raises(ValueError, match="laws must be"):
        T.chain([[1]], [0], laws)
    with pytest.raises(ValueError, match="row is empty"):
        T.chain([[]])


BAD = {
    "must be the root": ([[0, 1]], [[0, 0]]),
    "needs a parent before it": ([[0, 1]], [[-1, 1]]),
    "needs a parent before it, or": ([[0, 1]], [[-1, -1]]),
    "hangs below padding": ([[0, 1, 2]], [[-1, -2, 1]]),
    "pending token": ([[3, 1]], [[-1, 0]]),
    "outside the vocabulary of 10": ([[0, 10]], [[-1, 0]]),
    "budget's nodes": ([[0, 1, 2, 3, 4]], [[-1, 0, 0, 1, 1]]),
    "budget's depth": ([[0, 1, 2, 3]], [[-1, 0, 1, 2]]),
    "budget's width": ([[0, 1, 2, 3]], [[-1, 0, 0, 0]]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_trees_are_named(message: str) -> None:
    tokens, parents = map(torch.tensor, BAD[message])
    with pytest.raises(ValueError, match=message) as error:
        T.check(DraftTree(tokens, parents), torch.tensor([0]), Budget.of(3, 2, 2), 10)
    assert "row 0, node" in str(error.value)


def test_bad_draws_are_named() -> None:
    tokens, parents, law = torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]), torch.tensor([[[0.5, 0.0, 0.5]]])

    def check(node: int, kind: int, index: int, law: torch.Tensor, **options: bool) -> None:
        draws = Draws(*(torch.tensor([[x]]) for x in (node, kind, index)))
        T.check(DraftTree(tokens, parents, draws, law), torch.tensor([0]), Budget.of(1), 3, **options)

    with pytest.raises(ValueError, match="declared law has no mass"):
        check(1, 1, 0, law)
    with pytest.raises(ValueError, match="needs one of the 1 laws"):
        check(1, 1, 1, law)
    with pytest.raises(ValueError, match="must land on a drafted node"):
        check(2, 0, -1, law)
    with pytest.raises(ValueError, match="laws must be"):
        check(1, 1, 0, torch.ones(1, 1, 4))
    for wrong in ([0.5, 0.6, 0.5], [-0.5, 1.0, 0.5], [torch.nan, 1.0, 0.0]):
        with pytest.raises(ValueError, match="negative, NaN or does not sum to one"):
            check(1, 1, 0, torch.tensor([[wrong]]), sums=True)


def test_budget() -> None:
    budget = Budget.of([3, 0], [2, 5], 4)
    assert budget.width.tolist() == [4, 4]
    tight = budget.clamp(torch.tensor([1, -1]))
    assert tight.depth.tolist() == [1, 0] and tight.nodes.tolist() == [3, 0]
    with pytest.raises(ValueError, match="at least 0"):
        Budget.of(-1)
