"""Plain decoding as a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..base import Context, Drafter
from ..rng import Source
from ..tree import root_only
from ..types import Budget, Commit, DraftTree, Int64, Round

__all__ = ["NullDrafter"]


class NullDrafter(Drafter):
    """Drafts nothing: every round is one step of plain autoregressive decoding, through the very loop that a method is timed in."""

    chains = True

    def begin(self, ctx: Context) -> None:
        return None

    def propose(self, state: None, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        return root_only(pending)

    def observe(self, state: None, commit: Commit, round: Round | None = None) -> None:
        return None

    def select(self, state: None, rows: Sequence[int]) -> None:
        return None
