"""`specdec demo` and `specdec generate`: a text, decoded with drafts, and what it took."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base import Drafter, Planner
from ..bench.methods import head_planner
from ..drafters import NGramDrafter, NullDrafter
from ..drafters.by_name import HEADS, head_drafter
from ..generation import stream
from ..models import load
from ..planning import FixedPlanner
from ..stats import Stats
from ..types import Round
from .command import Failed
from .console import Painter, TextFlow

__all__ = ["DRAFTERS", "DTYPES", "HEAD_HELP", "demo", "demo_arguments", "generate", "generate_arguments", "named"]

DRAFTERS = ("ngram", *HEADS, "none")
HEAD_HELP = f"of {', '.join(HEADS)}: folder or hub name (default: the one that comes with this package)"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEMO_PROMPT = """\
Fix the spelling in this paragraph, and repeat it in full:

Bees visit flowers to collect nectar and pollen. They carry the pollen from one flower to the next, and so the plants can make seeds. \
Without bees, many plants could not make seeds, and many animals would loose their food. Farmers know this, so they plant wild flowers \
at the edges of thier fields. In return, the bees help them to grow apples, pears and beans."""


def named(name: str, model: Any, head: str | None) -> Drafter:
    """The drafter of a name in `DRAFTERS`, for this target.

    Raises:
        ValueError: it would not use the head.
    """
    if name in HEADS:
        return head_drafter(name, model, head)
    if head is not None:
        raise ValueError(f"--head: got {head}, which drafter {name} has no use for; leave it out, or choose one of {', '.join(HEADS)}")
    return NGramDrafter() if name == "ngram" else NullDrafter()


@dataclass(frozen=True)
class _Text:
    """A finished text and what it took."""

    tokens: list[int]
    stats: Stats
    finish_reason: str


@dataclass(frozen=True)
class _Job:
    """What is decoded. The drafter and the dtype are what is compared."""

    model: Any
    tokenizer: Any
    ids: list[int]
    options: dict[str, Any]
    planner: Planner

    def start(self, drafter: Drafter) -> Iterator[Round]:
        """The rounds to come; what makes no sense is said here."""
        return stream(self.model, [self.ids], drafter=drafter, planner=self.planner, tokenizer=self.tokenizer, **self.options)

    def run(self, drafter: Drafter) -> _Text:
        return _read(self.start(drafter), lambda tokens, drafted: None)


def _read(rounds: Iterable[Round], show: Callable[[Sequence[int], bool], None]) -> _Text:
    tokens, stats, reason = [], Stats(), "length"
    for done in rounds:
        emitted, accepted = done.emitted[0], done.accepted[0]
        show(emitted[:accepted], True)
        show(emitted[accepted:], False)
        tokens += emitted
        stats, reason = stats + Stats.of(done), done.finish_reason[0] or reason
    return _Text(tokens, stats, reason)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is a whole number of at least 0")
    return int(text)


def _text_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, local folder or hub name (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=count, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="ngram", help="what guesses (default: %(default)s)")
    parser.add_argument("--head", metavar="NAME", help=HEAD_HELP)
    parser.add_argument("--num-draft", type=count, metavar="N",
                        help=f"drafted tokens a round at most (default: 10; with {', '.join(HEADS)} as many as pay)")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default here: %(default)s)")


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    """A prompt that has a default."""
    _text_arguments(parser)
    parser.add_argument(
        "--prompt", default=DEMO_PROMPT, metavar="TEXT", help="a request, put to the model as a chat (default: a text to mend)"
    )


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """A prompt, and how to decode."""
    _text_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT|-", help="the request; - reads standard input")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="put the prompt through the chat template (default: if there is one)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="sample; left out or 0, the most likely token is taken")
    parser.add_argument("--top-p", type=float, metavar="P", help="needs --temperature")
    parser.add_argument("--top-k", type=int, metavar="K", help="needs --temperature; transformers' own default is 50, 0 switches it off")
    parser.add_argument("--seed", type=int, help="needs --temperature; the same seed gives the same text")
    parser.add_argument("--stop", action="append", metavar="STRING", help="end where this appears; may be given several times")
    parser.add_argument(
        "--compare", action="store_true", help="decode plainly as well; where greedy, check in float32 that the text is equal"
    )


def demo(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy, compared with plain decoding; fails where the texts differ in float32."""
    return _decode(args, chat=None, options={"do_sample": False}, compare=True)


def generate(args: argparse.Namespace) -> dict[str, Any]:
    """As asked for; compared if `--compare` says so."""
    sampled = bool(args.temperature)
    options: dict[str, Any] = {"do_sample": sampled, "temperature": args.temperature if sampled else None}
    for name in ("top_p", "top_k", "seed"):
        value = getattr(args, name)
        if value is not None and not sampled:
            raise ValueError(f"--{name.replace('_', '-')}: {value} would have no effect without --temperature; give one above 0")
        options[name] = value
    options["stop_strings"] = args.stop
    return _decode(args, chat=args.chat, options=options, compare=args.compare)


def _decode(args: argparse.Namespace, *, chat: bool | None, options: dict[str, Any], compare: bool) -> dict[str, Any]:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model, tokenizer = load(args.model, dtype=DTYPES[args.dtype], device=args.device)
    adapts = args.num_draft is None and args.drafter in HEADS
    planner = head_planner() if adapts else FixedPlanner(10 if args.num_draft is None else args.num_draft)
    job = _Job(model, tokenizer, _encode(tokenizer, prompt, chat), {**options, "max_new_tokens": args.max_new_tokens}, planner)
    drafter = named(args.drafter, model, args.head)
    if compare:  # the first pass over fresh weights is slower, and is no method's fault
        replace(job, options={"do_sample": False, "max_new_tokens": 2}).run(NullDrafter())
    rounds = job.start(drafter)
    args.say(f"{args.model}, {args.dtype}, {args.device}; drafter {args.drafter}, "
             f"{'as many tokens a round as pay' if adapts else f'up to {planner.nodes} tokens a round'}\n")  # fmt: skip
    flow, paint = TextFlow(tokenizer), Painter(args.say)
    text = _read(rounds, lambda tokens, drafted: paint(flow.push(tokens), drafted))
    paint(flow.flush(), False)
    paint.end()
    result = {
        "text": flow.text, "tokens": len(text.tokens), "rounds": text.stats.rounds, "tokens_per_round": text.stats.tokens_per_round,
        "tokens_per_s": text.stats.tokens_per_second, "plain_tokens_per_s": None, "equal_to_plain": None,
        "finish_reason": text.finish_reason, "accepted": text.stats.accepted, "drafted": text.stats.drafted, "speedup": None,
        "token_ids": text.tokens, "prompt_tokens": len(job.ids), "model": args.model, "drafter": args.drafter, "dtype": args.dtype,
        "device": args.device, "seconds": dict(text.stats.seconds),
    }  # fmt: skip
    args.say(f"\n\n{len(text.tokens)} tokens in {text.stats.rounds} rounds: {text.stats.tokens_per_round:.2f} tokens a round\n")
    return _compare(args, job, drafter, text, result) if compare else result


def _encode(tokenizer: Any, prompt: str, chat: bool | None) -> list[int]:
    if not prompt:
        raise ValueError("--prompt: it is empty; give at least one character")
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError("--chat: the tokenizer has no chat template; leave it out, or give --no-chat")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def _compare(args: argparse.Namespace, job: _Job, drafter: Drafter, text: _Text, result: dict[str, Any]) -> dict[str, Any]:
    """Time plain decoding beside what was done, and check that the text is the same, in float32, where that can be told: sampled
    texts follow the same law but are other draws."""
    plain = job.run(NullDrafter())
    mine, theirs = text.stats.tokens_per_second, plain.stats.tokens_per_second
    result |= {"plain_tokens_per_s": theirs, "speedup": mine / theirs if theirs else None}
    args.say(f"speculative {mine:7.1f} tokens/s\nplain       {theirs:7.1f} tokens/s\n")
    if theirs:
        args.say(f"ratio       {mine / theirs:7.2f} (one run each, in {args.dtype}, prefill left out)\n")
    if job.options["do_sample"]:
        args.say("equal to plain decoding: not compared, since the text was sampled\n")
        return result
    if args.dtype != "float32":
        exact = replace(job, model=load(args.model, device=args.device)[0])
        text, plain = exact.run(drafter), exact.run(NullDrafter())
    equal = text.tokens == plain.tokens
    result["equal_to_plain"] = equal
    args.say(f"equal to plain decoding in float32: {'yes' if equal else 'no'}\n")
    if not equal:
        pairs = zip([*text.tokens, None], [*plain.tokens, None], strict=False)
        at, (got, wanted) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise Failed(f"the text differs from plain decoding at new token {at}: {got}, plain {wanted}", result)
    return result
