"""Hypothesis strategies: laws, trees of every shape, and what happens to them in a sequence of rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..tree import from_lists, path_to
from ..types import DraftTree, Draws, Float, Int64, Kind

__all__ = ["laws", "pairs_of_laws", "picks", "texts", "trees"]

Draw = Callable[..., Any]
"""What `st.composite` hands in; its own type is a protocol that cannot be checked where annotations are executed."""


def laws(vocab_size: int) -> st.SearchStrategy[Float[Tensor, " V"]]:
    """A float64 law with small integer weights, so that zeros, ties and one-hot laws are common and shrink well."""
    weights = st.lists(st.integers(0, 4), min_size=vocab_size, max_size=vocab_size).filter(any)
    return weights.map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))


def pairs_of_laws(vocab_size: int) -> st.SearchStrategy[tuple[Float[Tensor, " V"], Float[Tensor, " V"]]]:
    """Two laws: unrelated, equal, or with disjoint support."""

    def disjoint(pair: Any) -> tuple[Tensor, Tensor]:
        weights, mine = pair[0] + 1, torch.tensor(pair[1])
        return (weights * mine) / (weights * mine).sum(), (weights * ~mine) / (weights * ~mine).sum()

    halves = st.lists(st.booleans(), min_size=vocab_size, max_size=vocab_size).filter(lambda b: any(b) and not all(b))
    one = laws(vocab_size)
    return st.one_of(st.tuples(one, one), one.map(lambda law: (law, law)), st.tuples(one, halves).map(disjoint))


@st.composite
def trees(draw: Draw, vocab_size: int, rows: int, *, nodes: int = 6, kinds: Sequence[Kind] = tuple(Kind),
          pending: Sequence[int] | None = None, probes: bool = True) -> DraftTree:  # fmt: skip
    """A well-formed tree per row: any parents, padding where rows differ in size, siblings with one token, several draws on a node, and
    nodes on which none landed. Laws are such that every draw could have been made; the tokens were not drawn from them.

    Args:
        nodes: the most drafted nodes in a row.
        kinds: of draw that may occur.
        pending: the token at each root; any if left out.
        probes: whether nodes without a draw may occur.
    """
    shapes = []
    for row in range(rows):
        size = draw(st.integers(0, nodes))
        parents = [-1, *(draw(st.integers(0, i)) for i in range(size))]
        tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=size + 1, max_size=size + 1))
        if pending is not None:
            tokens[0] = pending[row]
        shapes.append((tokens, parents))
    tree = from_lists(shapes)
    made = [_draws(draw, tokens, parents, vocab_size, kinds, probes) for tokens, parents in shapes]
    width = max(len(row) for row in made)
    told = [[(node, kind, -1 if law is None else m) for m, (node, kind, law) in enumerate(row)] for row in made]
    table = torch.tensor([row + [(-1, 0, -1)] * (width - len(row)) for row in told], dtype=torch.int64).reshape(rows, width, 3)
    node, kind, law = (part.contiguous() for part in table.unbind(-1))
    flat = torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64)
    kept = torch.stack([torch.stack([*(flat if d[2] is None else d[2] for d in row), *[flat] * (width - len(row)), flat]) for row in made])
    return DraftTree(tree.tokens, tree.parents, Draws(node, kind, law), kept)


def _draws(draw: Draw, tokens: Sequence[int], parents: Sequence[int], vocab_size: int, kinds: Sequence[Kind],
           probes: bool) -> list[tuple[int, int, Tensor | None]]:  # fmt: skip
    """Node, kind and law of the draws of one row. Each sampled draw has a law of its own, in which its token has mass."""
    made: list[tuple[int, int, Tensor | None]] = []
    for node in range(1, len(parents)):
        for _ in range(draw(st.integers(0 if probes else 1, 2))):
            kind = draw(st.sampled_from(sorted(kinds)))
            law = draw(laws(vocab_size).filter(lambda law, x=tokens[node]: bool(law[x] > 0))) if kind != Kind.POINT else None
            made.append((node, int(kind), law))
    return made


def texts(vocab_size: int, rows: int, *, least: int = 0, most: int = 4) -> st.SearchStrategy[list[list[int]]]:
    """A list of token ids for each row, of their own lengths."""
    return st.lists(st.lists(st.integers(0, vocab_size - 1), min_size=least, max_size=most), min_size=rows, max_size=rows)


@st.composite
def picks(draw: Draw, tree: DraftTree, *, none: bool = True) -> tuple[Int64[Tensor, "B N"], Int64[Tensor, " B"]]:
    """A path from the root to any node of each row and its length; with `none`, also a length of 0, which keeps the row as it was."""
    real = (tree.parents >= 0).tolist()
    ends = [draw(st.sampled_from([0, *(i for i, there in enumerate(row) if there)])) for row in real]
    path, count = path_to(tree.parents, torch.tensor(ends))
    kept = torch.tensor([draw(st.booleans()) if none else True for _ in ends])
    return path, torch.where(kept, count, 0)
