"""Heads that read pairs: a token, and the target's hidden states at the token before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..types import Bool, Float, Int64, TargetFacts
from .parts import attend

__all__ = ["HeadConfig", "LayerHead", "Output", "PairConfig", "PairHead", "Write", "fits"]

Write = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Puts a layer's new keys and values `[B, Hkv, T, D]` into a cache, and gives all that it holds, `[B, Hkv, S, D]`."""


Output = Callable[[Tensor], Tensor]
"""An output head: from hidden states `[..., d]` to scores."""


@runtime_checkable
class HeadConfig(Protocol):
    """What any drafter that reads the target has to know of its head."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Which hidden states of the target are read, as ids of input boundaries, see `specdec.types.Features`."""
        ...

    @property
    def normed(self) -> bool:
        """What is read has gone through the target's final norm: it is what the target's output head reads."""
        ...

    @property
    def shared(self) -> bool:
        """The target's output head ranks what can be drafted."""
        ...

    @property
    def target_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@runtime_checkable
class PairConfig(HeadConfig, Protocol):
    """What else has to be known of a head that reads pairs."""

    @property
    def own_embedding(self) -> bool: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


class PairHead(nn.Module, ABC):
    """Reads pairs of a token and the target's features of the token before it; says which token comes next.

    The pair at position t is (token t + 1, feature t). What the layer says of it takes the place of the next feature where the target's own
    is not known yet.
    """

    config: PairConfig
    offsets: Tensor
    """`offsets[i] + i` is the target's id of draft token i."""

    @property
    def weight(self) -> Tensor:
        """Some parameter: it lies where the head computes, in the precision that it computes in."""
        return next(self.parameters())

    @property
    def ids(self) -> Int64[Tensor, " Vd"]:
        """The target's id of each token that can be drafted."""
        return self.offsets + torch.arange(len(self.offsets), device=self.offsets.device)

    @abstractmethod
    def fuse(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows d"]:
        """The target's features, in the width of the head; which went through its final norm if the config is `normed`."""

    @abstractmethod
    def forward(self, embedded: Float[Tensor, "B T d"], hidden: Float[Tensor, "B T d"], positions: Int64[Tensor, "B T"],
                mask: Bool[Tensor, "B 1 T S"], write: Write) -> Float[Tensor, "B T d"]:  # fmt: skip
        """What is said of each pair: the hidden state that stands for the next feature.

        Args:
            hidden: fused features, or what was said before.
            mask: what each pair sees of what the cache holds once these are written.
        """

    @abstractmethod
    def rank(self, hidden: Float[Tensor, "*rows d"], output: Output) -> Float[Tensor, "*rows Vd"]:
        """Scores of what can be drafted after what was said. Where the config is `shared`, `output` makes them: of the target's output head
        the rows of these tokens."""


class LayerHead(PairHead):
    """A `PairHead` of one layer whose attention can be done by others, as training does it."""

    @abstractmethod
    def project(self, embedded: Float[Tensor, "B T d"], hidden: Float[Tensor, "B T d"],
                positions: Int64[Tensor, "B T"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """What the attention needs: the residual `[B, T, d]`, queries `[B, H, T, D]`, keys and values `[B, Hkv, T, D]`, rotated."""

    @abstractmethod
    def finish(self, residual: Float[Tensor, "B T d"], attended: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T d"]:
        """What the layer says, given what the attention found."""

    @abstractmethod
    def final(self, hidden: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """What the output head reads, of what was said."""

    def forward(self, embedded: Float[Tensor, "B T d"], hidden: Float[Tensor, "B T d"], positions: Int64[Tensor, "B T"],
                mask: Bool[Tensor, "B 1 T S"], write: Write) -> Float[Tensor, "B T d"]:  # fmt: skip
        """See `PairHead`."""
        residual, query, key, value = self.project(embedded, hidden, positions)
        keys, values = write(0, key, value)
        return self.finish(residual, attend(query, keys, values, mask))


def fits(config: HeadConfig, facts: TargetFacts) -> None:
    """ValueError if a head like this was made for another target than these are the facts of."""
    pairs = [("hidden_size", config.target_hidden_size, facts.hidden_size), ("vocab_size", config.vocab_size, facts.vocab_size)]
    for name, mine, theirs in pairs:
        if theirs is not None and mine != theirs:
            raise ValueError(f"head: its target has {name} {mine}, this one {theirs}: it was trained for another target")
    if facts.num_layers is not None and not all(0 <= layer <= facts.num_layers for layer in config.layers):
        raise ValueError(f"head: it reads layers {config.layers}; this target has the input boundaries 0 to {facts.num_layers}")
