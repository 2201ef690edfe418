"""Heads that read pairs: a token, and the target's hidden states at the token before it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..types import Bool, Float, Int64
from .draft import DraftHead, HeadConfig, Output
from .parts import attend

__all__ = ["LayerHead", "PairConfig", "PairHead", "Write"]

Write = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Puts a layer's new keys and values `[B, Hkv, T, D]` into a cache, and gives all that it holds, `[B, Hkv, S, D]`."""


@runtime_checkable
class PairConfig(HeadConfig, Protocol):
    """What else has to be known of a head that reads pairs."""

    @property
    def own_embedding(self) -> bool: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


class PairHead(DraftHead):
    """Reads pairs of a token and the target's features of the token before it; says which token comes next.

    The pair at position t is (token t + 1, feature t). What the layer says of it takes the place of the next feature where the target's own
    is not known yet.
    """

    config: PairConfig

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
