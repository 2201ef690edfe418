"""Reference drafters for the battery: every way of drawing that an acceptor may meet, over a draft model that is a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import Context, Drafter
from ..drafters.grow import Grower, Shape
from ..models.table import TableModel
from ..ragged import Ragged
from ..rng import Source
from ..types import Budget, Commit, DraftTree, Float, Int64, Round
from .tables import windows

__all__ = ["TableDrafter"]


class TableDrafter(Drafter):
    """Draws a tree from a table, level by level.

    Args:
        model: the draft model, of order 1 or more.
        levels: for each depth the children of one node in draw order, a letter each, see `specdec.drafters.grow`; or any shape of there.
        depth: how many levels of a shape are drawn at most; the letters say it themselves.
        other: a second draft model, from which capitals draw.
        merge: see `Grower`.
        uneven: no row drafts deeper than the id of its pending token, so that the rows of a batch differ in shape; below token 0 nothing
            is drafted.
        stop_below: a token less likely than this under the law that it was drawn from stays in the tree, but nothing is drawn below it.
        dtype: of the declared laws. They are the very weights drawn from.
    """

    def __init__(self, model: TableModel, levels: Sequence[str] | Shape, *, depth: int = 9, other: TableModel | None = None,
                 merge: bool = False, uneven: bool = False, stop_below: float = 0.0,
                 dtype: torch.dtype = torch.float64) -> None:  # fmt: skip
        self.levels = (repr(levels),) * depth if isinstance(levels, Shape) else tuple(levels)
        self.grower = levels if isinstance(levels, Shape) else Grower(self.levels, repeat=False, merge=merge)
        if self.grower.samplers > 1 and other is None:
            raise ValueError(f"levels: got {levels}; capitals need the argument other")
        self.model, self.other = model, other
        self.uneven, self.stop_below, self.dtype = uneven, stop_below, dtype
        self.draws, self.chains = self.grower.draws, self.grower.chains
        self.fixed_widths = True

    def begin(self, ctx: Context) -> Ragged:
        return Ragged.empty(ctx.batch)

    def observe(self, state: Ragged, commit: Commit, round: Round | None = None) -> Ragged:
        state.extend(commit.tokens, commit.count)
        return state

    def select(self, state: Ragged, rows: Sequence[int]) -> Ragged:
        return state.select(rows)

    def propose(self, state: Ragged, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        growth = self.grower.begin(pending, Budget(budget.nodes, budget.depth.clamp_max(len(self.levels)), budget.width))
        while growth.more:
            shape = len(pending), growth.last.stop - growth.last.start
            open = torch.ones(shape, dtype=torch.bool) if growth.height == 0 else growth.likelihood() >= self.stop_below
            if self.uneven:
                open = open & (growth.height < pending)[:, None]
            laws = self._laws(self.model, state, growth)
            growth.level(laws, source, open, None if self.other is None else self._laws(self.other, state, growth))
        return growth.tree()

    def _laws(self, model: TableModel, history: Ragged, growth: Any) -> Float[Tensor, "B P V"]:
        """What follows the nodes of the last level."""
        context = windows(history, growth.tokens, growth.parents, model.order)[:, growth.last]
        return model.law(context.flatten(0, 1)).to(self.dtype).unflatten(0, context.shape[:2])
