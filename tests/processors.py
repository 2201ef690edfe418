"""Logits processors that several tests hand over."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class Memory(LogitsProcessor):
    """Remembers every call and the scores that it was shown, and lets both decide."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.mass: torch.Tensor | float = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        vocab = scores.shape[-1]
        self.seen.append(int(input_ids[0, -1]))
        self.mass = 0.5 * self.mass + scores.max(-1, keepdim=True).values
        return scores + torch.sin(self.mass * torch.arange(1, vocab + 1)) + 0.3 * len(self.seen) * torch.eye(vocab)[sum(self.seen) % vocab]


class Refuses(LogitsProcessor):
    """A grammar that ends below some tokens."""

    def __init__(self, tokens: set[int], pure: bool) -> None:
        self.tokens, self.pure = tokens, pure

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.tokens.isdisjoint(input_ids[:, -1].tolist()):
            raise ValueError("no way on")
        return scores
