"""Every kind of draft that an acceptor may meet, and what its exact laws say about the acceptor."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from ..base import Acceptor, Drafter
from ..drafters.grow import Shape, dynamic, static
from ..loop import compatible
from .drafters import TableDrafter
from .laws import Tokens, expected_tokens, hazard_defect, one_round, several_rounds, tabulated
from .optimum import round_optimum
from .purity import RAISED, WatchedAcceptor
from .tables import LawPairs, TableVerifier, law_pairs
from .tolerances import ROUND_LAW
from .truth import drafts

__all__ = ["Cell", "battery", "blank", "certify"]

SHAPES: dict[str, tuple[int, dict[str, Sequence[str] | Shape]]] = {
    "chain 3": (3, {"point": "ppp", "iid": "iii", "without replacement": "www", "mixed": "ipi"}),
    "tree (2,2)": (3, {"point": ("pp", "pp"), "iid": ("ii", "ii"), "without replacement": ("ww", "ww"), "mixed": ("rp", "rp")}),
    "tree (1,2)": (3, {"point": ("p", "pp"), "iid": ("i", "ii"), "without replacement": ("w", "ww"), "mixed": ("i", "rp")}),
    "level 2": (4, {"point": ("pp",), "iid": ("ii",), "without replacement": ("ww",), "mixed": ("rp",)}),
    "level 3": (4, {"point": ("ppp",), "iid": ("iii",), "without replacement": ("www",), "mixed": ("rpp",)}),
    "level 4": (4, {"iid": ("iiii",), "mixed": ("iwiw",)}),
    "chain 5": (2, {"iid": "iiiii"}),
    "merged paths (2,1)": (3, {"iid": ("ii", "i")}),
    "merged level 3": (3, {"iid": ("iii",)}),
    "merged samplers": (4, {"mixed": ("pIw",)}),
    "two samplers": (4, {"without replacement": ("wWw",)}),
    "empty": (3, {"none": ()}),
    "uneven rows": (4, {"mixed": ("rp", "i")}),
    "uneven chain": (4, {"iid": "iii"}),
    "two rounds": (2, {"point": "pp", "iid": "ii", "mixed": "pw", "siblings": ("ii",)}),
    "irregular": (3, {"point": static([(0,), (2,), (2, 1)]), "without replacement": static([(0,), (1,), (1, 0)], "w")}),
    "ranked, 3 of 6": (3, {"point": dynamic(2)}),
}
"""Vocabulary and, for each way of drawing, the levels of a `TableDrafter`, or its shape. Four tokens where siblings matter: with fewer,
faults hide."""

_DEAR = ("tree (2,2)", "level 4")
_DEPTH = 2
"""Of the shapes without letters."""
_ENOUGH = ("generic", "close", "zeros", "one-hot target", "disjoint")
"""Pairs of laws for the shapes with the most branches; the others are covered by the other shapes."""


@dataclass(frozen=True)
class Cell:
    """One shape drawn in one way, below prompts with several kinds of laws."""

    shape: str
    proposal: str
    drafter: TableDrafter
    pairs: LawPairs
    prompts: tuple[Tokens, ...]
    nodes: int = 16
    """Of the budget. Too few for all that is looked at where a shape has to choose."""
    rounds: int = 1
    """More than one go through the real loop: noise that is used twice and what leaks from round to round show there alone."""

    @property
    def verifier(self) -> TableVerifier:
        return TableVerifier(self.pairs.target)

    @property
    def plan(self) -> tuple[int, int, int]:
        """Room for the whole tree, or for `nodes` of it."""
        return self.nodes, max(1, len(self.drafter.levels)), 9

    def optimum(self, greedy: bool = False) -> list[float] | None:
        """The most tokens that a lossless rule could emit in a round after each prompt; `None` if that takes scipy and it is missing, and
        for several rounds."""
        return _optimum(self, greedy) if self.rounds == 1 else None


@cache  # it is the same for every acceptor
def _optimum(cell: Cell, greedy: bool) -> list[float] | None:
    targets, drafted = tabulated(cell.verifier, cell.prompts, len(cell.drafter.levels), greedy=greedy), _drafted(cell)
    best = [round_optimum(drafted[prompt], targets[prompt]) for prompt in cell.prompts]
    return None if None in best else cast("list[float]", best)


@cache
def _drafted(cell: Cell) -> dict[Tokens, dict[frozenset[Tokens], float]]:
    """The probability of each set of drafted token paths, after each prompt."""
    found: dict[Tokens, dict[frozenset[Tokens], list[float]]] = {prompt: {} for prompt in cell.prompts}
    for branch in drafts(cell.drafter, cell.verifier, cell.prompts, cell.plan):
        found[branch.root].setdefault(frozenset(draw.path for draw in branch.result), []).append(branch.probability)
    return {prompt: {paths: math.fsum(w) for paths, w in sets.items()} for prompt, sets in found.items()}


@cache
def battery() -> tuple[Cell, ...]:
    """All cells, ordered by shape."""
    return tuple(_cells())


def _cells() -> Iterator[Cell]:
    for shape, (vocab_size, ways) in SHAPES.items():
        for proposal, levels in ways.items():
            depth = _DEPTH if isinstance(levels, Shape) else len(levels)
            pairs = law_pairs(vocab_size, max(1, depth))
            merge, uneven = shape.startswith("merged"), shape.startswith("uneven")
            drafter = TableDrafter(pairs.draft, levels, depth=depth, other=pairs.other, merge=merge, uneven=uneven)
            chosen = [p for p, name in zip(pairs.prompts, pairs.names, strict=True) if shape not in _DEAR or name in _ENOUGH]
            nodes, rounds = 3 if shape.startswith("ranked") else 16, 2 if shape == "two rounds" else 1
            yield Cell(shape, proposal, drafter, pairs, tuple(chosen), nodes, rounds)


def certify(acceptor: Acceptor, *, cells: Sequence[Cell] | None = None, tolerance: float = ROUND_LAW) -> list[dict[str, Any]]:
    """What an acceptor does to the output law, computed exactly on the battery in float64.

    One row per cell of the battery, with the keys `acceptor`, `drafter`, `proposal` (how the tokens are drawn), `shape`, `lossless` (the
    claim), `defect` (see `hazard_defect`, the worst over the pairs of laws), `expected_tokens` a round (mean over the pairs),
    `efficiency` (their share of the most that a lossless rule could reach; None where that takes scipy and it is missing, and for several
    rounds), `verdict` and `reason`. Verdicts: "pass"; "fail"; "lossy" for a defect of a rule that claims none of losslessness; "refused"
    where the draws are of a kind that the acceptor does not take, and where nothing is decoded.

    Args:
        acceptor: the rule. Greedy rules are held against the argmax.
        cells: of `battery()`; all of them if left out.
        tolerance: of the defect.
    """
    return [_certificate(acceptor, cell, tolerance) for cell in (battery() if cells is None else cells)]


def blank(acceptor: Acceptor, drafter: Drafter, proposal: str, shape: str) -> dict[str, Any]:
    """A row of a certificate before anything is computed."""
    return {
        "acceptor": type(acceptor).__name__, "drafter": type(drafter).__name__, "proposal": proposal, "shape": shape,
        "lossless": acceptor.lossless, "defect": None, "expected_tokens": None, "efficiency": None, "verdict": "refused", "reason": None,
    }  # fmt: skip


def _certificate(acceptor: Acceptor, cell: Cell, tolerance: float) -> dict[str, Any]:
    row = blank(acceptor, cell.drafter, cell.proposal, cell.shape)
    try:
        compatible(cell.drafter, acceptor, acceptor.greedy)
    except ValueError as error:
        return row | {"reason": str(error)}
    try:
        parts = (cell.drafter, cell.verifier, WatchedAcceptor(acceptor), cell.prompts, cell.plan)
        laws = one_round(*parts) if cell.rounds == 1 else several_rounds(*parts, cell.rounds)
    except RAISED as error:  # the other rows may say more
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return row | {"verdict": "fail", "reason": f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"}
    longest = max(len(text) for law in laws.values() for text in law)
    targets = tabulated(cell.verifier, cell.prompts, longest - 1, greedy=acceptor.greedy)
    defects = {prompt: hazard_defect(laws[prompt], targets[prompt]) for prompt in cell.prompts}
    worst = max(defects, key=lambda prompt: defects[prompt])
    tokens = [expected_tokens(laws[prompt]) / cell.rounds for prompt in cell.prompts]
    best = cell.optimum(acceptor.greedy)
    efficiency = None if best is None else _share(tokens, best)
    row |= {"defect": defects[worst], "expected_tokens": math.fsum(tokens) / len(tokens), "efficiency": efficiency}
    if defects[worst] <= tolerance:
        return row | {"verdict": "pass"}
    kind = dict(zip(cell.pairs.prompts, cell.pairs.names, strict=True))[worst]
    return row | {"verdict": "fail" if acceptor.lossless else "lossy", "reason": f"worst for the pair of laws {kind!r}, prompt {worst}"}


def _share(tokens: Sequence[float], best: Sequence[float]) -> float:
    """Accepted tokens as a share of what could have been; the correction or bonus comes for free and does not count."""
    could = math.fsum(best) - len(best)
    return (math.fsum(tokens) - len(tokens)) / could if could > 0 else 1.0
