"""The one kernel behind every lossless rule that uses the draft's law.

At a node with acceptance budget a and residual law r, a child x that was drawn from q passes with weight min(1, a r(x) / q(x)). If it
fails, with S = sum (a r - q)+, the node goes on with a' = S / (S + 1 - a) and r' = (a r - q)+ / S. Then min(q, a r) + S r' = a r: what
passes and what is left over make up a r exactly, whatever q is. Coins flipped at once (a = 1 throughout) give token rejection
(Leviathan et al. 2023; Chen et al. 2023), recursive rejection on trees (SpecInfer, Sequoia, EAGLE-1) and accept-with-r(x) for point
masses; coins deferred from leaf to root give block and traversal verification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Float, Int64

__all__ = ["step"]


def step(budget: Float[Tensor, " B"], residual: Float[Tensor, "B V"], law: Float[Tensor, "B V"], token: Int64[Tensor, " B"]) -> tuple[
    Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, "B V"]]:  # fmt: skip
    """One child at one node, for all rows.

    Returns:
        `num, den`: the child's weight as a fraction that nobody has divided, min(1, num / den);
        `budget, residual`: of the node, if the child fails. Where nothing is left over the node's budget is 0 and the old residual
        stands. With a budget of 1 that happens with probability 0, but for rounding, and the old residual is then the right law.
    """
    scaled = budget[:, None] * residual
    num, den = (x.gather(1, token[:, None])[:, 0] for x in (scaled, law))
    left = (scaled - law).clamp_min(0)
    mass = left.sum(-1)
    some = mass > 0
    safe = torch.where(some, mass, 1)
    failed_budget = torch.where(some, mass / (mass + 1 - budget).clamp_min(torch.finfo(mass.dtype).tiny), 0).clamp_max(1)
    return num, den, failed_budget, torch.where(some[:, None], left / safe[:, None], residual)
