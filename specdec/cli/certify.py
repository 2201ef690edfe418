"""`specdec certify`: the certificates of acceptors and drafters, the library's or a reader's own, in a table."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import acceptors, drafters, testing
from ..base import Acceptor, Drafter
from ..testing.battery import battery
from ..testing.counterexample import minimal
from ..testing.drafter_checks import certify_drafter
from ..testing.mutant_report import mutant_rows
from ..testing.subject import LOSSLESS
from .command import Failed

__all__ = ["arguments", "run"]

ACCEPTORS = {name: getattr(acceptors, name) for name in acceptors.__all__}
DRAFTERS = {name: part for name in drafters.__all__ if inspect.isclass(part := getattr(drafters, name)) and issubclass(part, Drafter)}

Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Which parts."""
    own = "or a class of your own as module:Class, importable from here and made without arguments"
    parser.add_argument("acceptors", nargs="*", metavar="ACCEPTOR", help=f"{', '.join(ACCEPTORS)}; {own} (default: all of the library's)")
    parser.add_argument("--acceptor", action="append", default=[], metavar="X", help="the same; may be repeated")
    parser.add_argument(
        "--drafter", metavar="X", help=f"check a drafter, with these acceptors or all lossless ones: a name of the library, {own}"
    )
    parser.add_argument(
        "--mutants", action="store_true", help="show that faulty parts are rejected, and which weaker tests would not do so"
    )


def run(args: argparse.Namespace) -> list[Row]:
    """One row per acceptor and way of drafting; fails where a rule that claims to be lossless is not."""
    names = [*args.acceptors, *args.acceptor]
    if args.mutants:
        if names or args.drafter:
            raise ValueError("--mutants: it has parts of its own; leave ACCEPTOR, --acceptor and --drafter out")
        return _mutants(args)
    unknown = sorted(name for name in names if ":" not in name and name not in ACCEPTORS)
    if unknown:
        raise ValueError(f"ACCEPTOR: {', '.join(unknown)} unknown; allowed are {', '.join(ACCEPTORS)}, or module:Class")
    chosen: Sequence[Acceptor] = [_part(name, ACCEPTORS, Acceptor, "ACCEPTOR") for name in names]
    if args.drafter:
        drafter = _part(args.drafter, DRAFTERS, Drafter, "--drafter")
        found = certify_drafter(drafter, chosen or LOSSLESS)
    else:
        found = _certificates(chosen or [make() for make in ACCEPTORS.values()])
    args.say(f"{'acceptor':<20}{'shape':<20}{'drawn':<22}{'defect':>10}{'tokens':>8}{'of best':>9}  verdict\n")
    rows = []
    for row in found:
        rows.append(row)
        args.say(_line(row))
    failed = [f"{row['acceptor']} on {row['shape']}, {row['proposal']}: {row['reason']}" for row in rows if row["verdict"] == "fail"]
    if failed:
        raise Failed(f"{len(failed)} claims of losslessness do not hold; first {failed[0]}", rows)
    return rows


def _certificates(chosen: Sequence[Acceptor]) -> Iterator[Row]:
    for acceptor in chosen:
        searched = False
        for cell in battery():
            (row,) = testing.certify(acceptor, cells=[cell])
            if row["verdict"] == "fail" and not searched:
                searched, example = True, minimal(acceptor)
                row = {**row, "counterexample": None if example is None else example.as_json()}
            yield row


def _line(row: Row) -> str:
    defect, tokens = ("", "") if row["defect"] is None else (f"{row['defect']:.1e}", f"{row['expected_tokens']:.3f}")
    share = "" if row["efficiency"] is None else f"{row['efficiency']:.3f}"
    line = f"{row['acceptor']:<20}{row['shape']:<20}{row['proposal']:<22}{defect:>10}{tokens:>8}{share:>9}  {row['verdict']}\n"
    if row["verdict"] == "fail":
        line += f"  {row['reason']}\n"
    example = row.get("counterexample")
    return line if example is None else line + "".join(f"    {told}\n" for told in example["told"].splitlines())


def _part(name: str, known: Mapping[str, Any], base: type, flag: str) -> Any:
    """A part of the library or of a reader's own module, made without arguments."""
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in known:
            raise ValueError(f"{flag}: {name} unknown; allowed are {', '.join(known)}, or module:Class")
        make = known[name]
    else:
        make = _imported(module, attribute, flag)
    if not inspect.isclass(make) or not issubclass(make, base):
        raise ValueError(f"{flag}: {name} is {make!r}; give a subclass of specdec.base.{base.__name__}")
    if inspect.isabstract(make):
        raise ValueError(f"{flag}: {name} leaves {', '.join(sorted(make.__abstractmethods__))} abstract; define them")  # type: ignore[attr-defined]
    try:
        part: Any = make()
    except TypeError as error:
        raise ValueError(f"{flag}: {name} cannot be made without arguments ({error}); name a subclass whose __init__ takes none") from error
    if base is Acceptor:
        try:
            _ = part.lossless, part.takes
        except AttributeError as error:
            raise ValueError(f"{flag}: {name}: {error}; set lossless and takes on the class, see specdec.base.Acceptor") from error
    return part


def _imported(module: str, attribute: str, flag: str) -> Any:
    here = os.getcwd()
    sys.path.insert(0, here)  # an installed command does not look into the current folder by itself
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{flag}: cannot import {module!r} from {here} ({error}); give module:Class, without .py") from error
    finally:
        sys.path.remove(here)
    if attribute not in vars(found):
        classes = [name for name, value in vars(found).items() if inspect.isclass(value) and value.__module__ == found.__name__]
        raise ValueError(f"{flag}: {module} has no {attribute}; its classes are {', '.join(classes) or 'none'}")
    return vars(found)[attribute]


def _mutants(args: argparse.Namespace) -> list[Row]:
    rows, tests = [], {}
    args.say("Faulty parts, and what rejects each. The columns say which weaker tests would have let a faulty acceptor through.\n\n")
    for row in mutant_rows():
        rows.append(row)
        if row["weaker"] is not None:
            if not tests:
                tests = dict.fromkeys(row["weaker"])
                args.say("".join(f"  {number}  {name}\n" for number, name in enumerate(tests, 1)) + "\n")
                args.say(f"{'':<66}{' '.join(str(number) for number in range(1, len(tests) + 1))}\n")
            marks = "  ".join("x" if passed else "." for passed in row["weaker"].values()).replace("  ", " ")
        else:
            marks = ""
        verdict = "rejected" if row["rejected"] else "NOT REJECTED"
        args.say(f"{row['part']:<9}{row['mutant']:<57}{marks}\n  {verdict} by {row['check']}: {_short(row['reason'])}\n")
    blind = [f"{row['part']} {row['mutant']!r}" for row in rows if not row["rejected"]]
    args.say(f"\n{len(rows) - len(blind)} of {len(rows)} faulty parts are rejected\n")
    if blind:
        raise Failed(f"{len(blind)} faulty parts are not rejected: {', '.join(blind)}", rows)
    return rows


def _short(reason: str | None) -> str:
    text = " ".join((reason or "nothing was said").split())
    return text if len(text) <= 160 else f"{text[:157]}..."
