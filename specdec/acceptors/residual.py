"""The one kernel behind every lossless rule that uses the draft's law.

At a node with acceptance budget a and residual law r, a child x that was drawn from q passes with weight min(1, a r(x) / q(x)). If it
fails, with S = sum (a r - q)+, the node goes on with a' = S / (S + 1 - a) and r' = (a r - q)+ / S. Then min(q, a r) + S r' = a r: what
passes and what is left over make up a r exactly, whatever q is. Coins flipped at once (a = 1 throughout) give token rejection
(Leviathan et al. 2023; Chen et al. 2023), recursive rejection on trees (SpecInfer, Sequoia, EAGLE-1) and accept-with-r(x) for point
masses; coins deferred from leaf to root give block and traversal verification.

Budgets are kept as logarithms in float64: down a long path they become too small for a number, and then large again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Float, Int64

__all__ = ["failing", "passing", "remaining"]


def passing(budget: Float[Tensor, " B"], residual: Float[Tensor, "B V"], law: Float[Tensor, "B V"],
            token: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:  # fmt: skip
    """The logarithm of a child's weight, which is its budget: log min(1, a r(x) / q(x)); 0 where r(x) > 0 = q(x).

    Args:
        budget: log a, float64.
        residual, law: r and q.
        token: the child's, x.
    """
    num, den = (x.gather(1, token[:, None])[:, 0] for x in (residual, law))
    some = (num > 0) & (budget > -torch.inf)
    return torch.where(some, (torch.where(some, budget, 0) + num.double().log() - den.double().log()).clamp_max(0), -torch.inf)


def failing(budget: Float[Tensor, " B"], residual: Float[Tensor, "B V"],
            law: Float[Tensor, "B V"]) -> tuple[Float[Tensor, " B"], Float[Tensor, "B V"]]:  # fmt: skip
    """log a' and r', with which the node goes on if the child fails.

    Where nothing is left over a' is 0 and the old residual stands. With a = 1 that happens with probability 0, but for rounding, and the
    old residual is then the right law.
    """
    left = _over(budget, residual, law)
    mass = left.sum(-1, keepdim=True, dtype=torch.float64)  # of 150,000 numbers a sum in float32 is off by more than they are
    some = mass > 0
    return _kept(budget, mass[:, 0]), torch.where(some, left / torch.where(some, mass, 1).to(left.dtype), residual)


def remaining(budget: Float[Tensor, " B"], residual: Float[Tensor, "B V"], law: Float[Tensor, "B V"]) -> Float[Tensor, " B"]:
    """log a' alone, for half the work."""
    return _kept(budget, _over(budget, residual, law).sum(-1, dtype=torch.float64))


def _over(budget: Float[Tensor, " B"], residual: Float[Tensor, "B V"], law: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    return (budget.exp()[:, None].to(residual.dtype) * residual).sub_(law).clamp_min_(0)


def _kept(budget: Float[Tensor, " B"], mass: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    safe = torch.where(mass > 0, mass, 1)
    kept = safe.log() - (safe - budget.expm1()).log()
    # A node whose law is NaN keeps its budget, so that it is accepted as often as it should be, and found out.
    return torch.where(mass > 0, kept, torch.where(mass.isnan(), budget, -torch.inf))
