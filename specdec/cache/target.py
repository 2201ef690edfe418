"""What is asked of a model that writes into a `FullCache`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from ..types import Bool, Int64, TargetFacts
from .full import FullCache

__all__ = ["CausalTarget"]


@runtime_checkable
class CausalTarget(Protocol):
    """A decoder-only model, as a tree verifier, or a drafter with a model of its own, wants it."""

    @property
    def facts(self) -> TargetFacts: ...

    def new_cache(self, batch: int) -> FullCache:
        """An empty cache for this many rows."""
        ...

    def forward(self, tokens: Int64[Tensor, "B T"], positions: Int64[Tensor, "B T"], mask: Bool[Tensor, "B 1 T slots"] | None,
                cache: FullCache, *, logits: bool, layers: tuple[int, ...] = ()) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """One pass over T tokens of each row; their keys and values are written to `cache`, where `open(T)` was called.

        Args:
            mask: what each token sees of the cache's slots; `None` for all earlier slots and its own.
            logits: whether they are wanted; the prompt does not need them.
            layers: input-boundary ids of the hidden states wanted, see `Features`.

        Returns:
            Raw logits `[B, T, V]` or `None`, and features `[B, T, F]` or `None` where no layers were asked for.
        """
        ...
