"""`specdec certify`: the certificates of acceptors, in a table."""

from __future__ import annotations

import argparse
from typing import Any

from .. import acceptors, testing
from .command import Failed

__all__ = ["arguments", "run"]

ACCEPTORS = {name: getattr(acceptors, name) for name in acceptors.__all__}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The names of acceptors."""
    parser.add_argument("acceptors", nargs="*", metavar="ACCEPTOR", help=f"{', '.join(ACCEPTORS)} (default: all)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per acceptor and way of drafting; fails where a rule that claims to be lossless is not."""
    unknown = sorted(set(args.acceptors) - ACCEPTORS.keys())
    if unknown:
        raise ValueError(f"ACCEPTOR: {', '.join(unknown)} unknown; allowed are {', '.join(ACCEPTORS)}")
    rows: list[dict[str, Any]] = []
    args.say(f"{'acceptor':<20}{'shape':<20}{'drawn':<22}{'defect':>10}{'tokens':>8}  verdict\n")
    for name in args.acceptors or ACCEPTORS:
        for row in testing.certify(ACCEPTORS[name]()):
            rows.append(row)
            defect, tokens = ("", "") if row["defect"] is None else (f"{row['defect']:.1e}", f"{row['expected_tokens']:.3f}")
            args.say(f"{name:<20}{row['shape']:<20}{row['proposal']:<22}{defect:>10}{tokens:>8}  {row['verdict']}\n")
    failed = [f"{row['acceptor']} on {row['shape']}, {row['proposal']}: {row['reason']}" for row in rows if row["verdict"] == "fail"]
    if failed:
        raise Failed(f"{len(failed)} claims of losslessness do not hold; first {failed[0]}", rows)
    return rows
