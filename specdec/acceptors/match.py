"""Draw the target's own token and walk down the tree while it is there."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import acceptable, path_to
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
    whatever the drafter, the planner and the batch."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        return _walk(tree, verification, source, Purpose.TARGET)


def _walk(tree: DraftTree, verification: Verification, source: Source, purpose: Purpose) -> Acceptance:
    may, above = acceptable(tree), tree.parents.clamp_min(0)
    # All nodes that hold the path drawn so far: merged trees may have several, whose laws are the same.
    here = (torch.arange(above.shape[1], device=above.device) == 0).expand_as(above)
    node = torch.zeros_like(above[:, 0])
    next_token, going = node, torch.ones_like(node, dtype=torch.bool)
    for depth in range(tree.height + 1):
        token = source.categorical(verification.law(node), purpose, depth, going)
        next_token = torch.where(going, token, next_token)
        here = here.gather(1, above) & (tree.parents >= 0) & (tree.tokens == token[:, None]) & may & going[:, None]
        going = here.any(-1)
        node = torch.where(going, here.to(torch.int64).argmax(-1), node)
        if going.device.type == "cpu" and not going.any():  # elsewhere a look would wait for the device
            break
    path, count = path_to(tree.parents, node)
    return Acceptance(path, count, next_token)
