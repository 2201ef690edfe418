"""How drafted trees grow: level by level, in a shape that is fixed before anything is drawn.

A level is written with one letter per child of a node, in draw order:

    p   a point: the most likely token, less the elder points
    i   drawn from the law
    w   drawn from the law without replacement: less the elder `w` siblings
    r   drawn from the rest: what the node's points leave of the law

`chain`, `iid`, `without_replacement`, `mixed` and `points` write the usual ones; `growth.py` draws them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

from torch import Tensor

from ..types import Budget, Int64, Kind
from .dynamic import Ranking
from .growth import KINDS, Growing, Growth, Place
from .optimal import Acceptance, Path, best_choices, expected_tokens

__all__ = [
    "Dynamic", "Grower", "Shape", "Static", "chain", "dynamic", "expected_tokens", "iid", "mixed", "optimal", "points", "static",
    "without_replacement",
]  # fmt: skip


class Shape(ABC):
    """How a tree grows. Whoever has a law for each node of the last level makes a growth with `begin` and grows it level by level."""

    samplers: int = 1
    """How many models are drawn from."""

    @property
    @abstractmethod
    def draws(self) -> frozenset[Kind]:
        """The kinds that occur."""

    @property
    @abstractmethod
    def chains(self) -> bool:
        """Whether no node has two children."""

    @abstractmethod
    def chosen(self) -> Shape:
        """The same shape with points alone: the most likely tokens, as many as would be drawn."""

    @abstractmethod
    def begin(self, pending: Int64[Tensor, " B"], budget: Budget) -> Growing:
        """A tree with nothing but its root."""


@dataclass(frozen=True)
class Grower(Shape):
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
        return frozenset(KINDS[letter] for letter in "".join(self.levels).lower())

    @property
    def chains(self) -> bool:
        return all(len(letters) <= 1 for letters in self.levels)

    @property
    def samplers(self) -> int:  # type: ignore[override]
        return 1 if all(letters == letters.lower() for letters in self.levels) else 2

    def chosen(self) -> Grower:
        return replace(self, levels=tuple("p" * len(letters) for letters in self.levels), merge=False)

    def begin(self, pending: Int64[Tensor, " B"], budget: Budget) -> Growth:
        return Growth(self.places(budget), pending, merge=self.merge, samplers=self.samplers)

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


@dataclass(frozen=True)
class Static(Shape):
    """A tree of any fixed shape, in the format of Medusa's choices (Cai et al. 2024): `(0, 2)` is the third child of the first child.

    Args:
        choices: the path of every node, ordered by depth and then by ranks.
        letter: how children are drawn; `p`, or `w` with the rank as the number of the draw.
    """

    choices: tuple[Path, ...]
    letter: str = "p"

    def __post_init__(self) -> None:
        known = {(), *self.choices}
        if not all(isinstance(rank, int) for path in self.choices for rank in path):
            raise ValueError(f"choices: got {self.choices}; a path is made of whole numbers, the ranks of its nodes")
        for path in self.choices:
            below = [path[:-1]] + ([(*path[:-1], path[-1] - 1)] if self.letter == "w" and path and path[-1] else [])
            lost = [other for other in below if other not in known]
            if not path or min(path) < 0 or lost:
                raise ValueError(f"choices: {path} stands without {lost or 'a rank of at least 0'}; give every path that one begins with, "
                                 "and for draws without replacement every elder sibling")  # fmt: skip
        if self.letter not in ("p", "w") or list(self.choices) != sorted(known - {()}, key=lambda path: (len(path), path)):
            raise ValueError(
                f"choices, draw: got {self.choices} and {self.letter!r}; allowed are the draws 'p' and 'w', and paths in the order that "
                "specdec.grow.static puts them in"
            )

    @property
    def draws(self) -> frozenset[Kind]:
        return frozenset({KINDS[self.letter]}) if self.choices else frozenset()

    @property
    def chains(self) -> bool:
        return len({path[:-1] for path in self.choices}) == len(self.choices)

    def chosen(self) -> Static:
        return replace(self, letter="p")

    def begin(self, pending: Int64[Tensor, " B"], budget: Budget) -> Growth:
        return Growth(self.places(budget), pending)

    def places(self, budget: Budget) -> Iterator[list[Place]]:
        """Those of each level that some row has room for."""
        limits = list(zip(budget.nodes.tolist(), budget.depth.tolist(), budget.width.tolist(), strict=True))
        columns: dict[Path, int] = {(): 0}
        column = number = 0
        for depth in range(1, 1 + max(map(len, self.choices), default=0)):
            level: list[Place] = []
            elders: dict[Path, list[int]] = {}
            for path in (path for path in self.choices if len(path) == depth):
                ranks = elders.setdefault(path[:-1], [])
                room = tuple(number < nodes and depth <= deepest and len(ranks) < width for nodes, deepest, width in limits)
                skip = path[-1] - (ranks[-1] + 1 if ranks else 0)
                ranks.append(path[-1])
                if any(room) and path[:-1] in columns:
                    column += 1
                    columns[path] = column
                    level.append(Place(column, columns[path[:-1]], self.letter, number, room, skip))
                number += 1
            if not level:
                return
            yield level


@dataclass(frozen=True)
class Dynamic(Shape):
    """The most likely nodes, wherever they are (EAGLE-2, Li et al. 2024, arXiv 2406.16858). They are chosen by their values, so all of them
    are points, which is exact whatever is sampled.

    Args:
        width: children of a node that are looked at, and nodes of a level that are gone on with.
        depth: levels at most; as many as the budget has if left out.
    """

    width: int = 10
    depth: int | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(given, int) and given >= 1 for given in (self.width, 1 if self.depth is None else self.depth)):
            raise ValueError(f"width, depth: got {self.width} and {self.depth}, allowed are whole numbers of at least 1")

    @property
    def draws(self) -> frozenset[Kind]:
        return frozenset({Kind.POINT})

    @property
    def chains(self) -> bool:
        return self.width == 1

    def chosen(self) -> Dynamic:
        return self

    def begin(self, pending: Int64[Tensor, " B"], budget: Budget) -> Ranking:
        return Ranking(self.width, pending, budget if self.depth is None else replace(budget, depth=budget.depth.clamp_max(self.depth)))


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


def static(choices: Iterable[Sequence[int]], draw: str = "p") -> Static:
    """The tree with these nodes, each by the ranks on the way to it: `[(0,), (1,), (0, 0)]` is two children and one grandchild.

    Args:
        choices: as Medusa's `medusa_choices`, in any order.
        draw: "p" for the most likely tokens, "w" for draws without replacement.
    """
    return Static(tuple(sorted({tuple(path) for path in choices}, key=lambda path: (len(path), path))), draw)


def dynamic(width: int = 10, depth: int | None = None) -> Dynamic:
    """The budget's most likely nodes, chosen from the `width` best children of the `width` best nodes of each level (EAGLE-2)."""
    return Dynamic(width, depth)


def optimal(acceptance: Acceptance, nodes: int, *, depth: int | None = None, draw: str = "p", draft_cost: float = 0.0,
            verify_cost: Callable[[int], float] | None = None) -> Static:  # fmt: skip
    """The static tree that promises the most tokens a round (Sequoia, Chen et al. 2024, section 4.1); with costs, the most for its time.

    Args:
        acceptance: the chance that the text goes on with the child of rank 0, 1, ..., `specdec.planning.by_rank(rounds).rates`; or for
            each depth such a list, `[one.rates for one in by_depth(rounds)]`, for drafters that get worse with depth (Cai et al. 2024,
            section 2.3.3). Measure with trees in which every node has all its children.
        nodes: drafted tokens at most.
        depth: levels at most; as many as pay if left out.
        draw: as in `static`. Measure `acceptance` with the same.
        draft_cost: what drafting a level costs.
        verify_cost: what a target pass over that many drafted nodes costs, above 0, in the same unit; the same for all if left out.

    Raises:
        ValueError: a number is out of its range.
    """
    if draw == "w" and acceptance and isinstance(acceptance[0], Sequence):  # an elder child is drawn first, however rarely it is right
        acceptance = [list(accumulate(ranks, min)) for ranks in cast(Sequence[Sequence[float]], acceptance)]
    return static(best_choices(acceptance, nodes, depth, draft_cost, verify_cost), draw)
