"""A small model learns to draft: what the target says, at every position of its own words."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..types import Float, Int64
from .lesson import Lesson, Seen
from .objective import distilled

__all__ = ["ModelLesson"]


class ModelLesson(Lesson):
    """A causal language model learns the target's law, token by token (Hinton et al. 2015; Zhou et al. 2023, arXiv 2310.08461).

    Args:
        model: of transformers, of the target's vocabulary.
        rows: the target's whole output head.
    """

    rows: Tensor

    def __init__(self, model: Any, rows: Float[Tensor, "V D"]) -> None:
        super().__init__(model, 1, 1.0)
        self.model = model
        self.register_buffer("rows", rows.detach().clone(), persistent=False)

    def _read(self, seen: Seen) -> Float[Tensor, "B T d"]:
        return self.model.base_model(input_ids=seen.tokens, use_cache=False).last_hidden_state

    def forward(self, seen: Seen) -> Float[Tensor, ""]:
        said, head = self._read(seen)[:, :-1], cast(nn.Linear, self.model.get_output_embeddings())
        return distilled(said.flatten(0, 1), head.weight, seen.final[:, :-1].flatten(0, 1), self.rows, seen.own[:, 1:].flatten().float())

    def agreement(self, seen: Seen, best: Int64[Tensor, "B T"]) -> list[tuple[int, int]]:
        head, asked = self.model.get_output_embeddings(), seen.own[:, 1:]
        with torch.no_grad():
            guess = torch.cat([head(part).argmax(-1) for part in self._read(seen)[:, :-1].split(64, 1)], 1)
        return [(int((asked & (guess == best[:, :-1])).sum()), int(asked.sum()))]
