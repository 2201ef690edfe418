"""Text goes into a cache: the prompt, what a draft model has not read yet, and the token that it drafted last."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Int64, sent
from .full import FullCache
from .target import CausalTarget

__all__ = ["read"]


def read(model: CausalTarget, cache: FullCache, tokens: Int64[Tensor, "B T"], count: Int64[Tensor, " B"], *, logits: bool,
         layers: tuple[int, ...] = ()) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """One pass over the first `count` tokens of each row, T >= 1 at the most, which the cache then holds.

    What stands behind them is scrap. It takes part in the pass, so it is read as token 0 at the position of its row's last token: an
    id or a position of its own might be none of the model's. An id that the model does not know is read as token 0 too, for a draft
    model may have a smaller vocabulary than the text.

    Args:
        tokens: on any device.
        count: on the CPU; 0 leaves a row as it was.
        logits, layers: what is wanted, see `CausalTarget.forward`. Logits are as wide as the vocabulary, so of few tokens only.

    Returns:
        Logits `[B, T, V]` and features `[B, T, F]`, or `None` where they were not wanted; behind a row's `count` they mean nothing.
    """
    facts, (batch, width) = model.facts, tokens.shape
    steps, lengths = torch.arange(width, device="cpu"), torch.tensor(cache.lengths, device="cpu")[:, None]
    positions = torch.minimum(lengths + steps, (lengths + count[:, None] - 1).clamp_min(0))
    real = sent(steps < count[:, None], tokens.device) & (tokens >= 0) & (tokens < facts.vocab_size)
    cache.open(width)
    # Causal masks of several tokens are left to the model for the prompt alone: with them goes its own attention, see `HFTarget`.
    plain = cache.aligned and (width == 1 or not logits)
    mask = None if plain else cache.mask(sent((steps <= steps[:, None]).expand(batch, -1, -1), facts.device))
    ids = sent(torch.where(real, tokens, 0), facts.device)
    found = model.forward(ids, sent(positions, facts.device), mask, cache, logits=logits, layers=layers)
    cache.commit(steps.expand(batch, -1), count)
    return found
