"""How much to draft."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from ..base import Context, Planner
from ..types import Budget, Round

__all__ = ["FixedPlanner"]


class FixedPlanner(Planner):
    """The same budget every round.

    Args:
        nodes: drafted tokens a round.
        depth: of the tree; as deep as it has nodes if left out.
        width: children of one node; as many as there are nodes if left out.
    """

    def __init__(self, nodes: int, depth: int | None = None, width: int | None = None) -> None:
        self.nodes, self.depth, self.width = nodes, depth, width
        Budget.of(index(nodes), depth, width)  # refuses what is no budget

    def begin(self, ctx: Context) -> None:
        return None

    def plan(self, state: None, lengths: Sequence[int]) -> Budget:
        return Budget.of(self.nodes, self.depth, self.width, batch=len(lengths))

    def observe(self, state: None, round: Round) -> None:
        return None

    def select(self, state: None, rows: Sequence[int]) -> None:
        return None
