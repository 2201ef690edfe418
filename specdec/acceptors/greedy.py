"""Follow the target's argmax."""

from __future__ import annotations

from typing import ClassVar

from ..base import Acceptor
from ..rng import Source
from ..tree import ancestors, follow, path_to
from ..types import Acceptance, DraftTree, Kind, Verification

__all__ = ["GreedyAcceptor"]


class GreedyAcceptor(Acceptor):
    """Accept while the tree holds the target's most likely token, ties to the lowest id. Exact with respect to greedy decoding."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)
    greedy: ClassVar[bool] = True

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        best = verification.logp.argmax(-1) if verification.best is None else verification.best
        reach = ancestors(tree.parents)
        node = follow(tree, best, reach)
        path, count = path_to(tree.parents, node, reach)
        return Acceptance(path, count, best.gather(1, node[:, None])[:, 0])
