"""Typical acceptance: lossy."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import acceptable, ancestors, path_to
from ..types import Acceptance, DraftTree, Kind, Verification

__all__ = ["TypicalAcceptor"]


class TypicalAcceptor(Acceptor):
    """Not lossless: accepts whatever is likely enough, p(x) > min(epsilon, delta exp(-H(p))), on the deepest path that is so throughout
    (Cai et al. 2024, Medusa, section 2.3.1; of equally deep ones the most likely). The token behind it is drawn from the target's law.

    The law of the text is not the target's: wherever a drafted token passes, it takes the place of a draw. `certify` measures by how much.

    Args:
        epsilon: no token needs to be more likely than this.
        delta: scales the threshold where the target itself is unsure; the square root of epsilon if left out, as in the paper.
    """

    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def __init__(self, epsilon: float = 0.09, delta: float | None = None) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: got {value}, allowed is 0 to 1")
        self.epsilon, self.delta = epsilon, epsilon**0.5 if delta is None else delta

    def __repr__(self) -> str:
        return f"TypicalAcceptor(epsilon={self.epsilon}, delta={self.delta:.3g}; lossy)"

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        logp = verification.logp
        entropy = torch.special.entr(logp.exp()).sum(-1)
        least = (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
        above = tree.parents.clamp_min(0)
        score = logp.flatten(1).gather(1, above * logp.shape[-1] + tree.tokens)
        typical = acceptable(tree) & (score.exp() > least.gather(1, above))
        typical[:, 0], score[:, 0] = True, 0
        reach = ancestors(tree.parents)
        reached = ~(reach & ~typical[:, None, :]).any(-1)
        depth = torch.where(reached, reach.sum(-1), 0)
        likely = torch.where(reach, score[:, None, :], 0).sum(-1)
        node = torch.where(depth == depth.amax(-1, keepdim=True), likely, -torch.inf).argmax(-1)
        path, count = path_to(tree.parents, node)
        return Acceptance(path, count, source.categorical(verification.law(node), Purpose.NEXT, 0))
