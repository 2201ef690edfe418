"""Block verification: the coins of a chain, flipped from its end."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import draw_law, landed, path_to, sort_draws
from ..types import Acceptance, DraftTree, Kind, Verification
from .residual import failing, passing, remaining

__all__ = ["BlockAcceptor"]


class BlockAcceptor(Acceptor):
    """Decide on the longest prefix of a chain first (Sun et al. 2024, Algorithm 2). Of all lossless rules it accepts the most tokens of a
    sampled chain in a round; of chosen tokens it accepts what every rule does.

    It takes chains alone; `TraversalAcceptor` is the same for trees.
    """

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)
    chains: ClassVar[bool] = True

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        order, parents = sort_draws(tree)
        depth, root = order.shape[1], torch.zeros_like(tree.tokens[:, 0])
        # Down: the node at each depth and its budget, and whether the chain goes on below it.
        node, budget, going = [root], [torch.zeros_like(root, dtype=torch.float64)], []
        laws, drawn = [], []
        for k in range(depth):
            child, token = landed(tree, order[:, k])
            laws.append(verification.law(node[k]))
            drawn.append(draw_law(tree, order[:, k], laws[k].dtype, laws[k].shape[1]))
            going.append((parents[:, k] == node[k]) & (going[-1] if going else True))
            node.append(torch.where(going[k], child, node[k]))
            budget.append(passing(budget[k], laws[k], drawn[k], token))
        # Up: a node that the chain goes on below keeps what is left when that has failed. The root needs no coin.
        at, done = root, torch.zeros_like(root, dtype=torch.bool)
        for k in range(depth, 0, -1):
            kept = torch.where(going[k], remaining(budget[k], laws[k], drawn[k]), budget[k]) if k < depth else budget[k]
            passed = source.accept(kept.exp(), torch.ones_like(kept), k, going[k - 1] & ~done)
            at, done = torch.where(passed, k, at), done | passed
            if done.device.type == "cpu" and done.all():  # elsewhere a look would wait for the device
                break
        chosen, spent = (torch.stack(parts, 1).gather(1, at[:, None])[:, 0] for parts in (node, budget))
        law = verification.law(chosen)
        if depth:
            below = at.clamp_max(depth - 1)[:, None]
            _, left = failing(spent, law, draw_law(tree, order.gather(1, below)[:, 0], law.dtype, law.shape[1]))
            further = torch.stack(going, 1).gather(1, below) & (at < depth)[:, None]
            law = torch.where(further, left, law)
        path, count = path_to(tree.parents, chosen)
        return Acceptance(path, count, source.categorical(law, Purpose.NEXT, 0))
