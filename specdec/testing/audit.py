"""Is greedy text the same as `model.generate` gives, token for token? Where it is not, is that a proven tie?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import Drafter
from ..generation import generate

__all__ = ["Comparison", "audit_greedy", "compare"]

NEAR_TIE = 1e-4
"""Two logits closer than this may swap places between forwards of different shapes in float32; measured differences are 5e-5."""


@dataclass(frozen=True)
class Comparison:
    """How one text compares with the plain one."""

    verdict: str
    """"equal", "near_tie" or "different"."""
    position: int | None = None
    """New token at which they part."""
    gap: float | None = None
    """How far the worse of the two tokens lies below the plain forward's best logit there."""


@torch.no_grad()
def compare(model: Any, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], near_tie: float = NEAR_TIE) -> Comparison:
    """Compare two greedy continuations of a prompt. What follows a near-tie is another text, and is not judged."""
    if list(plain) == list(other):
        return Comparison("equal")
    at = next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), min(len(plain), len(other)))
    if at == min(len(plain), len(other)):
        return Comparison("different", at)
    ids = torch.tensor([[*prompt, *plain[:at]]], device=model.device)
    logits = model(input_ids=ids).logits[0, -1].double()
    gap = float(logits.max() - torch.minimum(logits[plain[at]], logits[other[at]]))
    return Comparison("near_tie" if gap <= near_tie else "different", at, gap)


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
