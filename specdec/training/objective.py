"""Training-time test: the head reads what it will read when it drafts (Li et al. 2025, arXiv 2503.01840, section 3.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..heads import LayerHead
from ..types import Float

__all__ = ["distilled", "unrolled"]

_ROWS = 512
"""Positions whose scores over the vocabulary exist at one time."""


def unrolled(
    head: LayerHead, embedded: Float[Tensor, "B T d"], features: Float[Tensor, "B T F"], steps: int
) -> list[Float[Tensor, "B t d"]]:
    """What the output head reads at each step of a draft, at all positions at once.

    Step 0 reads the target's features. Step i reads what step i - 1 said, and tokens one further along: position t of it stands i tokens
    behind the last one whose features are known. It sees step 0 up to t, and of the steps between its own predecessors alone.

    Args:
        embedded: embeddings of the tokens, from position 0.
        features: of the target at the same tokens.

    Returns:
        For step i `[B, T - 2 - i, d]`; row t speaks of token t + 2 + i.
    """
    hidden, said = head.fuse(features)[:, :-2], []
    batch, width, _ = hidden.shape
    keys: list[Tensor] = []
    values: list[Tensor] = []
    causal = torch.ones(width, width, dtype=torch.bool, device=hidden.device).triu(1)
    for step in range(steps):
        width = embedded.shape[1] - 2 - step
        positions = torch.arange(step, step + width, device=hidden.device).expand(batch, -1)
        residual, query, key, value = head.project(embedded[:, 1 + step : -1], hidden[:, :width], positions)
        scale, groups = query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(groups, 1))
        values.append(value.repeat_interleave(groups, 1))
        scores = query @ keys[0][:, :, :width].transpose(2, 3) * scale
        scores = scores.masked_fill(causal[:width, :width], torch.finfo(scores.dtype).min)
        own = [(query * k[:, :, :width]).sum(-1, keepdim=True) * scale for k in keys[1:]]
        weights = torch.cat([scores, *own], -1).softmax(-1).to(query.dtype)
        attended = weights[..., :width] @ values[0][:, :, :width]
        for n, v in enumerate(values[1:]):
            attended = attended + weights[..., width + n, None] * v[:, :, :width]
        hidden = head.finish(residual, attended)
        said.append(head.final(hidden))
    return said


def distilled(said: Float[Tensor, "N d"], head: Float[Tensor, "Vd d"], truth: Float[Tensor, "N D"], target_head: Float[Tensor, "Vd D"],
              weight: Float[Tensor, " N"]) -> Float[Tensor, ""]:  # fmt: skip
    """The weighted sum of cross-entropies to the target's law over the draft vocabulary, renormalised there.

    Both output heads are part of it: a chunk of positions is scored and its gradient taken at once, so that nothing as wide as the
    vocabulary is kept.

    Args:
        said: what the draft head reads; gradients flow to it, and to `head` if that is learned too.
        truth: what the target's head reads at the same positions, `target_head` its rows of the draft vocabulary.
        weight: of each position; 0 leaves one out.
    """
    return _Distilled.apply(said, head, truth, target_head, weight)


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, said: Tensor, head: Tensor, truth: Tensor, target_head: Tensor, weight: Tensor) -> Tensor:
        low = truth.dtype
        rows, narrow = head.to(low), said.to(low)
        slope_said, slope_head = torch.zeros_like(said), torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        total = said.new_zeros((), dtype=torch.float32)
        for chunk in torch.arange(len(said), device=said.device).split(_ROWS):
            here = slice(int(chunk[0]), int(chunk[-1]) + 1)
            law = F.linear(truth[here], target_head).float().softmax(-1)
            scores = F.linear(narrow[here], rows).float()
            lot = scores.logsumexp(-1)
            total += (weight[here] * (lot - (law * scores).sum(-1))).sum()
            slope = scores.sub_(lot[:, None]).exp_().sub_(law).mul_(weight[here, None]).to(low)
            slope_said[here] = (slope @ rows).to(said.dtype)
            if slope_head is not None:
                slope_head += slope.T @ narrow[here]
        ctx.save_for_backward(slope_said, slope_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slope_said, slope_head = ctx.saved_tensors
        return grads[0] * slope_said, None if slope_head is None else grads[0] * slope_head, None, None, None
