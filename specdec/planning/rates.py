"""What was accepted, by the rank of a child among its siblings: what `specdec.grow.optimal` is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..types import Round

__all__ = ["Rates", "by_depth", "by_rank"]


@dataclass(frozen=True)
class Rates:
    """Counts of children by their rank, from 0, in draw order among the siblings that were really drafted."""

    accepted: tuple[int, ...]
    attempted: tuple[int, ...]
    """How often a child of this rank was there when the text came to its parent, whatever became of its siblings."""

    @property
    def rates(self) -> list[float]:
        """How often the text goes on with the child of each rank; 0 where none was there."""
        return [a / n if n else 0.0 for a, n in zip(self.accepted, self.attempted, strict=True)]


def by_rank(rounds: Iterable[Round]) -> Rates:
    """Count the children that were up for acceptance, and those that were accepted, in rounds of `generate(..., return_rounds=True)`.

    A child that several draws landed on counts once, with its first draw. What lies behind the end of the output does not count.
    """
    return _rates(_counts(rounds).values())


def by_depth(rounds: Iterable[Round]) -> list[Rates]:
    """The same for the children of the root, for theirs, and so on."""
    return [_rates([counted]) for _, counted in sorted(_counts(rounds).items())]


_Counted = tuple[Counter[int], Counter[int]]


def _counts(rounds: Iterable[Round]) -> dict[int, _Counted]:
    """For each depth how often a child of each rank was accepted, and was there."""
    found: dict[int, _Counted] = {}
    for done in rounds:
        columns = (done.tree.parents.tolist(), done.tree.draws.node.tolist(), done.acceptance.path.tolist(), done.accepted, done.attempted)
        for parents, landed, path, taken, tried in zip(*columns, strict=True):
            children: dict[int, list[int]] = {}
            for node in dict.fromkeys(node for node in landed if node >= 0):
                children.setdefault(parents[node], []).append(node)
            for depth in range(tried):
                accepted, attempted = found.setdefault(depth, (Counter(), Counter()))
                family = children[path[depth]]
                attempted.update(range(len(family)))
                if depth < taken:
                    accepted[family.index(path[depth + 1])] += 1
    return found


def _rates(counted: Iterable[_Counted]) -> Rates:
    accepted, attempted = Counter[int](), Counter[int]()
    for taken, tried in counted:
        accepted, attempted = accepted + taken, attempted + tried
    ranks = range(1 + max(attempted, default=-1))
    return Rates(tuple(accepted[rank] for rank in ranks), tuple(attempted[rank] for rank in ranks))
