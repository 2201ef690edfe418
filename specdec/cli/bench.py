"""`specdec bench`: methods side by side on a file of prompts, against plain decoding."""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from ..bench.measure import Group, Sample, groups_of, measure, warm_up
from ..bench.methods import METHODS, Setup, make_methods, read_names
from ..bench.report import summary
from ..bench.workloads import chat_ids, read_prompts
from ..cache import causal_target
from ..drafters.by_name import HEADS
from ..models import load
from ..rng import derive_seeds
from ..stats import PHASES
from ..testing.audit import compare
from .command import Failed
from .text import DTYPES, HEAD_HELP, count

__all__ = ["arguments", "run"]

VERDICTS = ("equal", "near_tie", "different")
_NO_SETTING = ("command", "say", "json", "traceback")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts, methods, and how to decode."""
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE.jsonl",
        help="one JSON object a line with 'turns', of which the first is decoded, as in Spec-Bench",
    )
    parser.add_argument("--methods", default="plain,ngram", metavar="A,B,...",
                        help=f"of {', '.join(METHODS)}; plain always runs (default: %(default)s)")  # fmt: skip
    parser.add_argument("--limit", type=count, metavar="N", help="the first N prompts only")
    parser.add_argument("--max-new-tokens", type=count, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="prompts decoded at once (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, local folder or hub name (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default here: %(default)s)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample; left out or 0, the most likely token is taken")
    parser.add_argument("--top-p", type=float, metavar="P", help="needs --temperature")
    parser.add_argument("--seed", type=int, help="needs --temperature; the prompts' seeds are derived from it (default: 0)")
    parser.add_argument("--num-draft", type=count, metavar="K",
                        help="drafted tokens a round at most: ngram drafts as many as have paid lately, draft that many; hf-lookup 10; "
                             f"of {', '.join(HEADS)}, which adapt, levels of the tree (default: 10, of those 4)")  # fmt: skip
    parser.add_argument("--depth", type=count, metavar="D", help="levels of a tree of --num-draft tokens at most")
    parser.add_argument("--head", metavar="NAME", help=HEAD_HELP)
    parser.add_argument("--draft-model", metavar="NAME", help="of the method draft: packaged model, local folder or hub name")
    parser.add_argument("--ignore-eos", action="store_true", help="no text ends before --max-new-tokens")
    parser.add_argument("--warm-up", type=count, default=1, metavar="N", help="passes that are not counted (default: %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Fails in float32 where a greedy text differs from plain decoding's and the logits there are no tie. In half precision, where
    forwards of different shapes round differently, such texts are counted."""
    options, names = _options(args), read_names(args.methods)
    seed = (args.seed or 0) if options["do_sample"] else None
    prompts = read_prompts(args.prompts, args.limit)
    model, tokenizer = load(args.model, dtype=DTYPES[args.dtype], device=args.device)
    methods = make_methods(names, Setup(model, options, args.num_draft, args.depth, args.batch, args.draft_model, args.head, tokenizer))
    ids = [chat_ids(tokenizer, prompt.turns[0]) for prompt in prompts]
    _fit(model, [prompt.id for prompt in prompts], ids, args.max_new_tokens)
    groups = groups_of(ids, [prompt.category for prompt in prompts], derive_seeds(seed or 0, len(ids)), args.batch)

    warm_up(methods, groups[0], args.warm_up)
    with tqdm(total=len(groups), unit="prompt" if args.batch == 1 else "batch", disable=args.json) as bar:
        samples = measure(methods, groups, args.device, tick=bar.update)
    _complete(samples, args)
    verdicts = {name: None if options["do_sample"] else _verdicts(model, groups, own, samples["plain"]) for name, own in samples.items()}
    settings = {name: value for name, value in vars(args).items() if name not in _NO_SETTING}
    result = {
        "machine": _machine(args), "settings": settings | {"methods": names, "seed": seed, "prompts_read": len(ids)},
        "methods": summary(samples, verdicts),
    }  # fmt: skip
    args.say(_tables(result))
    different = {name: found["different"] for name, found in verdicts.items() if found and found["different"]}
    if different and args.dtype == "float32":
        raise Failed(f"texts that differ from plain decoding: {', '.join(f'{n} by {name}' for name, n in different.items())}", result)
    return result


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """In the words of `model.generate`, the same for every method."""
    for name in ("batch", "limit", "max_new_tokens"):
        if getattr(args, name) == 0:
            raise ValueError(f"--{name.replace('_', '-')}: got 0, allowed is at least 1")
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature: got {args.temperature}; give a number above 0, or 0 for the most likely token")
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": bool(args.temperature)}
    if args.ignore_eos:
        options["eos_token_id"] = None
    if args.temperature:
        return options | {"temperature": args.temperature, "top_k": 0, "top_p": 1.0 if args.top_p is None else args.top_p}
    for name in ("top_p", "seed"):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}: {getattr(args, name)} would have no effect without --temperature; give one above 0")
    return options


def _fit(model: Any, names: Sequence[str], ids: Sequence[list[int]], new: int) -> None:
    """At the model's limit our texts end and transformers' go on, so they could not be compared."""
    room = causal_target(model).facts.max_positions
    for name, prompt in zip(names, ids, strict=True):
        if room is not None and len(prompt) + new > room:
            raise ValueError(
                f"--max-new-tokens: prompt {name} has {len(prompt)} tokens, and with {new} more it passes the {room} that the model "
                f"reads; give at most {room - len(prompt)}, or leave the prompt out"
            )


def _complete(samples: Mapping[str, Sequence[Sample]], args: argparse.Namespace) -> None:
    short = {name for name, own in samples.items() for one in own for text in one.decoded.texts if len(text) != args.max_new_tokens}
    if args.ignore_eos and short:
        raise RuntimeError(f"--ignore-eos: {', '.join(sorted(short))} ended before --max-new-tokens; the model's own options end it early")


def _verdicts(model: Any, groups: Sequence[Group], own: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, int]:
    found = Counter(
        compare(model, prompt, wanted, got).verdict
        for group, one, base in zip(groups, own, plain, strict=True)
        for prompt, wanted, got in zip(group.prompts, base.decoded.texts, one.decoded.texts, strict=True)
    )
    return {verdict: found[verdict] for verdict in VERDICTS}


# ------------------------------------------------------------------------------------------------------- machine and tables


def _machine(args: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.device(args.device).type == "cuda"
    return {
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "threads": torch.get_num_threads(), "cpu": _cpu(),
        "device": torch.cuda.get_device_name(args.device) if cuda else args.device, "dtype": args.dtype,
    }  # fmt: skip


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return next(iter(named), platform.processor() or platform.machine())


def _tables(result: Mapping[str, Any]) -> str:
    """What people read. Phases are shares of the whole call."""
    machine, settings, methods = result["machine"], result["settings"], result["methods"]
    how = f"temperature {settings['temperature']}" if settings["temperature"] else "greedy"
    lines = [
        f"{settings['model']}, {machine['dtype']}, {machine['device']}, {machine['threads']} threads: {settings['prompts_read']} prompts, "
        f"batch {settings['batch']}, up to {settings['max_new_tokens']} new tokens, {how}", "",
        f"{'method':<14}{'tokens/s':>9}{'tok/round':>10}{'speed-up':>9}{'95 %':>14}" + "".join(f"{phase:>9}" for phase in PHASES)
        + "  equal/near/diff",
    ]  # fmt: skip
    alone = settings["prompts_read"] <= settings["batch"]  # one group says nothing about others
    for name, one in methods.items():
        speedup, equal = one["speedup"], one["equal_to_plain"]
        interval = "-" if alone else f"{speedup['low']:.2f}-{speedup['high']:.2f}"
        shares = ["-" if s is None else f"{s / one['seconds_total']:.0%}" for s in (one["seconds"][phase] for phase in PHASES)]
        lines.append(
            f"{name:<16}{one['tokens_per_s']:>9.1f}{_number(one['tokens_per_round']):>10}{speedup['total']:>9.2f}"
            f"{interval:>14}" + "".join(f"{share:>9}" for share in shares)
            + f"  {'sampled' if equal is None else '/'.join(str(equal[verdict]) for verdict in VERDICTS)}"
        )  # fmt: skip
    lines += ["", f"{'speed-up by category':<24}" + "".join(f"{name:>16}" for name in methods)]
    for category in methods["plain"]["speedup"]["by_category"]:
        lines.append(f"{category:<24}" + "".join(f"{one['speedup']['by_category'][category]:>16.2f}" for one in methods.values()))
    return "\n".join([*lines, ""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
