"""Two races under one noise: the exact law of the second, given who won the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["second_race"]


def second_race(first: Sequence[float], winner: int, second: Sequence[float]) -> list[float]:
    """Independent exponential clocks E_k, the same in both: argmin E_k / first[k] was `winner`; the law of argmin E_k / second[k].

    With s and t the two least times and u = s / t, the joint density of the winners i and j is first[i] second[j] / g(u)^2 on
    second[i] / first[i] <= u <= second[j] / first[j], where g(u) = sum_k max(first[k] u, second[k]) is linear between the ratios of the
    weights; and they are one token with probability 1 / sum_k max(first[k] / first[i], second[k] / second[i]).
    """
    a, b = ([weight / math.fsum(law) for weight in law] for law in (first, second))
    ratios = [y / x if x else math.inf for x, y in zip(a, b, strict=True)]
    edges = sorted({ratio for ratio, x, y in zip(ratios, a, b, strict=True) if x or y})

    def between(low: float, high: float) -> float:
        """The integral of 1 / g^2 over a piece on which g is linear."""
        slope = math.fsum(x for x, ratio in zip(a, ratios, strict=True) if ratio <= low)
        rest = math.fsum(y for y, ratio in zip(b, ratios, strict=True) if ratio > low)
        if math.isinf(high):
            return 1 / (slope * (slope * low + rest))
        return (high - low) / ((slope * low + rest) * (slope * high + rest))

    def share(j: int) -> float:
        if not b[j]:
            return 0.0
        if j == winner:
            return 1 / (a[j] * math.fsum(max(x / a[j], y / b[j]) for x, y in zip(a, b, strict=True)))
        return b[j] * math.fsum(between(*piece) for piece in pairwise(edges) if ratios[winner] <= piece[0] and piece[1] <= ratios[j])

    return [share(j) for j in range(len(b))]
