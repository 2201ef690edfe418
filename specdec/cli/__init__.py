"""The command line: `specdec COMMAND`, also `python -m specdec COMMAND`. A new command is a line in `COMMANDS`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .. import __version__
from . import audit, bench, certify, text, train
from .command import Command, Failed

__all__ = ["COMMANDS", "Command", "Failed", "main"]

COMMANDS = (
    Command("demo", "show a real model decoding with drafts, and check the text against plain decoding",
            "specdec demo --max-new-tokens 64", text.demo_arguments, text.demo),
    Command("generate", "decode a text of your own",
            'specdec generate --prompt "Name three rivers." --temperature 0.8 --seed 1', text.generate_arguments, text.generate),
    Command("certify", "compute whether acceptors keep the target's law",
            "specdec certify RejectionAcceptor", certify.arguments, certify.run),
    Command("audit", "look at a real model: its greedy texts beside transformers' own, its rounding, its seeded and its sampled texts",
            "specdec audit --prompts question.jsonl --limit 8 --batch 4 --checks greedy,kernel,rules", audit.arguments, audit.run),
    Command("bench", "time methods side by side, against plain decoding and transformers' own",
            "specdec bench --prompts question.jsonl --methods plain,hf-plain,ngram --limit 8 --dtype bfloat16", bench.arguments, bench.run),
    Command("train", "train a draft head, or a draft model, on what the target says",
            "specdec train eagle3 --out heads/mine --tokens 2000000", train.arguments, train.run),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 if all is well, 1 if it failed, 2 if the command line cannot be parsed."""
    args = _parser().parse_args(argv)
    args.say = (lambda text: None) if args.json else _say
    command = next(c for c in COMMANDS if c.name == args.command)
    try:
        result, failure = command.run(args), None
    except Failed as error:
        result, failure = error.result, error
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.traceback:
            raise
        return _complain(command, error)
    if args.json:
        print(json.dumps(result))
    return 0 if failure is None else _complain(command, failure)


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _complain(command: Command, error: Exception) -> int:
    print(f"specdec {command.name}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec", description="Speculative decoding whose text provably follows the target's law.")
    parser.add_argument("--version", action="version", version=f"specdec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.help, description=command.help, epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.arguments(sub)
        sub.add_argument("--json", action="store_true", help="print JSON and nothing else")
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser
