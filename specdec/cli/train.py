"""`specdec train`: a draft head, or a small draft model, that learns from what the target says."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from tqdm import tqdm

from ..bench.workloads import read_prompts
from ..cache import Lender, causal_target
from ..models import load
from ..training import Corpus, Progress, Reader, Recipe, Template, Wanted, corpus_shards, fit, write_corpus
from .pupils import KINDS, Job, Pupil
from .text import DTYPES, count

__all__ = ["arguments", "run"]


TOKENS = 2_000_000


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, on what, and for how long."""

    def own(flag: str, help: str, **given: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        kinds = {kind: defaults[name] for kind, (_, defaults) in KINDS.items() if name in defaults}
        default = next(iter(kinds.values()))
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(flag, help=f"{', '.join(kinds)}: {help}{shown}", **given)

    parser.add_argument("kind", choices=KINDS, help="an EAGLE-3 head, Medusa's heads, a module for multi-token prediction, or a small "
                        "model made of the target's first layers")  # fmt: skip
    parser.add_argument("--target", default="smollm2-135m", help="packaged model, local folder or hub name (default: %(default)s)")
    parser.add_argument("--out", required=True, metavar="DIR", help="where all of it goes; a run that was killed goes on from there")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL with 'turns' of a user; left out, the target writes these too")
    parser.add_argument("--data", action="append", metavar="DIR", help="dialogues written earlier, instead of new ones; may be repeated")
    parser.add_argument("--tokens", type=_some, metavar="N",
                        help=f"of dialogues to be written, in whole shards of some 50,000 (default: {TOKENS})")  # fmt: skip
    parser.add_argument("--write-only", action="store_true", help="write the dialogues and stop")
    parser.add_argument("--passes", type=_some, default=1, metavar="N", help="over the dialogues (default: %(default)s)")
    own("--unroll", "depths of a draft in training", type=_some, metavar="N")
    own("--vocab", "tokens that can be drafted; left out, 8192, or all if there are fewer", type=_some, metavar="N")
    own("--layers", "ids of input boundaries, rising; left out, 2, half of them, and three before the last", type=_ids, metavar="I,J,K")
    own("--layout", "of the files", choices=("speculators", "eagle"))
    own("--heads", "how many, each for a token further ahead", type=_some, metavar="N")
    own("--blocks", "residual blocks of a head", type=_some, metavar="N")
    own("--draft-layers", "layers of the model", type=_some, metavar="N")
    parser.add_argument("--batch-tokens", type=_some, default=2048, metavar="N", help="of an optimisation step (default: %(default)s)")
    parser.add_argument("--rate", type=_number, default=1e-3, help="of learning (default: %(default)s)")
    parser.add_argument(
        "--room", type=_number, default=0.0, metavar="GB", help="memory for hidden states that a second pass needs (default: none)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the target and of what is computed (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default here: %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write what is wanting, fit, save. Started by `accelerate launch`, the processes share each batch."""
    out, began = Path(args.out), time.monotonic()
    make = _settle(args)
    accelerator = Accelerator(cpu=args.device == "cpu", mixed_precision={"bfloat16": "bf16", "float16": "fp16"}.get(args.dtype, "no"))
    model, tokenizer = load(args.target, dtype=DTYPES[args.dtype], device=accelerator.device if args.device != "cpu" else "cpu")
    target = causal_target(model)
    if not isinstance(target, Lender):
        raise ValueError(f"--target: {type(target).__name__} can't lend its embedding and output head")
    lent, folders = target.lend(), [Path(folder) for folder in args.data or [out / "data"]]
    with accelerator.main_process_first():
        if not args.data and accelerator.is_main_process:
            prompts = [prompt.turns for prompt in read_prompts(args.prompts)] if args.prompts else []
            with tqdm(total=args.tokens or TOKENS, unit="tok", desc="writing", disable=args.json or None) as bar:
                wanted = Wanted(args.tokens or TOKENS, args.seed)
                write_corpus(target, Template.of(tokenizer), folders[0], wanted, prompts, cast(Any, bar.update), args.target)
    get, sizes = corpus_shards([Corpus(folder) for folder in folders])
    result: dict[str, Any] = {
        "kind": args.kind, "target": args.target, "tokens": sum(rows * length for rows, length in sizes),
        "folders": [str(folder) for folder in folders],
    }  # fmt: skip
    if not sizes:
        raise ValueError(f"--data: no dialogues in {', '.join(map(str, folders))}")
    if args.write_only:
        return result | {"seconds": time.monotonic() - began}
    foreign = int(get[0]().tokens.max())
    if foreign >= target.facts.vocab_size:
        raise ValueError(f"--data: holds token {foreign}, but the target has {target.facts.vocab_size}: another model wrote it")
    pupil = make(Job(args, model, tokenizer, target, lent, get))
    lesson = pupil.lesson.to(accelerator.device)
    short = min(length for _, length in sizes)
    if short < lesson.steps + 2:
        raise ValueError(
            f"--data: dialogues of {short} tokens are too short for drafts of {lesson.steps}; at least {lesson.steps + 2} are needed"
        )
    recipe = Recipe(passes=args.passes, batch_tokens=args.batch_tokens, rate=args.rate, seed=args.seed)
    reader = Reader(target, lent, pupil.layers, int(args.room * 1e9))
    with _Bar(disable=args.json or not accelerator.is_main_process or None) as bar:
        done = fit(lesson, reader, get, sizes, recipe, out, bar, accelerator)
    if accelerator.is_main_process:
        pupil.save(out / args.kind)
        _note(out, done)
    accelerator.end_training()
    args.say(f"{args.kind} in {out / args.kind}; agreement with the target by depth: {_shown(done.accepted)}\n")
    return result | {
        "steps": done.step, "loss": done.loss, "accepted": list(done.accepted), "seconds": time.monotonic() - began,
        "path": str(out / args.kind),
    }  # fmt: skip


def _settle(args: argparse.Namespace) -> Callable[[Job], Pupil]:
    """Give the kind's own options their defaults; ValueError for one of another kind, or what is known not to work."""
    make, defaults = KINDS[args.kind]
    for name in {name for _, options in KINDS.values() for name in options}:
        given = getattr(args, name)
        if name in defaults:
            setattr(args, name, defaults[name] if given is None else given)
        elif given is not None:
            raise ValueError(f"--{name.replace('_', '-')}: got {given}, which 'train {args.kind}' has no use for; leave it out")
    given = [flag for flag in ("prompts", "tokens", "write_only") if getattr(args, flag)]
    if args.data and given:
        raise ValueError(f"--{given[0].replace('_', '-')}: nothing is written where --data says what to learn from; leave out one of them")
    if args.dtype == "float16" and args.device == "cpu":
        raise ValueError("--dtype: got float16, in which a CPU can't train; use bfloat16 or float32")
    return make


def _some(text: str) -> int:
    if not count(text):
        raise argparse.ArgumentTypeError("got 0, allowed is a whole number of at least 1")
    return count(text)


def _number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is a number of at least 0")
    return found


def _ids(text: str) -> tuple[int, ...]:
    return tuple(count(part.strip()) for part in text.split(","))


def _note(out: Path, done: Progress) -> None:
    (out / "result.json").write_text(json.dumps({"steps": done.step, "tokens": done.tokens, "loss": done.loss, "accepted": done.accepted}))


def _shown(accepted: Any) -> str:
    return " ".join(f"{chance:.3f}" for chance in accepted) or "not assessed yet"


class _Bar:
    """Progress with the loss and what the head is worth."""

    def __init__(self, disable: bool | None) -> None:
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
