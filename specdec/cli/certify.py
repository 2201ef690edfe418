"""`specdec certify`: the certificates of acceptors and drafters, the library's or a reader's own, in a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from .. import testing
from ..base import Acceptor, Drafter
from ..testing.acceptor_checks import acceptor_checks
from ..testing.battery import battery, blank
from ..testing.counterexample import minimal
from ..testing.drafter_checks import certify_drafter
from ..testing.mutant_report import mutant_rows
from ..testing.purity import RAISED
from ..testing.subject import LOSSLESS
from .command import Failed
from .parts import ACCEPTORS, DRAFTERS, part

__all__ = ["arguments", "run"]

Row = dict[str, Any]
_SEPARATOR = "; "
"""Between the checks that a drafter fails."""


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
    chosen: Sequence[Acceptor] = [part(name, ACCEPTORS, Acceptor, "ACCEPTOR") for name in names]
    if args.drafter:
        drafter = part(args.drafter, DRAFTERS, Drafter, "--drafter")
        found = certify_drafter(drafter, chosen or LOSSLESS)
    else:
        found = _certificates(chosen or [make() for make in ACCEPTORS.values()])
    args.say(f"{'acceptor':<20}{'shape':<20}{'drawn':<22}{'defect':>10}{'tokens':>8}{'of best':>9}  verdict\n")
    rows = []
    for row in found:
        rows.append(row)
        args.say(_line(row))
    if find_spec("scipy") is None and any(row["efficiency"] is None and row["verdict"] in ("pass", "lossy") for row in rows):
        args.say("of best is left out where it takes a linear program: pip install scipy\n")
    failed = [row for row in rows if row["verdict"] == "fail"]
    if failed:
        first = f"{failed[0]['acceptor']} on {failed[0]['shape']}, {failed[0]['proposal']}: {_short(failed[0]['reason'])}"
        raise Failed(f"{len(failed)} claims of losslessness do not hold; first {first}", rows)
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
        for name, check in acceptor_checks(acceptor, cells=()):
            whole = blank(acceptor, cell.drafter, "any", name) | {"verdict": "pass"}
            try:
                check(acceptor)
            except RAISED as error:
                whole |= {"verdict": "fail", "reason": f"{type(error).__name__}: {error}"}
            yield whole


def _line(row: Row) -> str:
    defect, tokens = ("", "") if row["defect"] is None else (f"{row['defect']:.1e}", f"{row['expected_tokens']:.3f}")
    share = "" if row["efficiency"] is None else f"{row['efficiency']:.3f}"
    line = f"{row['acceptor']:<20}{row['shape']:<20}{row['proposal']:<22}{defect:>10}{tokens:>8}{share:>9}  {row['verdict']}\n"
    if row["verdict"] == "fail":
        line += "".join(f"  {told}\n" for told in row["reason"].split(_SEPARATOR))
    example = row.get("counterexample")
    return line if example is None else line + "".join(f"    {told}\n" for told in example["told"].splitlines())


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
