"""A head is fitted: step by step, in an order that the recipe settles, from where the last run stopped."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .corpus import Shard
from .lesson import Lesson, Reader

__all__ = ["Progress", "Recipe", "fit"]


@dataclass(frozen=True)
class Recipe:
    """How a head is fitted.

    Args:
        passes: over all dialogues.
        batch_tokens: about so many tokens a step.
        steps: how far a draft is unrolled.
        rate: of learning; it rises over the first `warmup` steps, holds, and falls to zero over the last `falling` of all.
        held_out: of the rows of each shard, at least one; the head is assessed by them and never sees them.
        window: shards that are shuffled among each other.
        keep_every: optimisation steps between two savings of where it stands.
    """

    passes: int = 1
    batch_tokens: int = 2048
    steps: int = 3
    rate: float = 1e-3
    warmup: int = 50
    falling: float = 0.4
    seed: int = 0
    held_out: float = 0.02
    window: int = 4
    keep_every: int = 100


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    step: int
    of: int
    tokens: int
    """Of dialogues, repetitions counted."""
    loss: float
    """Of the last steps, per position."""
    accepted: tuple[float, ...]
    """Chance that a drafted token of this depth is the target's, those before it having been: as last assessed, of what is held out of
    the latest shards."""


@dataclass(frozen=True)
class _Batch:
    shard: int
    rows: tuple[int, ...]


def fit(lesson: Lesson, reader: Reader, shards: Sequence[Callable[[], Shard]], sizes: Sequence[tuple[int, int]], recipe: Recipe,
        folder: Path, show: Callable[[Progress], None] = lambda progress: None,
        accelerator: Accelerator | None = None) -> Progress:  # fmt: skip
    """Fit the lesson's head in place. A run that was killed is gone on with, and ends with the same weights.

    Args:
        shards: how to get each; one that is not written yet may be waited for.
        sizes: rows and tokens of a row of each.
        folder: where it is kept how far the run is.
        accelerator: spreads the rows of a batch over its processes.
    """
    accelerator = accelerator or Accelerator()
    plan = _plan(sizes, recipe)
    optimizer = torch.optim.AdamW(lesson.learner.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    progress = _restore(folder / "state.safetensors", lesson, optimizer, recipe) or Progress(0, len(plan), 0, float("nan"), ())
    wrapped, optimizer = accelerator.prepare(lesson, optimizer)
    held: dict[int, Shard] = {}
    losses: list[float] = []
    for number, batch in list(enumerate(plan))[progress.step :]:
        first = batch.shard - batch.shard % recipe.window
        if batch.shard not in held:
            held = {n: shards[n]() for n in range(first, min(first + recipe.window, len(sizes)))}
        shard = held[batch.shard]
        share = batch.rows[accelerator.process_index :: accelerator.num_processes]
        rows = share or batch.rows[:1]  # a process without a row takes part all the same, for nothing
        seen = reader(shard.tokens[list(rows)], shard.own[list(rows)], (batch.shard, *rows))
        weight = max(1.0, float(shard.own[list(batch.rows)].sum())) * lesson.weight
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * _height(number, len(plan), recipe)
        loss = wrapped(seen)
        loss = loss * (accelerator.num_processes / weight if share else 0.0)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(lesson.learner.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        tokens = progress.tokens + len(batch.rows) * sizes[batch.shard][1]
        progress = Progress(number + 1, len(plan), tokens, sum(losses[-50:]) / len(losses[-50:]), progress.accepted)
        if progress.step % recipe.keep_every == 0 or progress.step == progress.of:
            with accelerator.autocast():
                progress = replace(progress, accepted=assess(lesson, reader, held, recipe))
            if accelerator.is_main_process:
                _keep(folder, lesson, optimizer, recipe, progress)
            accelerator.wait_for_everyone()
        show(progress)
    return progress


def assess(lesson: Lesson, reader: Reader, shards: Mapping[int, Shard], recipe: Recipe) -> tuple[float, ...]:
    """How often the head agrees with the target, by depth, on the rows that are held out."""
    found = [[0, 0] for _ in range(lesson.steps)]
    for number, shard in shards.items():
        rows = len(shard.tokens)
        chosen = list(range(rows - _left_out(rows, recipe), rows))
        seen = reader(shard.tokens[chosen], shard.own[chosen], (number, *chosen))
        counts = lesson.agreement(seen, reader.best(seen))
        found = [[a + x, b + y] for (a, b), (x, y) in zip(found, counts, strict=True)]
    return tuple(hit / max(1, asked) for hit, asked in found)


def _left_out(rows: int, recipe: Recipe) -> int:
    return max(1, round(rows * recipe.held_out)) if rows > 1 else 0


def _plan(sizes: Sequence[tuple[int, int]], recipe: Recipe) -> list[_Batch]:
    """The batches of the whole run: rows are shuffled in their shard, and batches among the shards of a window."""
    plan: list[_Batch] = []
    for turn in range(recipe.passes):
        for first in range(0, len(sizes), recipe.window):
            rng, some = random.Random(f"{recipe.seed}:{turn}:{first}"), []
            for number in range(first, min(first + recipe.window, len(sizes))):
                rows, length = sizes[number]
                order = rng.sample(range(rows - _left_out(rows, recipe)), rows - _left_out(rows, recipe))
                step = max(1, recipe.batch_tokens // length)
                some += [_Batch(number, tuple(order[at : at + step])) for at in range(0, len(order), step)]
            plan += rng.sample(some, len(some))
    return plan


def _height(step: int, total: int, recipe: Recipe) -> float:
    fall = max(1, round(total * recipe.falling))
    return min(1.0, (step + 1) / max(1, recipe.warmup), (total - step) / fall)


def _keep(folder: Path, lesson: Lesson, optimizer: Any, recipe: Recipe, progress: Progress) -> None:
    """Where the run stands, in one file that is there whole or not at all."""
    names = [name for name, _ in lesson.learner.named_parameters()]
    held: dict[str, Tensor] = {f"learner.{name}": weight.detach() for name, weight in lesson.learner.named_parameters()}
    for name, weight in zip(names, lesson.learner.parameters(), strict=True):
        held |= {f"{key}.{name}": value for key, value in optimizer.state[weight].items()}
    held = {name: value.contiguous().cpu() for name, value in held.items()}
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "state.part"
    save_file(held, part, {"progress": json.dumps(asdict(progress)), "recipe": json.dumps(asdict(recipe))})
    os.replace(part, folder / "state.safetensors")


def _restore(path: Path, lesson: Lesson, optimizer: torch.optim.Optimizer, recipe: Recipe) -> Progress | None:
    """How far the run was, the learner and the optimiser having been put where they were."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        told = cast(dict, file.metadata())
    if json.loads(told["recipe"]) != asdict(recipe):
        raise ValueError(f"folder: {path} was begun with {told['recipe']}, now it is {json.dumps(asdict(recipe))}; give an empty folder")
    held = load_file(path)
    shapes = {f"learner.{name}": weight.shape for name, weight in lesson.learner.named_parameters()}
    differ = sorted(name for name, shape in shapes.items() if name not in held or held[name].shape != shape)
    if differ:
        raise ValueError(f"folder: {path} was begun with another learner: {', '.join(differ[:5])} differ; give an empty folder")
    with torch.no_grad():
        for name, weight in lesson.learner.named_parameters():
            weight.copy_(held[f"learner.{name}"])
            keys = [key for key in held if key.endswith("." + name) and not key.startswith("learner.")]
            optimizer.state[weight] = {key[: -len(name) - 1]: held[key].to(weight.device if "exp" in key else "cpu") for key in keys}
    found = json.loads(told["progress"])
    return Progress(**{**found, "accepted": tuple(found["accepted"])})
