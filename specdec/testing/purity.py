"""Checks that nothing was touched: the global random number generators, and the arguments of a call."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..base import Acceptor, Context, Drafter
from ..rng import Purpose, Source
from ..tree import check_answer
from ..types import Acceptance, Budget, Commit, DraftTree, Int64, Round, Verification

__all__ = [
    "DraftNoise", "RAISED", "Touched", "WatchedAcceptor", "WatchedDrafter", "generators_at_rest", "other_seed", "untouched",
]  # fmt: skip


RAISED = (Exception, SystemExit)
"""What a part under check may raise: it is the part that fails then, and not the check that ends. An interrupt still ends it."""


class Touched(AssertionError):
    """A call wrote into its arguments."""


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"torch's": torch.random.get_rng_state().tolist()}
    if "beartype" not in sys.modules:  # it draws from Python's generator to pick the items that it checks; `other_seed` does without
        states["Python's"] = random.getstate()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch.cuda's"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy's"] = (name, keys.tolist(), *rest)
    return states


@contextmanager
def generators_at_rest(error: type[Exception] = AssertionError) -> Iterator[None]:
    """Raise `error` if a global generator moves inside."""
    before = _generators()
    yield
    moved = [name for name, state in _generators().items() if before.get(name, state) != state]
    if moved:
        raise error(f"{' and '.join(moved)} global generator moved: draw through the source alone")


@contextmanager
def other_seed() -> Iterator[None]:
    """Another state of Python's generator inside, the old one afterwards: what depends on it comes out otherwise."""
    before = random.getstate()
    random.seed(0x5EED)
    try:
        yield
    finally:
        random.setstate(before)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a record, at any depth; whatever else it holds is immutable."""
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name), f"{name}.{f.name}")


@contextmanager
def untouched(**arguments: Any) -> Iterator[None]:
    """Raise `Touched` if a tensor in these records is written inside; the error names argument, field, and where it was written first: the
    row and, in what belongs to a tree, the node (draw, law) of that row."""
    before = [(name, tensor, tensor.clone()) for key, value in arguments.items() for name, tensor in _tensors(value, key)]
    yield
    for name, tensor, copy in before:
        if tensor.shape != copy.shape or not torch.equal(tensor.nan_to_num(nan=0.5), copy.nan_to_num(nan=0.5)):
            raise Touched(f"{name} was written{_place(name, tensor, copy)}: records are frozen, copy before changing")


_SECOND = {"node": "draw", "kind": "draw", "law": "draw", "laws": "law", "path": "place"}
"""What the second axis of a field counts, if not nodes."""


def _place(name: str, now: Tensor, before: Tensor) -> str:
    """Where two tensors of one record differ first."""
    if now.shape != before.shape:
        return f" (it was {list(before.shape)} and is {list(now.shape)})"
    changed = ((now != before) & ~((now != now) & (before != before))).nonzero()
    if not len(changed) or not now.ndim:
        return ""
    where = changed[0].tolist()
    second = _SECOND.get(name.rsplit(".", 1)[-1], "place" if name.startswith("commit") else "node")
    told = [f"row {where[0]}", *(f"{second} {i}" for i in where[1:2]), *(f"entry {i}" for i in where[2:3])]
    was, now_is = before[tuple(where)].item(), now[tuple(where)].item()
    return f" at {', '.join(told)} ({was:g}, now {now_is:g})"


class WatchedDrafter(Drafter):
    """A drafter whose arguments are checked to stay as they are."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.needs, self.draws, self.chains = inner, inner.needs, inner.draws, inner.chains
        self.fixed_widths = inner.fixed_widths

    def begin(self, ctx: Context) -> Any:
        return self.inner.begin(ctx)

    def propose(self, state: Any, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        with untouched(pending=pending, budget=budget):
            return self.inner.propose(state, pending, budget, source)

    def observe(self, state: Any, commit: Commit, round: Round | None = None) -> Any:
        with untouched(commit=commit, round=round):
            return self.inner.observe(state, commit, round)

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return self.inner.select(state, rows)


class DraftNoise(Source):
    """A source that hands a drafter its own noise alone. With coins and corrections it would know what decides about its draft."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner

    def accept(self, num: Tensor, den: Tensor, number: int, active: Tensor | None = None) -> Tensor:
        raise AssertionError("a drafter flipped an acceptor's coin; draw with source.categorical(weights, Purpose.DRAFT, number)")

    def categorical(self, weights: Tensor, purpose: Purpose, number: int, active: Tensor | None = None) -> Tensor:
        if purpose not in (Purpose.DRAFT, Purpose.TARGET):
            raise AssertionError(f"a drafter drew with Purpose.{purpose.name}; Purpose.DRAFT is its own")
        return self.inner.categorical(weights, purpose, number, active)

    def part(self, index: int) -> Source:
        return DraftNoise(self.inner.part(index))


class WatchedAcceptor(Acceptor):
    """An acceptor whose arguments are checked to stay as they are, and whose answers to be paths of the tree."""

    def __init__(self, inner: Acceptor) -> None:
        self.inner = inner
        for name in ("lossless", "takes", "greedy", "chains", "fixed_widths"):
            setattr(self, name, getattr(inner, name))

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        with untouched(tree=tree, verification=verification):
            answer = self.inner.accept(tree, verification, source)
        check_answer(tree, answer, verification.scores.shape[-1])
        return answer
