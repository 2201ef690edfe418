"""K-SEQ: one threshold for all iid siblings."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import draw_law, landed, path_to, sort_draws
from ..types import Acceptance, DraftTree, Float, Kind, Verification

__all__ = ["KSeqAcceptor"]

_HALVINGS = 30


class KSeqAcceptor(Acceptor):
    """Each of k iid samples of q passes with probability min(1, p(x) / (rho q(x))), all with the same rho (Sun et al. 2023, SpecTr,
    Algorithm 3). A baseline: siblings are treated alike, and what is left of the law is settled once, when all have failed.

    With beta = sum min(q, p / rho), one of them passes with probability 1 - (1 - beta)^k; every rho for which that is no more than
    rho beta is exact, and the smallest accepts most. A chosen token, or one with no sibling of its law, is a k of 1, where rho = 1.

    The rule uses k from the first of the samples on, so k must not depend on them: see `Drafter.fixed_widths`.
    """

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset({Kind.POINT, Kind.IID})
    fixed_widths: ClassVar[bool] = True

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        node = torch.zeros_like(tree.tokens[:, 0])
        rows, residual = torch.arange(len(node), device=node.device), verification.law(node)
        order, parents = sort_draws(tree)
        kind, law = (part.gather(1, order) for part in (tree.draws.kind, tree.draws.law))
        # Draws of one law below one node, one right behind the other.
        other = (kind[:, 1:] != Kind.IID) | (parents[:, 1:] != parents[:, :-1]) | (law[:, 1:] != law[:, :-1])
        run = torch.nn.functional.pad(other, (1, 0)).cumsum(-1)
        alike = run[:, :, None] == run[:, None, :]
        for number in range(order.shape[1]):
            draw, here = order[:, number], parents[:, number] == node
            if here.device.type == "cpu" and not here.any():  # elsewhere a look would wait for the device
                continue
            child, token = landed(tree, draw)
            drawn = draw_law(tree, draw, residual.dtype, residual.shape[1])
            rho, passing = _threshold(residual, drawn, alike[:, number].sum(-1))
            passed = source.accept(residual[rows, token], rho * drawn[rows, token], number, here)
            # While younger ones of its kind are to come, the law stays what it was.
            last = here & ~alike[:, number, number + 1 :].any(-1)
            left = (residual - passing).clamp_min(0)
            left = torch.where(left.sum(-1, keepdim=True) > 0, left / left.sum(-1, keepdim=True), residual)
            node = torch.where(passed, child, node)
            residual = torch.where(passed[:, None], verification.law(node), torch.where(last[:, None], left, residual))
        path, count = path_to(tree.parents, node)
        return Acceptance(path, count, source.categorical(residual, Purpose.NEXT, 0))


def _threshold(target: Float[Tensor, "B V"], drawn: Float[Tensor, "B V"], k: Tensor) -> tuple[Float[Tensor, " B"], Float[Tensor, "B V"]]:
    """The least rho between 1 and k that is exact, but for the last halving, and the mass that passes at each token in k tries."""
    low, high, times = torch.ones_like(target[:, 0]), k.to(target.dtype), k.to(target.dtype)

    def some(rho: Tensor) -> tuple[Tensor, Tensor]:
        beta = torch.minimum(drawn, target / rho[:, None]).sum(-1).clamp_max(1)
        return beta, -torch.expm1(times * torch.log1p(-beta))

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beta, one = some(middle)
        exact = one <= middle * beta
        low, high = torch.where(exact, low, middle), torch.where(exact, middle, high)
    beta, one = some(high)
    share = torch.where(beta > 0, one / torch.where(beta > 0, beta, 1), 0)
    return high, torch.minimum(drawn, target / high[:, None]) * share[:, None]
