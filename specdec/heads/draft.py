"""What every head that drafts from the target's hidden states has."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..types import Int64, TargetFacts

__all__ = ["DraftHead", "HeadConfig", "Output", "fits"]

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


class DraftHead(nn.Module, ABC):
    """A network that drafts some of the target's tokens.

    Args:
        drafted: how many. They are the first of the target's, until `draft` says which.
    """

    config: HeadConfig
    offsets: Tensor
    """`offsets[i] + i` is the target's id of draft token i."""

    def __init__(self, drafted: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.zeros(drafted, dtype=torch.int64, device=device))

    @property
    def weight(self) -> Tensor:
        """Some parameter: it lies where the head computes, in the precision that it computes in."""
        return next(self.parameters())

    @property
    def ids(self) -> Int64[Tensor, " Vd"]:
        """The target's id of each token that can be drafted."""
        return self.offsets + torch.arange(len(self.offsets), device=self.offsets.device)

    def draft(self, ids: Int64[Tensor, " Vd"]) -> None:
        """Let draft token i stand for the target's token `ids[i]`."""
        self.offsets.copy_(ids - torch.arange(len(ids), device=ids.device))


def fits(config: HeadConfig, facts: TargetFacts) -> None:
    """ValueError if a head like this was made for another target than these are the facts of."""
    pairs = [("hidden_size", config.target_hidden_size, facts.hidden_size), ("vocab_size", config.vocab_size, facts.vocab_size)]
    for name, mine, theirs in pairs:
        if theirs is not None and mine != theirs:
            raise ValueError(f"head: its target has {name} {mine}, this one {theirs}: it was trained for another target")
    if facts.num_layers is not None and not all(0 <= layer <= facts.num_layers for layer in config.layers):
        raise ValueError(f"head: it reads layers {config.layers}; this target has the input boundaries 0 to {facts.num_layers}")
