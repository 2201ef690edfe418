"""Negative controls: drafters with one fault each, the check that must reject them, and the honest drafter beside them.

Most of these faults were shipped somewhere. A check that lets its mutant pass is worth nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base import Acceptor, Context, ContextDrafter, Drafter
from ..drafters.grow import Shape, dynamic
from ..models.table import TableModel
from ..ragged import Ragged
from ..rng import Purpose, Source
from ..tree import chain
from ..types import ROOT, Budget, Commit, DraftTree, Draws, Int64, Kind, Round
from .drafters import TableDrafter
from .mutant_trees import (
    as_iid,
    as_points,
    as_sampled,
    best_kept,
    multiplicity_forgotten,
    other_temperature,
    raw_law,
    reranked,
    resorted,
    second_after_first,
    unlikely_dropped,
)  # fmt: skip
from .tables import windows

__all__ = ["Mutant", "mutant_drafters"]


@dataclass(frozen=True)
class Mutant:
    """A part with a fault."""

    part: Drafter | Acceptor
    check: str
    """The check of `checks_for` that must reject it."""
    honest: Drafter | Acceptor
    """The same part without the fault, which must pass that check."""
    says: str
    """What the check says, as a regular expression: the mutant must fail for its own fault."""


_OFF = "off by [0-9.]+e-0[12]"


class _Held(Drafter):
    """A drafter that changes what another one does in one way: its tree, or the source it draws from."""

    def __init__(self, inner: Drafter, alter: Callable[[DraftTree], DraftTree] = lambda tree: tree,
                 source: Callable[[Source], Source] = lambda source: source, fixed_widths: bool = False) -> None:  # fmt: skip
        self.inner, self.alter, self.source, self.fixed_widths = inner, alter, source, fixed_widths
        self.draws = frozenset(Kind) if not fixed_widths else inner.draws

    def begin(self, ctx: Context) -> Any:
        return self.inner.begin(ctx)

    def propose(self, state: Any, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        return self.alter(self.inner.propose(state, pending, budget, self.source(source)))

    def observe(self, state: Any, commit: Commit, round: Round | None = None) -> Any:
        return self.inner.observe(state, commit, round)

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return self.inner.select(state, rows)


class _CorrectionNoise(Source):
    """Draws the draft with the noise of the correction (seen as: the recovery draw re-uses the draft's noise vector)."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner

    def accept(self, num: Tensor, den: Tensor, number: int, active: Tensor | None = None) -> Tensor:
        return self.inner.accept(num, den, number, active)

    def categorical(self, weights: Tensor, purpose: Purpose, number: int, active: Tensor | None = None) -> Tensor:
        return self.inner.categorical(weights, Purpose.NEXT, number, active)

    def part(self, index: int) -> Source:
        return _CorrectionNoise(self.inner.part(index))


class _Guess(ContextDrafter):
    """Drafts what a function of all rows and the budget says."""

    def __init__(self, guess: Callable[[list[Tensor], Budget], Any]) -> None:
        self._guess = guess

    def guess(self, ids: list[Tensor], budget: Budget) -> Any:
        return self._guess(ids, budget)


def _memory() -> Callable:
    seen: list[int] = []

    def guess(ids: list[Tensor], budget: Budget) -> list[list[int]]:
        seen.extend(int(row[-1]) for row in ids)
        return [[seen[-len(ids) - 1]] if len(seen) > len(ids) else [] for _ in ids]

    return guess


class _Careless(Drafter):
    """Guesses that the last token is said again; `select` and `observe` may be done wrong."""

    def __init__(self, *, deaf: bool = False, writes: bool = False) -> None:
        self.deaf, self.writes = deaf, writes

    def begin(self, ctx: Context) -> Ragged:
        return Ragged.empty(ctx.batch)

    def propose(self, state: Ragged, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        before = [int(state.row(row)[-1]) if state.lengths[row] else 0 for row in range(len(pending))]
        return chain([[token][:room] for token, room in zip(before, budget.nodes.tolist(), strict=True)], pending)

    def observe(self, state: Ragged, commit: Commit, round: Round | None = None) -> Ragged:
        state.extend(commit.tokens, commit.count)
        if self.writes:
            commit.tokens.fill_(0)
        return state

    def select(self, state: Ragged, rows: Sequence[int]) -> Ragged:
        return Ragged(state.ids[: len(rows)], state.lengths[: len(rows)]) if self.deaf else state.select(rows)


class _Leftovers(Drafter):
    """Offers the token that was rejected in the last round again, as if it had been drawn anew."""

    draws = frozenset({Kind.IID})

    def __init__(self, model: TableModel, *, again: bool) -> None:
        self.inner, self.again = TableDrafter(model, "i"), again

    def begin(self, ctx: Context) -> tuple[Ragged, list[int | None]]:
        return self.inner.begin(ctx), [None] * ctx.batch

    def propose(self, state: tuple[Ragged, list[int | None]], pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        tree = self.inner.propose(state[0], pending, budget, source)
        tokens = tree.tokens.clone()
        for row, token in enumerate(state[1]):
            if token is not None and self.again:
                tokens[row, 1] = token
        return replace(tree, tokens=tokens)

    def observe(self, state: Any, commit: Commit, round: Round | None = None) -> Any:
        rejected: list[int | None] = list(state[1])
        if round is not None:
            rejected = [None if accepted else int(token) for accepted, token in zip(round.accepted, round.tree.tokens[:, -1], strict=True)]
        return self.inner.observe(state[0], commit, round), rejected

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return self.inner.select(state[0], rows), [state[1][row] for row in rows]


class _Debtor(Drafter):
    """Says a fair coin aloud in every other round, as a chosen token 0 or 1, and lets it decide in which direction the law of the round
    behind it is wrong. Only where the coin was rejected for another token than 0 and 1: there the text does not tell how it fell, and the
    two errors cancel."""

    draws = frozenset({Kind.POINT, Kind.IID})
    chains = True

    def __init__(self, model: TableModel, *, error: float) -> None:
        self.inner, self.model, self.error = TableDrafter(model, "i"), model, error

    def begin(self, ctx: Context) -> tuple[Ragged, list[int | None]]:
        return self.inner.begin(ctx), [None] * ctx.batch

    def propose(self, state: Any, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        history, coins = state
        there = budget.chain > 0
        first = torch.tensor([coin is None for coin in coins])
        fair = torch.tensor([[0.5, 0.5, *[0.0] * (self.model.vocab_size - 2)]], dtype=torch.float64).expand(len(coins), -1)
        law = self.model.law(windows(history, pending[:, None], torch.full_like(pending[:, None], ROOT), self.model.order)[:, 0])
        sign = torch.tensor([[(0, 1, -1)[0 if coin is None else 1 + coin]] for coin in coins]) * self.error
        least = law[:, :2].amin(-1, keepdim=True)
        bent = torch.cat([law[:, :1] + sign * least, law[:, 1:2] - sign * least, law[:, 2:]], -1)
        token = source.categorical(torch.where(first[:, None], fair, bent), Purpose.DRAFT, 0, there)
        tree = chain([[t] if on else [] for t, on in zip(token.tolist(), there.tolist(), strict=True)], pending)
        kind = torch.where(first, int(Kind.POINT), int(Kind.IID))[:, None].expand_as(tree.draws.node)
        draws = Draws(tree.draws.node, kind, torch.where(kind == Kind.IID, 0, -1))
        return replace(tree, draws=draws, laws=law[:, None])

    def observe(self, state: Any, commit: Commit, round: Round | None = None) -> Any:
        coins: list[int | None] = [None] * len(state[1])
        for row, new in enumerate(round.emitted if round is not None else ()):
            told = state[1][row] is None and round.tree.tokens.shape[1] > 1 and round.accepted[row] == 0 and new[-1] > 1
            coins[row] = int(round.tree.tokens[row, 1]) if told else None
        return self.inner.observe(state[0], commit, round), coins

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return self.inner.select(state[0], rows), [state[1][row] for row in rows]


def mutant_drafters() -> dict[str, Mutant]:
    """Every faulty drafter by the name of its fault, for a vocabulary of 4."""
    full = TableModel.random(4, 2, seed=1)
    some = TableModel.random(4, 2, seed=2, zeros=0.5)
    sampled, siblings = TableDrafter(full, "i"), TableDrafter(full, ["ii", "i"])

    def altered(levels: Sequence[str] | Shape, alter: Callable[[DraftTree], DraftTree], check: str = "declared-law",
                model: TableModel = full, merge: bool = False) -> Mutant:  # fmt: skip
        honest = TableDrafter(model, levels, merge=merge)
        return Mutant(_Held(honest, alter), check, honest, _OFF)

    def ranked(check: str) -> Mutant:
        return Mutant(_Held(siblings, reranked), check, _Held(siblings, lambda tree: as_points(reranked(tree))), _OFF)

    def guessing(check: str, says: str, guess: Callable) -> Mutant:
        return Mutant(_Guess(guess), check, _Guess(lambda ids, budget: [[int(row[-1])] for row in ids]), says)

    return {
        "drawn at another temperature": altered("ii", other_temperature),
        "drawn from top-k, raw law declared": altered("ii", raw_law, model=some),
        "argmax declared as a sample": altered("pp", as_sampled),
        "dynamic tree declared as samples": altered(dynamic(2), as_sampled),
        "dynamic tree declared as samples, end to end": altered(dynamic(2), as_sampled, "law-RejectionAcceptor"),
        "unlikely token dropped": replace(altered("ii", unlikely_dropped), honest=TableDrafter(full, "ii", stop_below=0.3)),
        "siblings without replacement re-sorted": altered(["ww"], resorted),
        "siblings reranked": altered(["ww"], best_kept),
        "multiplicity of iid siblings forgotten": altered(["ii"], multiplicity_forgotten, merge=True),
        "without replacement declared iid": altered(["ww"], as_iid),
        "unlikely token dropped, end to end": altered("ii", unlikely_dropped, "law-RejectionAcceptor"),
        "siblings re-sorted, end to end": altered(["ww"], resorted, "law-RejectionAcceptor"),
        "multiplicity forgotten, end to end": altered(["ii"], multiplicity_forgotten, "law-RejectionAcceptor", merge=True),
        "without replacement declared iid, end to end": altered(["ww"], as_iid, "law-RejectionAcceptor"),
        "sampled tree reranked, under rejection": ranked("law-RejectionAcceptor"),
        "sampled tree reranked, under traversal": ranked("law-TraversalAcceptor"),
        "number of samples depends on a sample, said to be settled": Mutant(
            _Held(TableDrafter(full, ["ii"]), second_after_first, fixed_widths=True), "law-KSeqAcceptor", TableDrafter(full, ["ii"]), _OFF
        ),
        "draft shares the correction's noise": Mutant(
            _Held(sampled, source=_CorrectionNoise), "law-RejectionAcceptor", sampled, "AddressReuse.*purpose NEXT, number 0"
        ),
        "leftovers offered as fresh samples": Mutant(
            _Leftovers(full, again=True), "two-rounds", _Leftovers(full, again=False), "two rounds .* off by [0-9.]+e-01"
        ),
        "leftovers offered as fresh samples, by its state": Mutant(
            _Leftovers(full, again=True), "reachable-states", _Leftovers(full, again=False), "first round drafted .* off by [0-9.]+e-01"
        ),
        "errors that cancel between stories": Mutant(
            _Debtor(full, error=0.9), "reachable-states", _Debtor(full, error=0.0), "first round drafted .* off by [0-9.]+e-0[123]"
        ),
        "torch.rand": guessing("determinism", "torch's global", lambda ids, budget: torch.randint(4, (len(ids), 1)).tolist()),
        "random.random": guessing("determinism", "Python's global|the next time", lambda ids, budget: [[random.randrange(4)] for _ in ids]),
        "memory on the drafter": guessing("interleaving", "beside another batch", _memory()),
        "looks at its batch mates": guessing("batch-invariance", "in a batch", lambda ids, budget: [[int(ids[0][-1])] for _ in ids]),
        "ignores its budget": guessing("budget", "than the budget", lambda ids, budget: chain([[int(row[-1])] * 3 for row in ids])),
        "drafts against a budget of 0": guessing("empty-draft", "than the", lambda ids, budget: chain([[int(row[-1])] * 2 for row in ids])),
        "needs two tokens": guessing("short-context", "IndexError", lambda ids, budget: [[int(row[-2])] for row in ids]),
        "select keeps the first rows": Mutant(_Careless(deaf=True), "select", _Careless(), "after select"),
        "writes into the commit": Mutant(_Careless(writes=True), "arguments", _Careless(), "commit.tokens was written"),
    }
