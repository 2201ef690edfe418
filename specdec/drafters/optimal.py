"""The tree of a given size that promises the most tokens (Sequoia, Chen et al. 2024, arXiv 2402.12374, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..types import Int64

__all__ = ["Path", "best_choices", "expected_tokens"]

Path = tuple[int, ...]
"""The ranks of a node and of those above it, from the root down."""


def expected_tokens(choices: Iterable[Sequence[int]], acceptance: Sequence[float]) -> float:
    """Tokens a round with this tree: the next token, which comes anyway, and every node times the chance that the text goes through it.

    Args:
        choices: the path of every node, a rank for each level.
        acceptance: the chance that the text goes on with the child of rank 0, 1, ..., of whatever node; 0 for ranks beyond.
    """
    chances = dict(enumerate(acceptance))
    total = 1.0
    for path in choices:
        chance = 1.0
        for rank in path:
            chance *= chances.get(rank, 0.0)
        total += chance
    return total


def best_choices(acceptance: Sequence[float], nodes: int, depth: int | None = None, draft_cost: float = 0.0,
                 verify_cost: Callable[[int], float] | None = None) -> tuple[Path, ...]:  # fmt: skip
    """See `specdec.grow.optimal`. Every node has its elder siblings, also where a younger one is likelier.

    Raises:
        ValueError: a number is out of its range.
    """
    chances = [float(chance) for chance in acceptance]
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueError(f"acceptance: got {chances}; give the chance that the child of each rank is accepted, from 0 to 1")
    deepest = nodes if depth is None else min(depth, nodes)
    if nodes < 0 or deepest < 0 or draft_cost < 0:
        raise ValueError(f"nodes, depth, draft_cost: got {nodes}, {depth}, {draft_cost}; allowed are numbers of at least 0")
    price = [verify_cost(size) if verify_cost is not None else 1.0 for size in range(nodes + 1)]
    if min(price) <= 0:
        raise ValueError(f"verify_cost: got {min(price)} for {price.index(min(price))} nodes, allowed are numbers above 0")
    table = _Table(chances, nodes)
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
        for rank in reversed(range(int(self._most[depth][nodes]))):
            share = int(self._share[depth][rank, nodes])
            yield (*above, rank)
            yield from self.choices(depth - 1, share - 1, (*above, rank))
            nodes -= share
