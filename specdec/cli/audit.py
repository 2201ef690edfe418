"""`specdec audit`: greedy text with drafts against transformers' own, prompt by prompt."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from ..bench.workloads import chat_ids, read_prompts
from ..models import load
from ..testing.audit import audit_greedy
from .command import Failed
from .text import DRAFTERS, count

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """A file of prompts, and how many at a time."""
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl", help="one JSON object a line with 'turns', as in Spec-Bench")
    parser.add_argument("--limit", type=count, metavar="N", help="the first N prompts only")
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, local folder or hub name (default: %(default)s)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="ngram", help="(default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="prompts decoded at once (default: %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs in float32. Fails where a text differs and the logits there are no tie."""
    if args.batch < 1 or args.limit == 0:
        raise ValueError(f"--batch, --limit: got {args.batch}, {args.limit}; allowed is at least 1")
    prompts = read_prompts(args.prompts, args.limit)
    model, tokenizer = load(args.model, dtype=torch.float32)
    ids = [chat_ids(tokenizer, prompt.turns[0]) for prompt in prompts]
    compared = audit_greedy(model, ids, DRAFTERS[args.drafter](), max_new_tokens=args.max_new_tokens, batch=args.batch)
    found = list(tqdm(compared, total=len(ids), unit="prompt", disable=args.json))
    verdicts = Counter(one.verdict for one in found)
    others = [{"prompt": prompt.id, **asdict(one)} for prompt, one in zip(prompts, found, strict=True) if one.verdict != "equal"]
    result = {"prompts": len(found), "batch": args.batch, **{v: verdicts[v] for v in ("equal", "near_tie", "different")}, "others": others}
    args.say(
        f"{len(found)} texts in float32: {verdicts['equal']} equal, {verdicts['near_tie']} near-ties, {verdicts['different']} different\n"
    )
    for one in others:
        args.say(f"  prompt {one['prompt']}: {one['verdict']} at new token {one['position']}, gap {one['gap']}\n")
    if verdicts["different"]:
        raise Failed(f"{verdicts['different']} texts differ from plain decoding", result)
    return result
