"""What was accepted, by the rank of a child among its siblings: what `specdec.grow.optimal` is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..types import Round

__all__ = ["Rates", "by_rank"]


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
    accepted, attempted = Counter[int](), Counter[int]()
    for done in rounds:
        columns = (done.tree.parents.tolist(), done.tree.draws.node.tolist(), done.acceptance.path.tolist(), done.accepted, done.attempted)
        for parents, landed, path, taken, tried in zip(*columns, strict=True):
            children: dict[int, list[int]] = {}
            for node in dict.fromkeys(node for node in landed if node >= 0):
                children.setdefault(parents[node], []).append(node)
            for depth in range(tried):
                family = children[path[depth]]
                attempted.update(range(len(family)))
                if depth < taken:
                    accepted[family.index(path[depth + 1])] += 1
    ranks = range(1 + max(attempted, default=-1))
    return Rates(tuple(accepted[rank] for rank in ranks), tuple(attempted[rank] for rank in ranks))
