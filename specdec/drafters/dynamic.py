"""A tree of the most likely nodes, found level by level and ranked at the end (EAGLE-2, Li et al. 2024, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rng import Source
from ..tree import root_only
from ..types import PAD, ROOT, Bool, Budget, DraftTree, Float, Int64, sent

__all__ = ["Ranking"]


class Ranking:
    """A tree on its way, with the attributes and methods of a `Growth`.

    A node's worth is the chance of its whole path. Of each level the `width` worthiest are *explored*: they are shown as `tokens` and
    `parents`, and what follows them is asked for. All that was met on the way takes part in the final ranking, of which `tree` keeps as
    many as a row's budget has nodes. A child is worth no more than its parent and comes later, so whoever is kept has its parents.

    Nothing here waits for a device.
    """

    def __init__(self, width: int, pending: Int64[Tensor, " B"], budget: Budget) -> None:
        device, some = pending.device, torch.where(budget.nodes > 0, budget.depth, 0)
        self._depth, self._nodes = int(some.max()) if len(some) else 0, int(budget.nodes.max()) if len(some) else 0
        # Of a level no more are kept than the budget has nodes, and what is kept is among the worthiest.
        self._width = min(width, self._nodes)
        self._limits = [sent(part, device)[:, None] for part in (some, budget.nodes, budget.width)]
        zero = torch.zeros_like(pending)[:, None]
        self.tokens, self.parents = pending[:, None], torch.full_like(zero, ROOT)
        """Of what is explored."""
        self._worth = zero.to(torch.float64)
        """Of the explored nodes of the last level: the logarithm."""
        self._own = self._worth
        """The same of their tokens alone, after what lies above."""
        self._met = zero
        """Which of all that was met they are; 0 is the root."""
        self._all: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of each level all that was met: tokens, parents among all that was met, worth."""
        self._pending, self._count, self.height, self.last = pending, 1, 0, slice(0, 1)

    @property
    def more(self) -> bool:
        """Whether some row has room for another level."""
        return self.height < self._depth

    def likelihood(self) -> Float[Tensor, "B P"]:
        """How likely each token of the last level is after those above it."""
        return self._own.exp()

    def level(self, laws: Float[Tensor, "B P V"], source: Source, open: Bool[Tensor, "B P"] | None = None,
              other: Float[Tensor, "B P V"] | None = None, floor: float = 0.0, ids: Int64[Tensor, " V"] | None = None) -> None:  # fmt: skip
        """See `Growth.level`. Scores, whose `floor` is -inf, are normalised here; a second model is not asked."""
        depth, _, wide = self._limits
        logs = laws.log_softmax(-1) if floor < 0 else laws.log()
        own, token = logs.topk(min(self._width, laws.shape[2]), -1)
        own, rank = own.double().masked_fill(own.isnan(), -torch.inf).clamp_max(0), torch.arange(own.shape[2], device=own.device)
        worth = own + self._worth[..., None]
        shut = (rank >= wide)[:, None] | (depth <= self.height)[:, None]
        worth = worth.masked_fill(shut if open is None else shut | ~open[..., None], -torch.inf).flatten(1)
        token = (token if ids is None else ids[token]).flatten(1)
        token = torch.where(worth.isneginf(), 0, token)
        self._all.append((token, self._met.repeat_interleave(len(rank), 1), worth))
        # A stable sort keeps elder ones first among equals, so that no row's choice depends on what stands beside it.
        best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : self._width]
        explored = best // len(rank) + self.last.start
        self._own, self._worth, self._met = own.flatten(1).gather(1, best), worth.gather(1, best), best + self._count
        self._count += worth.shape[1]
        self.last = slice(self.tokens.shape[1], self.tokens.shape[1] + best.shape[1])
        self.tokens = torch.cat([self.tokens, token.gather(1, best)], 1)
        self.parents = torch.cat([self.parents, torch.where(self._worth.isneginf(), PAD, explored)], 1)
        self.height += 1

    def tree(self) -> DraftTree:
        """The worthiest of all that was met, in the order in which it was met."""
        if not self._all:
            return root_only(self._pending)
        token, parent, worth = (torch.cat(parts, 1) for parts in zip(*self._all, strict=True))
        size = min(self._nodes, worth.shape[1])
        order = worth.sort(dim=-1, descending=True, stable=True).indices[:, :size]
        kept = torch.arange(size, device=order.device) < self._limits[1]
        kept = kept & ~worth.gather(1, order).isneginf()
        # What is not kept goes behind all that is.
        order = torch.where(kept, order, worth.shape[1]).sort(-1).values
        kept = order < worth.shape[1]
        order = order.clamp_max(worth.shape[1] - 1)
        column = torch.zeros(len(worth), worth.shape[1] + 1, dtype=torch.int64, device=worth.device)
        place = torch.arange(1, size + 1, device=worth.device).expand_as(order)
        column.scatter_(1, torch.where(kept, order + 1, 0), torch.where(kept, place, 0))
        column[:, 0] = 0
        above = column.gather(1, parent.gather(1, order))
        tokens = torch.cat([self._pending[:, None], torch.where(kept, token.gather(1, order), 0)], 1)
        parents = torch.cat([torch.full_like(self._pending, ROOT)[:, None], torch.where(kept, above, PAD)], 1)
        return DraftTree(tokens, parents, height=self.height)
