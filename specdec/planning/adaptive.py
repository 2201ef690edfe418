"""Draft as much as has paid lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import index

from ..base import Context, Planner
from ..types import Budget, Round

__all__ = ["AdaptivePlanner"]

_WEIGHT = 1.0
"""Of the prior, in observations."""
_FIRST, _LATER = 0.4, 0.8
"""Acceptance to be expected before anything is known: of a round's first drafted token, and of one whose elders were accepted."""


_IDLE = 4
"""A round in which nothing was tried makes forget so many times less: it says nothing new, and trying again too soon costs."""


@dataclass
class _Row:
    """What a row has seen, with what is long past forgotten: drafted tokens accepted and tried, a round's first and later ones apart.
    Copied text stands or falls with its first token, so one rate for both would misjudge both."""

    first: float = 0.0
    firsts: float = 0.0
    later: float = 0.0
    laters: float = 0.0


class AdaptivePlanner(Planner):
    """Drafts of the depth that promises the most tokens in the time, by each row's own running acceptance; none where drafts do not
    pay. What was seen fades, so that a row that drafts nothing tries again after a while.

    With acceptance a at the first level and b at those behind it, k levels give 1 + a (1 - b^k) / (1 - b) tokens a round
    (Leviathan et al. 2023, eq. 1, where a = b).

    Args:
        nodes: levels of a draft at most, which are drafted tokens where it is a chain.
        first, more: what a round costs more for the first level, and for each further one, in rounds of plain decoding: of
            drafting and of verifying. The defaults suit copied drafts and small batches.
        spread: drafted tokens for each level, more than one for a tree.
        memory: what a round that tried something leaves of all that was seen before it, from 0 to below 1.
    """

    def __init__(self, nodes: int = 10, *, first: float = 0.1, more: float = 0.02, memory: float = 0.9,
                 spread: int = 1) -> None:  # fmt: skip
        Budget.of(index(nodes))  # refuses what is no budget
        if index(spread) < 1:
            raise ValueError(f"spread: got {spread}, allowed is a number of at least 1")
        if not (0 <= memory < 1 and first >= 0 and more >= 0):
            raise ValueError(f"first, more, memory: got {first}, {more}, {memory}; costs are at least 0, memory lies from 0 to below 1")
        self.nodes, self.first, self.more, self.memory, self.spread = nodes, first, more, memory, spread

    def begin(self, ctx: Context) -> list[_Row]:
        return [_Row() for _ in range(ctx.batch)]

    def plan(self, state: list[_Row], lengths: Sequence[int]) -> Budget:
        levels = [self._best(row) for row in state]
        return Budget.of([level * self.spread for level in levels], levels)

    def _best(self, row: _Row) -> int:
        chance = (row.first + _FIRST * _WEIGHT) / (row.firsts + _WEIGHT)
        again = (row.later + _LATER * _WEIGHT) / (row.laters + _WEIGHT)
        tokens, speed, best = 1.0, 1.0, 0
        for k in range(1, self.nodes + 1):
            tokens += chance
            chance *= again
            if tokens / (1 + self.first + self.more * (k - 1)) > speed:
                speed, best = tokens / (1 + self.first + self.more * (k - 1)), k
        return best

    def observe(self, state: list[_Row], round: Round) -> list[_Row]:
        return [self._learn(*pair) for pair in zip(state, round.accepted, round.attempted, strict=True)]

    def _learn(self, row: _Row, accepted: int, attempted: int) -> _Row:
        seen = (min(accepted, 1), min(attempted, 1), max(0, accepted - 1), max(0, attempted - 1))
        kept = self.memory if attempted else 1 - (1 - self.memory) / _IDLE
        return _Row(*(kept * old + new for old, new in zip(astuple(row), seen, strict=True)))

    def select(self, state: list[_Row], rows: Sequence[int]) -> list[_Row]:
        return [state[row] for row in rows]
