"""The most tokens that any lossless rule could emit in a round, whatever was drafted and however."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..types import Float
from .bounds import chain_optimum, level_optimum, point_optimum
from .laws import TargetLaw, Tokens

__all__ = ["flow_optimum", "round_optimum"]

Drafted = Mapping[frozenset[Tokens], float]
"""Probability of each draft, told by the token paths of its nodes; the path to a node's parent is among them, but for the root's."""


def round_optimum(drafted: Drafted, target: TargetLaw) -> float | None:
    """By a closed form where there is one, else by `flow_optimum`; `None` if that takes scipy and it is missing."""
    deepest = max(len(path) for paths in drafted for path in (*paths, ()))
    if len(drafted) == 1:
        return point_optimum(list(next(iter(drafted))), target)
    if deepest == 1:
        candidates = [(frozenset(token for (token,) in paths), probability) for paths, probability in drafted.items()]
        return level_optimum(candidates, target([()])[0])
    if all(len({len(path) for path in paths}) == len(paths) for paths in drafted):
        return chain_optimum(deepest, target, _draft_law(drafted, target([()]).shape[1]))
    return flow_optimum(drafted, target)


def _draft_law(drafted: Drafted, vocab_size: int) -> TargetLaw:
    """How a drafted chain goes on; less than a law where it may end."""
    reach: dict[Tokens, float] = defaultdict(float)
    for paths, probability in drafted.items():
        for path in ((), *paths):
            reach[path] += probability

    def after(texts: Sequence[Tokens]) -> Float[Tensor, "R V"]:
        rows = [[reach[(*v, x)] / reach[v] if v in reach else 0.0 for x in range(vocab_size)] for v in texts]
        return torch.tensor(rows, dtype=torch.float64)

    return after


def flow_optimum(drafted: Drafted, target: TargetLaw) -> float | None:
    """A linear program over all rules, whatever they look at, or `None` without scipy.

    A rule is f(T, v), the probability that T is drafted and v the last accepted node, with sum over v of f(T, v) = Pr(T). Let m(v) be the
    probability that v is accepted, m of the root being 1. The rule is lossless if and only if m(vx) <= P(x | v) m(v) for all v and x:
    what the correction after v adds at x is then P(x | v) m(v) - m(vx), and it has to be (see `hazard_defect`). The most tokens
    are 1 + the sum of m(v).
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix
    except ImportError:
        return None
    paths = sorted(frozenset().union(*drafted))
    if not paths:
        return 1.0
    place = {path: i for i, path in enumerate(paths)}
    inner = list({path[:-1]: None for path in paths})
    step = dict(zip(inner, target(inner).tolist(), strict=True))
    last = [(row, path) for row, tree in enumerate(drafted) for path in tree]
    # Columns: m of each path, then f of each draft and path; the root's f is what the others leave of Pr(T).
    ends = [(place[path], len(paths) + i, -1.0) for i, (_, path) in enumerate(last)]
    ends += [(place[path], place[path], 1.0) for path in paths]
    ends += [(place[path[:-1]], place[path], -1.0) for path in paths if len(path) > 1]
    most = [(row, len(paths) + i, 1.0) for i, (row, _) in enumerate(last)]
    most += [(len(drafted) + place[path], place[path], 1.0) for path in paths]
    most += [(len(drafted) + place[v], place[v[:-1]], -step[v[:-1]][v[-1]]) for v in paths if len(v) > 1]
    limit = [*drafted.values(), *(step[()][v[0]] if len(v) == 1 else 0.0 for v in paths)]

    def matrix(entries: Sequence[tuple[int, int, float]], rows: int) -> object:
        i, j, x = zip(*entries, strict=True)
        return coo_matrix((x, (i, j)), shape=(rows, len(paths) + len(last))).tocsr()

    worth = [-1.0] * len(paths) + [0.0] * len(last)
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    found = linprog(worth, matrix(most, len(limit)), limit, matrix(ends, len(paths)), [0.0] * len(paths), method="highs", options=tight)
    if not found.success:
        raise ArithmeticError(f"the linear program of {len(drafted)} drafts over {len(paths)} paths was not solved: {found.message}")
    return 1 + math.fsum(found.x[: len(paths)])
