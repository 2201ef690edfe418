"""The most tokens that any lossless rule could emit in a round, where there is a closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from torch import Tensor

from ..types import Float
from .laws import TargetLaw, Tokens

__all__ = ["chain_optimum", "level_optimum", "point_optimum"]

DraftLaw = TargetLaw


def point_optimum(paths: Sequence[Tokens], target: TargetLaw) -> float:
    """Drafted nodes that were chosen, not drawn: each is accepted at most with its own probability, 1 + sum of P(path).

    Args:
        paths: the distinct token paths of the nodes, in any order.
    """
    inner = list({path[:-1]: None for path in paths})
    step = dict(zip(inner, target(inner).tolist(), strict=True)) if inner else {}
    return 1 + math.fsum(math.prod(step[path[:i]][path[i]] for i in range(len(path))) for path in paths)


def chain_optimum(depth: int, target: TargetLaw, draft: DraftLaw) -> float:
    """A sampled chain: 1 + the sum of m(v), where m(vx) = min(q(vx), P(x | v) m(v)) and m of the root is 1.

    No lossless rule accepts a path with more mass, and block verification (Sun et al. 2024) reaches it everywhere.
    """
    mass: dict[Tokens, tuple[float, float]] = {(): (1.0, 1.0)}
    total = 1.0
    for _ in range(depth):
        above = list(mass)
        below = {}
        for v, p, q in zip(above, target(above).tolist(), draft(above).tolist(), strict=True):
            accepted, drafted = mass[v]
            below.update({(*v, x): (min(drafted * q[x], accepted * p[x]), drafted * q[x]) for x in range(len(p)) if q[x] > 0})
        mass = below
        total += math.fsum(accepted for accepted, _ in mass.values())
    return total


def level_optimum(candidates: Sequence[tuple[frozenset[int], float]], law: Float[Tensor, " V"]) -> float:
    """One level of candidates: 2 - max over sets A of tokens of Pr(all candidates in A) - P(A), by max-flow and min-cut.

    Args:
        candidates: the sets of drafted tokens and their probabilities.
        law: the target's.
    """
    p = law.tolist()
    worst = 0.0
    for chosen in product((False, True), repeat=len(p)):
        inside = {x for x, taken in enumerate(chosen) if taken}
        worst = max(worst, math.fsum(w for drafted, w in candidates if drafted <= inside) - math.fsum(p[x] for x in inside))
    return 2 - worst
