"""Tiny targets and draft models whose laws are tables, and the pairs of laws on which a fault shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from ..base import Context, Verifier
from ..models.table import TableModel
from ..ragged import Ragged
from ..types import Commit, DraftTree, Float, Int64, Scores, TargetFacts

__all__ = ["PAIRS", "LawPairs", "TableVerifier", "law_pairs", "windows"]


def windows(history: Ragged, tree_tokens: Int64[Tensor, "B N"], parents: Int64[Tensor, "B N"], order: int) -> Int64[Tensor, "B N order"]:
    """The last `order` tokens at every node, 0 before the beginning; what stands at padding means nothing."""
    lengths = torch.tensor(history.lengths)
    at = lengths[:, None] - order + 1 + torch.arange(order - 1)
    before = torch.where(at >= 0, history.ids.gather(1, at.clamp_min(0)), 0)
    found = [torch.cat([before, tree_tokens[:, :1]], 1)]
    rows = torch.arange(len(tree_tokens))
    for node in range(1, tree_tokens.shape[1]):
        above = torch.stack(found, 1)[rows, parents[:, node].clamp_min(0)]
        found.append(torch.cat([above[:, 1:], tree_tokens[:, node : node + 1]], 1))
    return torch.stack(found, 1)


@dataclass
class _State:
    history: Ragged
    tree: DraftTree | None = None


class TableVerifier(Verifier):
    """`SequentialVerifier` for a `TableModel` of order 1 or more, with one look-up for all rows and nodes, so that thousands of branches
    fit into a batch."""

    def __init__(self, model: TableModel) -> None:
        self.model = model
        self._facts = TargetFacts(model.vocab_size, torch.float64)

    @property
    def facts(self) -> TargetFacts:
        return self._facts

    def begin(self, ctx: Context) -> _State:
        if ctx.needs:
            raise ValueError(f"drafter: it reads target layers {ctx.needs.layers}, but a table has none; use TreeVerifier")
        return _State(Ragged.empty(ctx.batch))

    def extend(self, state: _State, tokens: Int64[Tensor, "B T"], count: Int64[Tensor, " B"]) -> Commit:
        state.history.extend(tokens, count)
        return Commit(tokens, count)

    def verify(self, state: _State, tree: DraftTree) -> Scores:
        state.tree = tree
        context = windows(state.history, tree.tokens, tree.parents, self.model.order)
        return Scores(self.model(context.flatten(0, 1)).unflatten(0, tree.tokens.shape))

    def commit(self, state: _State, path: Int64[Tensor, "B D"], count: Int64[Tensor, " B"]) -> Commit:
        tokens = state.tree.tokens.gather(1, path.clamp_min(0))
        state.history.extend(tokens, count)
        state.tree = None
        return Commit(tokens, count)

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        return _State(state.history.select(rows))


# ------------------------------------------------------------------------------------------------------------- pairs of laws

Law = Float[Tensor, " V"]
Maker = Callable[[torch.Generator, int], tuple[Law, Law]]


def _softmax(g: torch.Generator, size: int) -> Law:
    return torch.softmax(1.5 * torch.randn(size, generator=g, dtype=torch.float64), -1)


def _with_zeros(g: torch.Generator, size: int) -> Law:
    law = _softmax(g, size)
    kept = torch.rand(size, generator=g) < 0.6
    kept[torch.randint(size, (1,), generator=g)] = True
    return law * kept / (law * kept).sum()


def _one_hot(g: torch.Generator, size: int) -> Law:
    return torch.eye(size, dtype=torch.float64)[int(torch.randint(size, (1,), generator=g))]


def _ties(g: torch.Generator, size: int) -> Law:
    weights = torch.randint(1, 3, (size,), generator=g).double()
    return weights / weights.sum()


def _equal(g: torch.Generator, size: int) -> tuple[Law, Law]:
    law = _softmax(g, size)
    return law, law


def _close(g: torch.Generator, size: int) -> tuple[Law, Law]:
    law = _softmax(g, size)
    return law, (law + _softmax(g, size)) / 2


def _nearly(g: torch.Generator, size: int) -> tuple[Law, Law]:
    law = _softmax(g, size)
    return law, 0.999 * law + 0.001 * _softmax(g, size)


def _peaked(g: torch.Generator, size: int) -> Law:
    law = 1e-6 + torch.zeros(size, dtype=torch.float64)
    first, second = torch.randperm(size, generator=g)[:2].tolist()
    law[second] = 1e-3
    law[first] = 1 - 1e-3 - 1e-6 * (size - 2)
    return law


def _disjoint(g: torch.Generator, size: int) -> tuple[Law, Law]:
    law, mine = _softmax(g, size), torch.rand(size, generator=g).argsort() < size // 2
    return law * mine / (law * mine).sum(), law * ~mine / (law * ~mine).sum()


def _separately(target: Callable[..., Law], draft: Callable[..., Law]) -> Maker:
    return lambda g, size: (target(g, size), draft(g, size))


PAIRS: dict[str, Maker] = {
    "generic": _separately(_softmax, _softmax),
    "close": _close,
    "zeros": _separately(_with_zeros, _with_zeros),
    "one-hot target": _separately(_one_hot, _softmax),
    "disjoint": _disjoint,
    "equal": _equal,
    "ties": _separately(_ties, _ties),
    "one-hot draft": _separately(_softmax, _one_hot),
    "zeros in the target": _separately(_with_zeros, _softmax),
    "nearly equal": _nearly,
    "peaked": _separately(_peaked, _peaked),
}
"""Kinds of (target law, draft law). Faults among siblings need several generic or close pairs of 4 tokens or more to show: where the laws
are far apart, what one sibling leaves over is often enough to accept the next for certain."""


@dataclass(frozen=True)
class LawPairs:
    """A target, two draft models, and prompts below which the laws of both are of one kind each."""

    target: TableModel
    draft: TableModel
    other: TableModel
    prompts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]


@cache
def law_pairs(vocab_size: int, depth: int, seed: int = 0) -> LawPairs:
    """Prompts of two tokens, the first of them not 0, each with its own kind of laws for `depth` tokens below it.

    A context of `depth + 2` tokens filled up with zeros on the left tells which prompt it began with, so one table holds all pairs, and
    all prompts are rows of one batch. Further on the laws are generic, with the kind of whatever prompt the window seems to begin with.
    """
    prompts = list(product(range(1, vocab_size), range(vocab_size)))
    names = [name for _, name in zip(prompts, [*PAIRS, *["generic"] * len(prompts)], strict=False)]
    kind = dict(zip(prompts, names, strict=True))
    g, order = torch.Generator().manual_seed(seed), depth + 2
    tables = torch.empty(3, *(vocab_size,) * order, vocab_size, dtype=torch.float64)
    for window in product(range(vocab_size), repeat=order):
        begin = next((i for i, token in enumerate(window[:-1]) if token), None)
        make = PAIRS["generic" if begin is None else kind[window[begin], window[begin + 1]]]
        p, q = make(g, vocab_size)
        tables[(slice(None), *window)] = torch.stack([p, q, _softmax(g, vocab_size)])
    target, draft, other = map(TableModel, tables)
    return LawPairs(target, draft, other, tuple(prompts), tuple(names))
