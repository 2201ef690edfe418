"""`specdec train`: a draft head, or a small draft model, that learns from what the target says."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from ..bench.workloads import read_prompts
from ..cache import Lender, Lent, causal_target
from ..checkpoints import save_head
from ..models import load
from ..models.shorten import shortened
from ..training import (
    Corpus,
    HeadLesson,
    Lesson,
    ModelLesson,
    Progress,
    Reader,
    Recipe,
    Template,
    Wanted,
    corpus_shards,
    fit,
    frequent,
    fresh_head,
    write_corpus,
)  # fmt: skip
from .text import DTYPES, count

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, on what, and for how long."""
    parser.add_argument("kind", choices=("eagle3", "draft"), help="an EAGLE-3 head, or a small model made of the target's first layers")
    parser.add_argument("--target", default="smollm2-135m", help="packaged model, local folder or hub name (default: %(default)s)")
    parser.add_argument("--out", required=True, metavar="DIR", help="where all of it goes; a run that was killed goes on from there")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL with 'turns' of a user; left out, the target writes these too")
    parser.add_argument("--data", action="append", metavar="DIR", help="dialogues written earlier, instead of new ones; may be repeated")
    parser.add_argument("--tokens", type=count, default=2_000_000, metavar="N", help="of dialogues to be written (default: %(default)s)")
    parser.add_argument("--write-only", action="store_true", help="write the dialogues and stop")
    parser.add_argument("--passes", type=count, default=1, metavar="N", help="over the dialogues (default: %(default)s)")
    parser.add_argument("--unroll", type=count, default=3, metavar="N", help="eagle3: depths of a draft in training (default: %(default)s)")
    parser.add_argument("--vocab", type=count, default=8192, metavar="N", help="eagle3: tokens that can be drafted (default: %(default)s)")
    parser.add_argument("--layers", metavar="I,J,K", help="eagle3: ids of input boundaries (default: 2, half, and three before the last)")
    parser.add_argument("--draft-layers", type=count, default=4, metavar="N", help="draft: layers of the model (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=count, default=2048, metavar="N", help="of an optimisation step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning (default: %(default)s)")
    parser.add_argument(
        "--room", type=float, default=0.0, metavar="GB", help="memory for features that a second pass needs (default: none)"
    )
    parser.add_argument("--layout", choices=("speculators", "eagle"), default="speculators", help="of the files (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the target and of what is computed (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default here: %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write what is wanting, fit, save. Started by `accelerate launch`, the processes share each batch."""
    out, began = Path(args.out), time.monotonic()
    accelerator = Accelerator(cpu=args.device == "cpu", mixed_precision={"bfloat16": "bf16", "float16": "fp16"}.get(args.dtype, "no"))
    model, tokenizer = load(args.target, dtype=DTYPES[args.dtype], device=accelerator.device if args.device != "cpu" else "cpu")
    target = causal_target(model)
    if not isinstance(target, Lender):
        raise ValueError(f"--target: {type(target).__name__} can't lend its embedding and output head")
    lent, folders = target.lend(), [Path(folder) for folder in args.data or [out / "data"]]
    with accelerator.main_process_first():
        if not args.data and accelerator.is_main_process:
            prompts = [prompt.turns for prompt in read_prompts(args.prompts)] if args.prompts else []
            with tqdm(total=args.tokens, unit="tok", desc="writing", disable=args.json or None) as bar:
                write_corpus(target, Template.of(tokenizer), folders[0], Wanted(args.tokens, args.seed), prompts, cast(Any, bar.update))
    get, sizes = corpus_shards([Corpus(folder) for folder in folders])
    result: dict[str, Any] = {
        "kind": args.kind, "target": args.target, "tokens": sum(rows * length for rows, length in sizes),
        "folders": [str(folder) for folder in folders],
    }  # fmt: skip
    if not sizes:
        raise ValueError(f"--data: no dialogues in {', '.join(map(str, folders))}")
    if args.write_only:
        return result | {"seconds": time.monotonic() - began}
    lesson, layers = _lesson(args, model, target, lent, get)
    lesson.to(accelerator.device)
    recipe = Recipe(passes=args.passes, batch_tokens=args.batch_tokens, steps=lesson.steps, rate=args.rate, seed=args.seed)
    reader = Reader(target, lent, layers, int(args.room * 1e9))
    with _Bar(disable=args.json or not accelerator.is_main_process) as bar:
        done = fit(lesson, reader, get, sizes, recipe, out, bar, accelerator)
    if accelerator.is_main_process:
        _save(args, lesson, model, out / args.kind, DTYPES[args.dtype])
        _note(out, done)
    accelerator.end_training()
    args.say(f"{args.kind} in {out / args.kind}; agreement with the target by depth: {_shown(done.accepted)}\n")
    return result | {
        "steps": done.step, "loss": done.loss, "accepted": list(done.accepted), "seconds": time.monotonic() - began,
        "path": str(out / args.kind),
    }  # fmt: skip


def _lesson(args: argparse.Namespace, model: Any, target: Any, lent: Lent, get: Any) -> tuple[Lesson, tuple[int, ...]]:
    rows = cast(nn.Linear, lent.head).weight
    if args.kind == "draft":
        return ModelLesson(shortened(model, args.draft_layers), rows), ()
    number = target.facts.num_layers
    layers = tuple(map(int, args.layers.split(","))) if args.layers else (2, number // 2, number - 3)
    ids = frequent((shard.tokens[shard.own] for shard in (one() for one in get)), target.facts.vocab_size, args.vocab).to(rows.device)
    return HeadLesson(fresh_head(lent, target.facts, layers, ids), rows[ids], args.unroll), layers


def _save(args: argparse.Namespace, lesson: Lesson, model: Any, path: Path, dtype: torch.dtype) -> None:
    learner = lesson.learner.to(dtype)
    if isinstance(lesson, HeadLesson):
        names = {"verifier_name": args.target, "verifier_architectures": list(getattr(model.config, "architectures", None) or [])}
        save_head(lesson.head, path, layout=args.layout, **names)
    else:
        cast(Any, learner).save_pretrained(path)


def _note(out: Path, done: Progress) -> None:
    (out / "result.json").write_text(json.dumps({"steps": done.step, "tokens": done.tokens, "loss": done.loss, "accepted": done.accepted}))


def _shown(accepted: Any) -> str:
    return " ".join(f"{chance:.3f}" for chance in accepted) or "not assessed yet"


class _Bar:
    """Progress with the loss and what the head is worth."""

    def __init__(self, disable: bool) -> None:
        self._bar: Any = tqdm(unit="step", desc="training", disable=disable)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def __call__(self, progress: Progress) -> None:
        if self._bar.total is None:
            self._bar.total, self._bar.initial, self._bar.n = progress.of, progress.step - 1, progress.step - 1
        self._bar.set_postfix_str(f"loss {progress.loss:.3f}, agrees {_shown(progress.accepted)}", refresh=False)
        self._bar.update(1)
