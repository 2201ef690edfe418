"""A small model learns to draft: what the target says, at every position of its own words."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..types import Float, Int64
from .lesson import Lesson, Seen, fingerprint
from .objective import distilled

__all__ = ["ModelLesson"]


class ModelLesson(Lesson):
    """A causal language model learns the target's law, token by token (Hinton et al. 2015; Zhou et al. 2023, arXiv 2310.08461).

    Args:
        model: of transformers, of the target's vocabulary.
        rows: the target's whole output head, see `specdec.cache.output_rows`.
        scale: by which the model, as the target it was made of, multiplies what its output head says.
    """

    rows: Tensor

    def __init__(self, model: Any, rows: Float[Tensor, "V D"], scale: float = 1.0) -> None:
        super().__init__(model, 1, 1.0)
        self.scale = scale
        self.register_buffer("rows", rows.detach().clone(), persistent=False)

    def about(self) -> dict[str, Any]:
        told = json.loads(self.learner.config.to_json_string(use_diff=False))
        made = {name: value for name, value in told.items() if name not in ("transformers_version", "_name_or_path")}
        return {"model": made, "scale": self.scale, "teacher": fingerprint(self.rows)}

    def _read(self, seen: Seen) -> Float[Tensor, "B T d"]:
        return self.learner.base_model(input_ids=seen.tokens, use_cache=False).last_hidden_state

    def forward(self, seen: Seen) -> Float[Tensor, ""]:
        said, head = self._read(seen)[:, :-1], cast(nn.Linear, self.learner.get_output_embeddings())
        return distilled(
            said.flatten(0, 1), head.weight * self.scale, seen.final[:, :-1].flatten(0, 1), self.rows, seen.own[:, 1:].flatten().float()
        )

    def agreement(self, seen: Seen, best: Int64[Tensor, "B T"]) -> list[tuple[int, int]]:
        head, asked = self.learner.get_output_embeddings(), seen.own[:, 1:]
        with torch.no_grad():
            guess = torch.cat([head(part).argmax(-1) for part in self._read(seen)[:, :-1].split(64, 1)], 1)
        return [(int((asked & (guess == best[:, :-1])).sum()), int(asked.sum()))]
