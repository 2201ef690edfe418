"""Is greedy text the same as `model.generate` gives, token for token? Where it is not, is that a proven tie?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import Drafter
from ..generation import generate

__all__ = ["Comparison", "audit_greedy", "compare", "tie_width"]

NEAR_TIE = 1e-4
"""Two logits closer than this may swap places between forwards of different shapes in float32; measured differences are 5e-5."""
_ULPS = 5
"""The same in half precision, in units in the last place of the best logit, the grid to which the sums behind logits are rounded. Measured:
the distance of a leading logit from the best differs by 1 unit in the median, 2.9 in 95 % and 4.6 in all of 144 places between a pass
over one token and one over the whole text (SmolLM2-135M, bfloat16)."""


@dataclass(frozen=True)
class Comparison:
    """How one text compares with the plain one."""

    verdict: str
    """"equal", "near_tie" or "different"."""
    position: int | None = None
    """New token at which they part."""
    gap: float | None = None
    """How far the worse of the two tokens lies below the plain forward's best logit there."""


def tie_width(dtype: torch.dtype, best: float) -> float:
    """How far a token may lie below the best logit of one forward and still win in another, by rounding alone.

    It wins there because its distance from the best became negative, so the distance here is at most what the distance of two logits
    differs by between forwards of different shapes. That is measured: as it is from float32 up, in units in the last place below.
    """
    eps = torch.finfo(dtype).eps
    if eps <= torch.finfo(torch.float32).eps or best == 0:
        return NEAR_TIE
    return _ULPS * eps * 2.0 ** math.floor(math.log2(abs(best)))


@torch.no_grad()
def compare(model: Any, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], near_tie: float | None = None) -> Comparison:
    """Compare two greedy continuations of a prompt. What follows a near-tie is another text, and is not judged.

    Args:
        near_tie: a gap of the logits up to this is one; left out, `tie_width` of the model's dtype.
    """
    if list(plain) == list(other):
        return Comparison("equal")
    at = next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), min(len(plain), len(other)))
    if at == min(len(plain), len(other)):
        return Comparison("different", at)
    ids = torch.tensor([[*prompt, *plain[:at]]], device=model.device)
    logits = model(input_ids=ids).logits[0, -1].double()
    gap = float(logits.max() - torch.minimum(logits[plain[at]], logits[other[at]]))
    width = tie_width(model.dtype, float(logits.max())) if near_tie is None else near_tie
    return Comparison("near_tie" if gap <= width else "different", at, gap)


def audit_greedy(
    model: Any, prompts: Sequence[Sequence[int]], drafter: Drafter, *, max_new_tokens: int, batch: int = 1
) -> Iterator[Comparison]:
    """Compare greedy decoding with a drafter, `batch` prompts at a time, with transformers' own plain decoding, one at a time."""
    for start in range(0, len(prompts), batch):
        group = [list(prompt) for prompt in prompts[start : start + batch]]
        ours = generate(model, group, drafter=drafter, max_new_tokens=max_new_tokens, do_sample=False).new_tokens
        for prompt, new in zip(group, ours, strict=True):
            ids = torch.tensor([prompt], device=model.device)
            plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
            yield compare(model, prompt, plain[0, len(prompt) :].tolist(), new.tolist())
