"""A language model that is a table: its law can be written down, so whatever decodes it can be checked to the last digit."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Float, Int64

__all__ = ["TableModel"]


class TableModel:
    """A target whose law depends on the last `order` tokens.

    Args:
        probs: `[V] * order + [V]` float64, the law after each context, oldest token first. Contexts shorter than `order` are filled up
            with token 0 on the left.
    """

    def __init__(self, probs: Float[Tensor, "*context V"]) -> None:
        self.probs = probs.double()
        self.vocab_size = probs.shape[-1]
        self.order = probs.ndim - 1

    @classmethod
    def random(cls, vocab_size: int, order: int, seed: int, *, zeros: float = 0.0, sharpness: float = 1.5) -> TableModel:
        """Softmax of Gaussian logits of this standard deviation; a share `zeros` of the entries has probability 0, never all of a row."""
        g = torch.Generator().manual_seed(seed)
        shape = (vocab_size,) * order + (vocab_size,)
        logits = sharpness * torch.randn(shape, generator=g, dtype=torch.float64)
        drop = torch.rand(shape, generator=g, dtype=torch.float64) < zeros
        keep = torch.nn.functional.one_hot(logits.argmax(-1), vocab_size).bool()
        return cls(torch.softmax(logits.masked_fill(drop & ~keep, -torch.inf), -1))

    def __call__(self, ids: Int64[Tensor, "R L"]) -> Float[Tensor, "R V"]:
        """Log-probabilities after each row."""
        return self.law(ids).log()

    def law(self, ids: Int64[Tensor, "R L"]) -> Float[Tensor, "R V"]:
        """Probabilities after each row."""
        if self.order == 0:
            return self.probs.expand(len(ids), -1)
        context = torch.nn.functional.pad(ids, (self.order, 0))[:, -self.order :]
        return self.probs[tuple(context.unbind(-1))]
