"""Text goes into a cache: the prompt, what a draft model has not read yet, and the token that it drafted last. Branches do not."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..tree import ancestors
from ..types import DraftTree, Float, Int64, sent
from .full import FullCache
from .target import CausalTarget, Lent

__all__ = ["look", "output_rows", "read"]


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


def look(model: CausalTarget, cache: FullCache, tree: DraftTree) -> Float[Tensor, "B n W"]:
    """One pass over the drafted nodes of a tree, of which the cache keeps nothing: the logits after nodes 1 to N - 1.

    The cache holds the root as each row's last token. Padding takes part as scrap, and nodes behind the model's last position mean nothing;
    an id that the model does not know is read as token 0, as in `read`.

    Args:
        tree: of two nodes or more, on any device.
    """
    facts, seen = model.facts, ancestors(tree.parents)
    real = (tree.parents >= 0) & (tree.tokens >= 0) & (tree.tokens < facts.vocab_size)
    ids = sent(torch.where(real, tree.tokens, 0)[:, 1:], facts.device)
    positions = sent(cache.lengths, seen.device)[:, None] - 2 + seen.sum(-1)[:, 1:]
    positions = positions.clamp(0, None if facts.max_positions is None else facts.max_positions - 1)
    cache.open(ids.shape[1])
    mask = None if ids.shape[1] == 1 and cache.aligned else cache.mask(sent(seen[:, 1:, 1:], facts.device))
    found, _ = model.forward(ids, sent(positions, facts.device), mask, cache, logits=True)
    cache.rewind(cache.lengths)
    return cast(Tensor, found)


def output_rows(model: CausalTarget, lent: Lent) -> Float[Tensor, "V D"] | None:
    """The matrix that makes the model's logits of what its final norm says: the weight of its output head, times a scale if it has one.
    `None` if no matrix does, as where logits are capped or a bias is added. It is found by looking."""
    weight = getattr(lent.head, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    last, size = cast(int, model.facts.num_layers), model.facts.vocab_size
    tokens = torch.arange(0, size, max(1, size // 16), device=model.facts.device)[None, :16]
    with torch.no_grad():
        count = torch.tensor([tokens.shape[1]], device="cpu")
        logits, hidden = read(model, model.new_cache(1), tokens, count, logits=True, layers=(last,))
        there = cast(Tensor, logits).flatten().double()
        here = torch.nn.functional.linear(lent.norm(cast(Tensor, hidden)), weight).flatten().double()
    scale = float(here @ there / (here @ here))
    if not float((there - scale * here).norm()) <= 0.01 * float(there.norm()):
        return None
    return weight.detach() if abs(scale - 1) < 0.01 else weight.detach() * scale
