"""A head is fitted: step by step, in an order that the recipe settles, from where the last run stopped."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .corpus import Shard
from .lesson import Lesson, Reader

__all__ = ["Progress", "Recipe", "fit"]


@dataclass(frozen=True)
class Recipe:
    """How a learner is fitted. AdamW's betas are (.9, .95), and gradients are cut to a norm of .5.

    Args:
        passes: over all dialogues.
        batch_tokens: about so many tokens a step.
        rate: of learning; it rises over the first `warmup` steps, holds, and falls to zero over the last `falling` of all.
        held_out: of the rows of each shard, at least one; the head is assessed by them and never sees them.
        window: shards that are shuffled among each other.
        keep_every: optimisation steps between two assessments, at each of which it is saved where the run stands.
        keep_seconds: it is saved in between as well, where it has not been for so long.
    """

    passes: int = 1
    batch_tokens: int = 2048
    rate: float = 1e-3
    warmup: int = 50
    falling: float = 0.4
    seed: int = 0
    held_out: float = 0.02
    window: int = 4
    keep_every: int = 100
    keep_seconds: float = 120.0


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
    """Fit the lesson's learner in place. A run that was killed is gone on with, and ends with the same weights.

    Args:
        shards: how to get each; one that is not written yet may be waited for.
        sizes: rows and tokens of a row of each.
        folder: where it is kept how far the run is.
        accelerator: spreads the rows of a batch over its processes.

    Raises:
        ValueError: the folder holds another run: of another learner, target or recipe, or on other shards; or a damaged one.
    """
    accelerator = accelerator or Accelerator()
    plan = _plan(sizes, recipe)
    optimizer = torch.optim.AdamW(lesson.learner.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    about = {"recipe": {**asdict(recipe), "keep_seconds": None}, "lesson": lesson.about(), "shards": [list(size) for size in sizes]}
    progress = _restore(folder / "state.safetensors", lesson, optimizer, about) or Progress(0, len(plan), 0, float("nan"), ())
    wrapped, optimizer = accelerator.prepare(lesson, optimizer)
    held: dict[int, Shard] = {}
    losses: list[float] = []
    saved = time.monotonic()
    for number, batch in list(enumerate(plan))[progress.step :]:
        first = batch.shard - batch.shard % recipe.window
        if batch.shard not in held:
            held = {n: shards[n]() for n in range(first, min(first + recipe.window, len(sizes)))}
        shard = held[batch.shard]
        share = batch.rows[accelerator.process_index :: accelerator.num_processes]
        rows = share or batch.rows[:1]  # a process without a row takes part all the same, for nothing
        seen = reader(shard.tokens[list(rows)], shard.own[list(rows)], [(batch.shard, row) for row in rows])
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
                _keep(folder, lesson, optimizer, about, progress)
            accelerator.wait_for_everyone()
            saved = time.monotonic()
        elif accelerator.is_main_process and time.monotonic() - saved > recipe.keep_seconds:
            _keep(folder, lesson, optimizer, about, progress)
            saved = time.monotonic()
        show(progress)
    return progress


def assess(lesson: Lesson, reader: Reader, shards: Mapping[int, Shard], recipe: Recipe) -> tuple[float, ...]:
    """How often the head agrees with the target, by depth, on the rows that are held out."""
    found = [[0, 0] for _ in range(lesson.steps)]
    for number, shard in shards.items():
        rows = len(shard.tokens)
        chosen = list(range(rows - _left_out(rows, recipe), rows))
        if not chosen:
            continue
        seen = reader(shard.tokens[chosen], shard.own[chosen], [(number, row) for row in chosen])
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


def _keep(folder: Path, lesson: Lesson, optimizer: Any, about: Mapping[str, Any], progress: Progress) -> None:
    """Where the run stands, in one file that is there whole or not at all."""
    names = [name for name, _ in lesson.learner.named_parameters()]
    held: dict[str, Tensor] = {f"learner.{name}": weight.detach() for name, weight in lesson.learner.named_parameters()}
    for name, weight in zip(names, lesson.learner.parameters(), strict=True):
        held |= {f"{key}.{name}": value for key, value in optimizer.state[weight].items()}
    held = {name: value.contiguous().cpu() for name, value in held.items()}
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "state.part"
    save_file(held, part, {"progress": json.dumps(asdict(progress)), "about": json.dumps(about)})
    os.replace(part, folder / "state.safetensors")


def _differences(name: str, then: Any, now: Any) -> list[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        return [text for key in {**then, **now} for text in _differences(f"{name}.{key}", then.get(key), now.get(key))]
    return [] if then == now else [f"{name} was {then}, is now {now}"]


def _restore(path: Path, lesson: Lesson, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]) -> Progress | None:
    """How far the run was, the learner and the optimiser having been put where they were."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            told = cast(dict, file.metadata())
        held = load_file(path)
        then, found = json.loads(told["about"]), json.loads(told["progress"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"folder: {path} can't be read ({error}); remove it to begin anew") from error
    now = json.loads(json.dumps(about))
    if then != now:
        differ = [text for part in now for text in _differences(part, then.get(part), now[part])]
        raise ValueError(f"folder: {path.parent} holds another run ({'; '.join(differ)[:2000]}); give an empty folder")
    with torch.no_grad():
        for name, weight in lesson.learner.named_parameters():
            weight.copy_(held[f"learner.{name}"])
            kinds = [kind for kind, _, of in (key.partition(".") for key in held) if of == name and kind != "learner"]
            optimizer.state[weight] = {
                kind: held[f"{kind}.{name}"].to(weight.device if "exp" in kind else "cpu") for kind in kinds
            }  # fmt: skip
    return Progress(**{**found, "accepted": tuple(found["accepted"])})
