"""Token rejection on chains, recursive rejection on trees."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import draw_law, landed, path_to, sort_draws
from ..types import Acceptance, DraftTree, Kind, Verification
from .residual import failing

__all__ = ["RejectionAcceptor"]


class RejectionAcceptor(Acceptor):
    """Try the children of a node in draw order, each against what its elder siblings left over of the target's law.

    Exact for every kind of draw, mixed and merged as they may be. On a chain of drafted tokens it is Algorithm 1 of Leviathan et al.
    2023; on sampled trees the recursive rejection of SpecInfer (iid) and Sequoia (without replacement).
    """

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        node = torch.zeros_like(tree.tokens[:, 0])
        rows, residual = torch.arange(len(node), device=node.device), verification.law(node)
        whole = torch.zeros_like(residual[:, 0], dtype=torch.float64)
        order, parents = sort_draws(tree)
        for number in range(order.shape[1]):
            draw, here = order[:, number], parents[:, number] == node
            if here.device.type == "cpu" and not here.any():  # elsewhere a look would wait for the device
                continue
            child, token = landed(tree, draw)
            law = draw_law(tree, draw, residual.dtype, residual.shape[1])
            passed = source.accept(residual[rows, token], law[rows, token], number, here)
            _, left = failing(whole, residual, law)
            node = torch.where(passed, child, node)
            residual = torch.where(passed[:, None], verification.law(node), torch.where(here[:, None], left, residual))
        path, count = path_to(tree.parents, node)
        return Acceptance(path, count, source.categorical(residual, Purpose.NEXT, 0))
