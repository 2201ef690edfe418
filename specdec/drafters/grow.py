"""How drafted trees grow: level by level, in a shape that is fixed before anything is drawn.

A level is written with one letter per child of a node, in draw order:

    p   a point: the most likely token, less the elder points
    i   drawn from the law
    w   drawn from the law without replacement: less the elder `w` siblings
    r   drawn from the rest: what the node's points leave of the law

`chain`, `iid`, `without_replacement`, `mixed` and `points` write the usual ones; `growth.py` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..types import Budget, Kind

__all__ = ["Grower", "chain", "iid", "mixed", "points", "without_replacement"]

KINDS = {"p": Kind.POINT, "i": Kind.IID, "w": Kind.WITHOUT_REPLACEMENT, "r": Kind.IID}


@dataclass(frozen=True)
class Place:
    """Where a draw may land, if a row has room for it."""

    column: int
    parent: int
    """Column above, 0 for the root."""
    letter: str
    number: int
    """In the whole shape."""
    room: tuple[bool, ...]
    """Which rows have it."""


@dataclass(frozen=True)
class Grower:
    """The shape of a tree and how its tokens are drawn.

    Places are numbered level by level over the whole shape, and a row fills those whose number lies below its budget's nodes. A place that
    stays empty is not given to another, so that a row's draws keep their numbers whatever was drawn before them and beside it. Give a shape
    the widths that are meant, and not wider ones to be cut by the budget's width.

    Args:
        levels: for each depth the letters of one node's children. Capitals draw from a second model, for nodes where two samplers meet.
        repeat: go on with the last level until the budget ends.
        merge: draws of one token below one node land on one node, and the children of all of them hang there: iid paths become a trie with
            multiplicities (SpecInfer, Miao et al. 2024). Without it every draw has a node of its own.
    """

    levels: tuple[str, ...]
    repeat: bool = True
    merge: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.levels, tuple) or set("".join(self.levels).lower()) - set(KINDS):
            raise ValueError(f"levels: got {self.levels!r}; give a tuple with the letters of each level, of {', '.join(KINDS)}")

    @property
    def draws(self) -> frozenset[Kind]:
        """The kinds that occur."""
        return frozenset(KINDS[letter] for letter in "".join(self.levels).lower())

    @property
    def chains(self) -> bool:
        """Whether no node has two children."""
        return all(len(letters) <= 1 for letters in self.levels)

    @property
    def samplers(self) -> int:
        """How many models are drawn from."""
        return 1 if all(letters == letters.lower() for letters in self.levels) else 2

    def chosen(self) -> Grower:
        """The same shape with points alone: the most likely tokens, as many as would be drawn."""
        return replace(self, levels=tuple("p" * len(letters) for letters in self.levels), merge=False)

    def places(self, budget: Budget) -> Iterator[list[Place]]:
        """Those of each level that some row has room for."""
        limits = list(zip(budget.nodes.tolist(), budget.depth.tolist(), budget.width.tolist(), strict=True))
        above, first, size, column = [(0, 0)], 0, 1, 0
        for depth in range(1, 1 + max((depth for _, depth, _ in limits), default=0)):
            if not self.levels or (depth > len(self.levels) and not self.repeat):
                return
            letters, level, here = self.levels[min(depth, len(self.levels)) - 1], [], []
            for parent, place_above in above:
                for child, letter in enumerate(letters):
                    place = place_above * len(letters) + child
                    spot = place if self.merge else child  # merged, the children of a whole level may come to hang on one node
                    room = tuple(first + place < nodes and depth <= deepest and spot < width for nodes, deepest, width in limits)
                    if any(room):
                        column += 1
                        level.append(Place(column, parent, letter, first + place, room))
                        here.append((column, place))
            if not level:
                return
            yield level
            above, first, size = here, first + size * len(letters), size * len(letters)


def chain() -> Grower:
    """One token after another."""
    return Grower(("i",))


def iid(*widths: int, merge: bool = False) -> Grower:
    """So many children of a node at each depth, the last number at all that follow; drawn independently (SpecInfer, Miao et al. 2024)."""
    return Grower(tuple("i" * width for width in _known(widths)), merge=merge)


def without_replacement(*widths: int) -> Grower:
    """As `iid`, but of one node no two children hold the same token (Jeon et al. 2024; Sequoia, Chen et al. 2024)."""
    return Grower(tuple("w" * width for width in _known(widths)))


def mixed(*widths: int) -> Grower:
    """One child drawn from what the others leave, which is tried first; the others are the most likely tokens. With recursive rejection no
    way to verify a level accepts more (Hu et al. 2025, arXiv 2502.18779): the mass of the points, and min(p, q) over the rest."""
    return Grower(tuple("r" + "p" * (width - 1) for width in _known(widths)))


def points(*widths: int) -> Grower:
    """The most likely tokens, which is the tree for greedy decoding."""
    return Grower(tuple("p" * width for width in _known(widths)))


def _known(widths: Sequence[int]) -> Sequence[int]:
    if not widths or any(width < 1 for width in widths):
        raise ValueError(f"widths: got {list(widths)}; give the children of one node at each depth, each at least 1, the last one repeats")
    return widths
