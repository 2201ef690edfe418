"""Token rejection on chains, recursive rejection on trees."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import draw_law, path_to, sort_draws
from ..types import Acceptance, DraftTree, Kind, Verification
from .residual import step

__all__ = ["RejectionAcceptor"]


class RejectionAcceptor(Acceptor):
    """Try the children of a node in draw order, each against what its elder siblings left over of the target's law.

    Exact for every kind of draw, mixed and merged as they may be. On a chain of drafted tokens it is Algorithm 1 of Leviathan et al.
    2023; on sampled trees the recursive rejection of SpecInfer (iid) and Sequoia (without replacement).
    """

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        logp = verification.logp
        batch, _, vocab = logp.shape
        node = torch.zeros(batch, dtype=torch.int64, device=logp.device)
        residual, whole = logp[:, 0].exp(), logp.new_ones(batch)
        order, parents = sort_draws(tree)
        for number in range(order.shape[1]):
            draw, here = order[:, number], parents[:, number] == node
            child = tree.draws.node.gather(1, draw[:, None]).clamp_min(0)
            token = tree.tokens.gather(1, child)[:, 0]
            num, den, _, failed = step(whole, residual, draw_law(tree, draw, logp.dtype, vocab), token)
            passed = source.accept(num, den, number, here)
            node = torch.where(passed, child[:, 0], node)
            law = logp.gather(1, child[..., None].expand(-1, -1, vocab))[:, 0].exp()
            residual = torch.where(passed[:, None], law, torch.where(here[:, None], failed, residual))
        path, count = path_to(tree.parents, node)
        return Acceptance(path, count, source.categorical(residual, Purpose.NEXT, 0))
