"""The most tokens that any lossless rule could emit in a round, where there is a closed form.

Of one level, the acceptance is 1 - max over sets A of tokens of Pr(all candidates in A) - p(A), by max-flow and min-cut. Where the
candidates are samples of q, a level set {x: q(x) / p(x) >= t} is among the best (Hu et al. 2025), and one sort finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ..types import Float
from .laws import TargetLaw, Tokens

__all__ = ["chain_optimum", "iid_level", "level_optimum", "mixed_level", "point_level", "point_optimum", "without_replacement_level"]

Law = Float[Tensor, " V"]
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


# ------------------------------------------------------------------------------------------ one level, large vocabularies


def point_level(p: Law, q: Law, k: int) -> float:
    """The chance that one of the k most likely tokens of q is accepted, all of them candidates: p(top k). Ties go to the lowest id,
    and a token without mass is no candidate."""
    return float(p[_top(q, k)].sum())


def mixed_level(p: Law, q: Law, k: int) -> float:
    """The same for the k - 1 most likely tokens of q and one sample of what they leave, q': p(top) + sum over the rest of min(p, q')."""
    top = _top(q, k - 1)
    left = q.index_fill(0, top, 0)
    left = left / left.sum() if bool(left.any()) else left
    return float(p[top].sum() + torch.minimum(p, left).sum())


def iid_level(p: Law, q: Law, k: int) -> float:
    """The same for k samples of q: Pr(all in A) = q(A)^k."""
    p, q, _ = _by_ratio(p, q)
    return _least(q.cumsum(0).pow(k), p)


def without_replacement_level(p: Law, q: Law, k: int) -> float:
    """The same for k samples of q without replacement.

    They are the first k arrivals of independent exponential clocks with rates q: fewer than k of them lie in A if fewer than k clocks of
    A ring before the first other one, at T ~ Exp(1 - q(A)). Given T = t, how many do is a sum of independent Bernoulli(1 - exp(-q(x) t)).
    The integral over log t is a trapezoidal sum, whose error falls exponentially with the step since the integrand is analytic and
    vanishes at both ends; what is left of it is rounding.
    """
    p, q, support = _by_ratio(p, q)
    k, others = min(k, support), q.flip(0).cumsum(0).flip(0)[1:]
    less = others.clone()  # none at all: the first arrival is another one
    if k > 1 and support > 1:
        step, last = 0.25, math.log(40 / float(others.min()))
        for i in range(math.ceil((last + 17) / step)):
            t = math.exp(last - i * step)
            less += _fewer(-t * q[:-1], k)[1:].sum(0) * others * (-t * others).exp() * t * step
    return _least(torch.nn.functional.pad(1 - less, (0, 1), value=1.0), p)


def _fewer(logs: Float[Tensor, " S"], k: int) -> Float[Tensor, "k S"]:
    """The probability that 0, 1, ... k - 1 of the first n independent events occur, for every n, from the logarithms of the probabilities
    that they don't: products of polynomials of degree 1, by doubling. Nothing is subtracted, so small numbers keep their digits."""
    counts = torch.zeros(k, len(logs), dtype=logs.dtype)
    counts[0], counts[1] = logs.exp(), -torch.expm1(logs)
    reach = 1
    while reach < len(logs):
        elder, here = counts[:, :-reach], counts[:, reach:]
        both = [torch.stack([elder[i] * here[j - i] for i in range(j + 1)]).sum(0) for j in range(k)]
        counts = torch.cat([counts[:, :reach], torch.stack(both)], 1)
        reach *= 2
    return counts


def _top(q: Law, k: int) -> Tensor:
    return q.sort(descending=True, stable=True).indices[: min(k, int((q > 0).sum()))]


def _by_ratio(p: Law, q: Law) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"], int]:
    """Both in the order in which level sets take tokens in, and how many tokens q may give; those that it can't are left out of q's."""
    ratio = torch.where(q > 0, p / torch.where(q > 0, q, 1), torch.inf)
    order, support = ratio.argsort(), int((q > 0).sum())
    return p[order][:support], q[order][:support], support


def _least(inside: Float[Tensor, " S"], p: Float[Tensor, " S"]) -> float:
    """1 - the maximum of Pr(all candidates in A) - p(A), from Pr(all candidates in A) of each level set; the empty set gives 0."""
    return 1 - max(0.0, float((inside - p.cumsum(0)).max()))
