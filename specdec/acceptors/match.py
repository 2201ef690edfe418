"""Draw the target's own token and walk down the tree while it is there."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import children_of, path_to
from ..types import Acceptance, DraftTree, Kind, Verification

__all__ = ["CoupledAcceptor", "MatchAcceptor"]


class MatchAcceptor(Acceptor):
    """Sample-and-match with fresh noise. Exact for any draft that does not depend on the acceptor's noise, however it was chosen;
    it needs no draft law, and for point draws no lossless rule accepts more."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        return _walk(tree, verification, source, Purpose.NEXT)


class CoupledAcceptor(Acceptor):
    """Sample-and-match with noise that belongs to the absolute position: the text is a function of the seed and the target alone,
    whatever the drafter, the planner and the batch (Daliri, Musco and Suresh 2024)."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        return _walk(tree, verification, source, Purpose.TARGET)


def _walk(tree: DraftTree, verification: Verification, source: Source, purpose: Purpose) -> Acceptance:
    logp = verification.logp
    batch, _, vocab = logp.shape
    node = torch.zeros(batch, dtype=torch.int64, device=logp.device)
    next_token, going = node, torch.ones_like(node, dtype=torch.bool)
    for depth in range(tree.height + 1):
        law = logp.gather(1, node[:, None, None].expand(-1, -1, vocab))[:, 0].exp()
        token = source.categorical(law, purpose, depth, going)
        next_token = torch.where(going, token, next_token)
        child, found = children_of(tree, node, token)
        going = going & found
        node = torch.where(going, child, node)
        if going.device.type == "cpu" and not going.any():  # elsewhere a look would wait for the device
            break
    path, count = path_to(tree.parents, node)
    return Acceptance(path, count, next_token)
