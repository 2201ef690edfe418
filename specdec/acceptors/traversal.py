"""Traversal verification: the coins of a tree, flipped from its leaves to its root."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import ancestors, draw_law, landed, path_to, sort_draws
from ..types import Acceptance, DraftTree, Float, Int64, Kind, Verification, probabilities
from .residual import failing, passing

__all__ = ["TraversalAcceptor"]


class TraversalAcceptor(Acceptor):
    """Try whole paths before their prefixes, elder subtrees before younger ones (Weng et al. 2025): a node's coin is flipped when
    everything below it has failed. Exact for every kind of draw, mixed and merged as they may be. On a chain it is block verification.
    """

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        budget, residual, order = _down(tree, verification)
        rows, node = torch.arange(len(order), device=order.device), torch.zeros_like(order[:, 0])
        done = torch.zeros_like(node, dtype=torch.bool)
        for number in range(order.shape[1]):
            at = order[:, number]
            here = budget[rows, at]
            passed = source.accept(here.exp(), torch.ones_like(here), number, (at > 0) & (here > -torch.inf) & ~done)
            node, done = torch.where(passed, at, node), done | passed
            if done.device.type == "cpu" and done.all():  # elsewhere a look would wait for the device
                break
        path, count = path_to(tree.parents, node)
        return Acceptance(path, count, source.categorical(residual[rows, node], Purpose.NEXT, 0))


def _down(tree: DraftTree, verification: Verification) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N V"], Int64[Tensor, "B N"]]:
    """What each node has left of its log-budget and its law when all below it has failed, and the order in which nodes are asked:
    children before parents, elder subtrees before younger ones, and at the end those that can't be accepted."""
    batch, nodes = tree.tokens.shape
    rows = torch.arange(batch, device=tree.tokens.device)
    residual = probabilities(verification.scores)
    budget = torch.full_like(residual[:, :, 0], -torch.inf, dtype=torch.float64)
    budget[:, 0] = 0
    # A subtree takes as many places as it has nodes, its root the last of them.
    size, begin = ancestors(tree.parents).sum(1), torch.zeros_like(tree.tokens)
    place, met = size - 1, torch.zeros_like(tree.tokens, dtype=torch.bool)
    draws, parents = sort_draws(tree)
    for number in range(draws.shape[1]):
        draw, above = draws[:, number], parents[:, number].clamp_max(nodes - 1)
        child, token = landed(tree, draw)
        real = parents[:, number] < nodes
        new = real & ~met[rows, child]  # once a draw has failed, another one of its token has no weight, only a share in what is left
        had, law = budget[rows, above], residual[rows, above]
        drawn = draw_law(tree, draw, law.dtype, law.shape[1])
        less, left = failing(had, law, drawn)
        start = begin[rows, above]
        end = start + size[rows, child]
        for into, at, value, where in (
            (budget, child, passing(had, law, drawn, token), new), (budget, above, less, real),
            (residual, above, left, real[:, None]), (begin, above, end, new), (begin, child, start, new), (place, child, end - 1, new),
            (met, child, new, new),
        ):  # fmt: skip
            into[rows, at] = torch.where(where, value, into[rows, at])
    return budget, residual, torch.where(budget > -torch.inf, place, nodes).argsort(-1)
