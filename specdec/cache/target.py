"""What is asked of a model that writes into a `FullCache`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..types import Bool, Float, Int64, TargetFacts
from .full import FullCache

__all__ = ["CausalTarget", "Lender", "Lent", "Shortened", "causal_target", "copy_cache"]


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


@runtime_checkable
class Shortened(Protocol):
    """A `CausalTarget` that can be had with its first layers alone."""

    def first(self, layers: int) -> CausalTarget:
        """The first `layers` decoder layers, then the final norm and the head; the weights are shared. ValueError if it has fewer."""
        ...


@dataclass(frozen=True)
class Lent:
    """What a draft head may use of its target: the modules themselves, of which nothing is copied or changed."""

    embed: Callable[[Int64[Tensor, "*rows"]], Float[Tensor, "*rows D"]]
    norm: Callable[[Float[Tensor, "*rows D"]], Float[Tensor, "*rows D"]]
    """The final one. What goes into it is the feature of the last input boundary."""
    head: Callable[[Float[Tensor, "*rows D"]], Float[Tensor, "*rows V"]]
    """From what the norm says to a ranking of tokens. What the model does to it before it is logits is not part of it, see
    `specdec.cache.output_rows`."""
    layer: Mapping[str, Tensor]
    """The parameters of the last decoder layer, by the names that Llama's have."""
    config: Mapping[str, Any]
    """What the target is made of, by the names that Llama's configs have."""


@runtime_checkable
class Lender(Protocol):
    """A `CausalTarget` whose embedding and output head a draft head can share."""

    def lend(self) -> Lent:
        """ValueError if they can't be found."""
        ...


@singledispatch
def copy_cache(cache: Any, mask: Bool[Tensor, "B L"] | None, name: str) -> FullCache:
    """A `FullCache` with a copy of what another kind of cache holds. Kinds of cache are registered where they are known.

    Args:
        mask: which of the tokens that the cache was made from, and of those to follow, are no padding; `None` if none is.
        name: what the user calls the cache.

    Raises:
        TypeError: it is not clear how to read the cache.
        ValueError: it is known what it is, and it can't be taken over.
    """
    raise TypeError(f"{name}: got {type(cache).__name__}; allowed are a specdec.Session and a cache of Hugging Face transformers")


@singledispatch
def causal_target(model: Any) -> CausalTarget:
    """The `CausalTarget` that a user's model is, or stands behind. Kinds of model are registered where they are known.

    Raises:
        TypeError: it is not clear how to run the model.
        ValueError: it is known what it is, and it can't be used.
    """
    if isinstance(model, CausalTarget):
        return model
    raise TypeError(
        f"model: got {type(model).__name__}; allowed are a decoder-only model of Hugging Face transformers (unwrapped: not compiled, no "
        "PEFT or data-parallel wrapper) and objects with facts, new_cache and forward as in specdec.cache.CausalTarget"
    )
