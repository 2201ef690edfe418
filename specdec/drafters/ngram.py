"""Prompt lookup: what followed last time the text looked like this?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..base import Context, Drafter
from ..rng import Source
from ..tree import chain
from ..types import Budget, Commit, DraftTree, Int64, Round

__all__ = ["NGramDrafter"]

CHOICES = ("recent", "first", "frequent")
_VOTERS = 16


@dataclass
class _Row:
    """The tokens of one row and, for every n-gram in them, the places right behind it."""

    ids: list[int] = field(default_factory=list)
    behind: dict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))

    def append(self, token: int, sizes: range) -> None:
        here = len(self.ids)
        for n in sizes:
            if n <= here:
                self.behind[tuple(self.ids[here - n :])].append(here)
        self.ids.append(token)


class NGramDrafter(Drafter):
    """Copies what followed an earlier occurrence of the last few tokens (Saxena 2023, "prompt lookup decoding").

    An index is extended token by token, so a round costs the same however long the context is. The longest n-gram with a match wins.
    A copy that reaches the end of the text goes on with itself, so that a repeated pattern is drafted to any length.

    Args:
        max_ngram: longest n-gram looked up.
        min_ngram: shortest.
        choice: among several matches: "recent" (the last), "first", or "frequent" (what followed most often lately).
    """

    chains = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, choice: str = "recent") -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram, max_ngram: got {min_ngram}, {max_ngram}; wanted 1 <= min_ngram <= max_ngram")
        if choice not in CHOICES:
            raise ValueError(f"choice: got {choice!r}, allowed are {', '.join(CHOICES)}")
        self.choice = choice
        self._sizes = range(min_ngram, max_ngram + 1)

    def begin(self, ctx: Context) -> list[_Row]:
        return [_Row() for _ in range(ctx.batch)]

    def propose(self, state: list[_Row], pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        rows = zip(state, pending.tolist(), budget.chain.tolist(), strict=True)
        return chain([self._continue(row, token, length) for row, token, length in rows], pending)

    def _continue(self, row: _Row, pending: int, length: int) -> list[int]:
        tail = [*row.ids[-self._sizes.stop :], pending]
        for n in reversed(self._sizes):
            places = row.behind.get(tuple(tail[-n:]), []) if n <= len(tail) else []
            # the pending token may itself follow the n-gram that it ends; it is indexed when it is committed
            newest = [len(row.ids)] if n < len(tail) and tail[-n - 1 : -1] == tail[-n:] else []
            if places or newest:
                break
        else:
            return []
        start = places[0] if self.choice == "first" and places else self._pick(row, pending, [*places[-_VOTERS:], *newest])
        known = [*row.ids[start : start + length], *([pending] if start + length > len(row.ids) else [])]
        return [known[i % len(known)] for i in range(length)]

    def _pick(self, row: _Row, pending: int, lately: list[int]) -> int:
        if self.choice != "frequent":
            return lately[-1]
        follows = {place: row.ids[place] if place < len(row.ids) else pending for place in reversed(lately)}
        favourite = Counter(follows.values()).most_common(1)[0][0]
        return next(place for place, token in follows.items() if token == favourite)

    def observe(self, state: list[_Row], commit: Commit, round: Round | None = None) -> list[_Row]:
        for row, tokens, count in zip(state, commit.tokens.tolist(), commit.count.tolist(), strict=True):
            for token in tokens[:count]:
                row.append(token, self._sizes)
        return state

    def select(self, state: list[_Row], rows: Sequence[int]) -> list[_Row]:
        return [state[row] for row in rows]

    def resume(self, state: list[_Row], ctx: Context, keep: Sequence[int]) -> list[_Row] | None:
        return state if [len(row.ids) for row in state] == list(keep) else None  # an index is not unlearnt
