"""The tree of a given size that promises the most tokens (Sequoia, Chen et al. 2024, arXiv 2402.12374, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from ..types import Int64

__all__ = ["Acceptance", "Path", "best_choices", "expected_tokens"]

Path = tuple[int, ...]
"""The ranks of a node and of those above it, from the root down."""


Acceptance = Sequence[float] | Sequence[Sequence[float]]
"""The chance that the text goes on with the child of rank 0, 1, ...: of whatever node, or listed for each depth. 0 beyond."""


def expected_tokens(choices: Iterable[Sequence[int]], acceptance: Acceptance) -> float:
    """Tokens a round with this tree: the next token, which comes anyway, and every node times the chance that the text goes through it.

    Args:
        choices: the path of every node, a rank for each level.
        acceptance: see `Acceptance`.
    """
    total = 1.0
    for path in choices:
        chance = 1.0
        for depth, rank in enumerate(path):
            ranks = _ranks(acceptance, depth)
            chance *= ranks[rank] if rank < len(ranks) else 0.0
        total += chance
    return total


def _ranks(acceptance: Acceptance, depth: int) -> Sequence[float]:
    if not _by_depth(acceptance):
        return cast(Sequence[float], acceptance)
    return cast(Sequence[Sequence[float]], acceptance)[depth] if depth < len(acceptance) else ()


def _by_depth(acceptance: Acceptance) -> bool:
    return len(acceptance) > 0 and isinstance(acceptance[0], Sequence)


def best_choices(acceptance: Acceptance, nodes: int, depth: int | None = None, draft_cost: float = 0.0,
                 verify_cost: Callable[[int], float] | None = None) -> tuple[Path, ...]:  # fmt: skip
    """See `specdec.grow.optimal`. Where chances are the same at all depths every node has its elder siblings, also where a younger one is
    likelier.

    Raises:
        ValueError: a number is out of its range.
    """
    try:
        by_depth = _by_depth(acceptance)
        chances = [[float(chance) for chance in _ranks(acceptance, n)] for n in range(len(acceptance) if by_depth else 1)]
    except TypeError as error:
        raise ValueError(f"acceptance: got {acceptance!r}; give numbers, or for each depth a list of numbers, such as one.rates") from error
    if not all(0 <= chance <= 1 for ranks in chances for chance in ranks):
        raise ValueError(f"acceptance: got {chances}; give the chance that the child of each rank is accepted, from 0 to 1")
    deepest = nodes if depth is None else min(depth, nodes)
    if nodes < 0 or deepest < 0 or not 0 <= draft_cost < math.inf:
        raise ValueError(f"nodes, depth, draft_cost: got {nodes}, {depth}, {draft_cost}; allowed are numbers of at least 0")
    price = [verify_cost(size) if verify_cost is not None else 1.0 for size in range(nodes + 1)]
    wrong = [size for size, cost in enumerate(price) if not 0 < cost < math.inf]
    if wrong:
        raise ValueError(f"verify_cost: got {price[wrong[0]]} for {wrong[0]} nodes, allowed are numbers above 0")
    deepest = min(deepest, len(chances)) if by_depth else deepest
    table = _Falling(chances, nodes) if by_depth else _Table(chances[0], nodes)
    # Among equals the lowest and then the smallest, as only what is better is taken.
    best, height, size = price[0], 0, 0
    for level in range(1, deepest + 1):
        if not table.deeper():
            break
        for count, tokens in enumerate(table.worth[level].tolist()):
            cost = (level * draft_cost + price[count]) / tokens if tokens > 0 else best
            if cost < best * (1 - 1e-12):
                best, height, size = cost, level, count
    return tuple(sorted(table.choices(height, size, ()), key=lambda path: (len(path), path)))


class _Falling:
    """Where chances differ by depth the best tree of n nodes is made of the n likeliest paths: none is likelier than its parent, so parents
    are among them. A younger sibling may be there without an elder one, where that is less likely."""

    def __init__(self, chances: list[list[float]], nodes: int) -> None:
        self._chances, self._nodes = chances, nodes
        self._best: list[list[tuple[float, Path]]] = [[]]
        """For each depth the likeliest paths that are no deeper, in order."""
        alone = torch.full((nodes + 1,), -torch.inf, dtype=torch.float64)
        alone[0] = 1.0
        self.worth = [alone]

    def deeper(self) -> bool:
        """Add a level; whether that made any tree better."""
        level = len(self._best)
        above = [(1.0, ())] if level == 1 else [one for one in self._best[-1] if len(one[1]) == level - 1]
        new = [(chance * own, (*path, rank)) for chance, path in above for rank, own in enumerate(self._chances[level - 1]) if own > 0]
        best = sorted([*self._best[-1], *new], key=lambda one: (-one[0], len(one[1]), one[1]))[: self._nodes]
        self._best.append(best)
        worth = torch.full((self._nodes + 1,), -torch.inf, dtype=torch.float64)
        worth[: len(best) + 1] = 1.0 + torch.tensor([0.0, *(chance for chance, _ in best)], dtype=torch.float64).cumsum(0)
        self.worth.append(worth)
        return not worth.equal(self.worth[-2])

    def choices(self, depth: int, nodes: int, above: Path) -> Iterator[Path]:
        """The nodes of the best tree."""
        return (path for _, path in self._best[depth][:nodes])


class _Table:
    """The dynamic program. `worth[d][n]` are the expected tokens of the best tree that has exactly n drafted nodes and is at most d deep,
    -inf where there is none: it gives its children to each rank in turn, and to each a tree of one level less."""

    def __init__(self, chances: list[float], nodes: int) -> None:
        self._chances, self._nodes = chances, nodes
        alone = torch.full((nodes + 1,), -torch.inf, dtype=torch.float64)
        alone[0] = 1.0
        self.worth = [alone]
        self._share: list[Int64[Tensor, "b N"]] = [torch.zeros(0, nodes + 1, dtype=torch.int64)]
        """How many nodes go to the youngest of b children and to what is below it."""
        self._most: list[Int64[Tensor, " N"]] = [torch.zeros(nodes + 1, dtype=torch.int64)]
        """With how many children a tree is best."""

    def deeper(self) -> bool:
        """Add a level; whether that made any tree better."""
        # A subtree of k nodes is a child and k - 1 nodes below it.
        below = torch.cat([torch.tensor([-torch.inf], dtype=torch.float64), self.worth[-1][:-1]])
        at = torch.arange(self._nodes + 1)
        rest = at[:, None] - at  # of n nodes, k to the youngest
        family, shares = [self.worth[0]], []
        for chance in self._chances[: self._nodes]:
            elders = torch.where(rest >= 0, family[-1][rest.clamp_min(0)], -torch.inf)
            whole, share = (elders + torch.where(below.isneginf(), below, chance * below)).max(1)
            family.append(whole)
            shares.append(share)
        worth, most = torch.stack(family).max(0)
        same = worth.equal(self.worth[-1])
        self.worth.append(worth)
        self._most.append(most)
        self._share.append(torch.stack(shares) if shares else self._share[0])
        return not same

    def choices(self, depth: int, nodes: int, above: Path) -> Iterator[Path]:
        """The nodes of the best tree."""
        left = [(depth, nodes, above)]  # a tree may be deeper than Python's stack
        while left:
            depth, nodes, above = left.pop()
            for rank in reversed(range(int(self._most[depth][nodes]))):
                share = int(self._share[depth][rank, nodes])
                yield (*above, rank)
                left.append((depth - 1, share - 1, (*above, rank)))
                nodes -= share
