"""What `specdec train` can train: how each kind is made of a target, and how it is saved."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..cache import CausalTarget, Lent, output_rows
from ..checkpoints import save_head, save_medusa, save_mtp
from ..heads import usual_layers
from ..models.shorten import shortened
from ..training import (
    Lesson,
    MedusaLesson,
    ModelLesson,
    PairLesson,
    Reader,
    Shard,
    frequent,
    fresh_head,
    fresh_medusa,
    fresh_mtp,
)  # fmt: skip
from .text import DTYPES

__all__ = ["KINDS", "Job", "Pupil"]


@dataclass(frozen=True)
class Pupil:
    """A lesson; which hidden states its learner reads beside the last one; and how what was learned is written into a folder."""

    lesson: Lesson
    layers: tuple[int, ...]
    save: Callable[[Path], None]


@dataclass(frozen=True)
class Job:
    """What a pupil is made of: the command's arguments, the target in all its forms, and what it wrote."""

    args: argparse.Namespace
    model: Any
    tokenizer: Any
    target: CausalTarget
    lent: Lent
    shards: Sequence[Callable[[], Shard]]

    @cached_property
    def rows(self) -> Tensor:
        """The target's output head."""
        found = output_rows(self.target, self.lent)
        if found is None:
            raise ValueError(
                f"--target: the logits of {self.args.target} are not what its output head makes of its final norm (they are capped, or "
                "have a bias), so their law can't be learned from these"
            )
        return found

    @cached_property
    def ids(self) -> Tensor:
        """The draft vocabulary."""
        size = self.target.facts.vocab_size
        wanted = min(8192, size) if self.args.vocab is None else self.args.vocab
        if wanted > size:
            raise ValueError(f"--vocab: got {wanted}, but the target has {size} tokens")
        own = (shard.tokens[shard.own] for shard in (get() for get in self.shards))
        return frequent(own, size, wanted).to(self.rows.device)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.args.dtype]

    @property
    def verifier(self) -> dict[str, Any]:
        kind = list(getattr(self.model.config, "architectures", None) or [])
        return {"verifier_name": self.args.target, "verifier_architectures": kind}


def _eagle3(job: Job) -> Pupil:
    layers = usual_layers(job.target.facts.num_layers) if job.args.layers is None else job.args.layers
    deepest = cast(int, job.target.facts.num_layers)
    if max(layers) > deepest or len(set(layers)) < len(layers):
        raise ValueError(f"--layers: got {layers}; give different input boundaries from 0 to {deepest}")
    head = fresh_head(job.lent, job.target.facts, layers, job.rows, job.ids)
    if job.args.layout == "eagle" and min(layers) < 1:
        raise ValueError(f"--layers: got {layers}; layout 'eagle' cannot express boundary 0")
    return Pupil(
        PairLesson(head, job.rows[job.ids], job.args.unroll), layers,
        lambda path: save_head(head.to(job.dtype), path, layout=job.args.layout, **job.verifier),
    )  # fmt: skip


def _mtp(job: Job) -> Pupil:
    shard = job.shards[0]()
    last = cast(int, job.target.facts.num_layers) - 1
    few = Reader(job.target, job.lent, (last,))(shard.tokens[:4], shard.own[:4]).features[:, 1:].float()
    head = fresh_mtp(job.lent, job.target.facts, job.ids, scale=float(few.pow(2).mean().sqrt()))
    lesson = PairLesson(head, job.rows[job.ids], job.args.unroll)
    return Pupil(lesson, (), lambda path: save_mtp(head.to(job.dtype), path, **job.verifier))


def _medusa(job: Job) -> Pupil:
    heads = fresh_medusa(job.target.facts, job.ids, job.args.heads, job.args.blocks)
    lesson = MedusaLesson(heads, job.rows[job.ids], job.args.heads)
    return Pupil(lesson, (), lambda path: save_medusa(heads.to(job.dtype), path, base_model=job.args.target))


def _draft(job: Job) -> Pupil:
    model = shortened(job.model, job.args.draft_layers)
    plain = cast(Tensor, cast(Any, job.lent.head).weight)[:64].double()
    scale = float((job.rows[:64].double() * plain).sum() / (plain * plain).sum())

    def save(path: Path) -> None:
        cast(Any, model).to(job.dtype).save_pretrained(path)
        job.tokenizer.save_pretrained(path)

    return Pupil(ModelLesson(model, job.rows, scale), (), save)


KINDS: dict[str, tuple[Callable[[Job], Pupil], dict[str, Any]]] = {
    "eagle3": (_eagle3, {"unroll": 3, "vocab": None, "layers": None, "layout": "speculators"}),
    "medusa": (_medusa, {"heads": 4, "blocks": 1, "vocab": None}),
    "mtp": (_mtp, {"unroll": 3, "vocab": None}),
    "draft": (_draft, {"draft_layers": 4}),
}
"""What is trained, and the options that it alone has, with their defaults."""
