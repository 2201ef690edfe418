"""Negative controls for rules that keep their coins: block verification on chains, traversal verification on trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import ancestors, draw_law, landed, path_to, sort_draws
from ..types import Acceptance, Bool, DraftTree, Float, Int64, Kind, Verification
from .mutant_trees import left_over
from .mutants import Mutant

__all__ = ["Deferred", "mutant_deferred"]

Weights = Float[Tensor, "n V"]
Numbers = Float[Tensor, " n"]


def _lost(budget: Numbers, mass: Numbers, drawn: Numbers) -> Numbers:
    """a' = S / (S + 1 - a)."""
    total = mass + 1 - budget
    return torch.where(mass > 0, mass / torch.where(total > 0, total, mass), 0)


class Deferred(Acceptor):
    """Traversal verification in which each decision may be replaced by a faulty one.

    Args:
        weigh: a child's budget, from a r(x) / q(x).
        lose: what is left of a node's budget when a child has failed, from: the budget a, S = sum (a r - q)+, and q(x).
        rest: the law that the node goes on with, from: a, r and q.
        chance: the weight of a node's coin, from: its budget when all below it has failed, its budget to begin with, the product of
            p(x) / q(x) over its path, and whether it is a leaf.
        top_down: flip the coins from the root on, and stop at the first that fails.
        again: whether a draw of a token that an elder sibling holds takes its share of the law.
    """

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def __init__(self, *, weigh: Callable[[Numbers], Numbers] = lambda share: share.clamp_max(1),
                 lose: Callable[[Numbers, Numbers, Numbers], Numbers] = _lost,
                 rest: Callable[[Numbers, Weights, Weights], Weights] = lambda a, r, q: left_over(a[:, None] * r, q),
                 chance: Callable[[Tensor, Tensor, Tensor, Bool[Tensor, "B N"]], Tensor] = lambda left, whole, joint, leaf: left,
                 top_down: bool = False, again: bool = True) -> None:  # fmt: skip
        self.weigh, self.lose, self.rest, self.chance, self.top_down, self.again = weigh, lose, rest, chance, top_down, again

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        law, chance, order = self._down(tree, verification)
        rows, node = torch.arange(len(order)), torch.zeros_like(order[:, 0])
        done = torch.zeros_like(node, dtype=torch.bool)
        for number in range(order.shape[1]):
            at = order[:, -1 - number] if self.top_down else order[:, number]
            weight = chance[rows, at]
            asked = (at > 0) & (weight > 0) & ~done
            passed = source.accept(weight, torch.ones_like(weight), number, asked)
            node = torch.where(passed, at, node)
            done = done | ((at > 0) & ~passed if self.top_down else passed)
        path, count = path_to(tree.parents, node)
        return Acceptance(path, count, source.categorical(law[rows, node], Purpose.NEXT, 0))

    def _down(
        self, tree: DraftTree, verification: Verification
    ) -> tuple[Float[Tensor, "B N V"], Float[Tensor, "B N"], Int64[Tensor, "B N"]]:
        """What each node has left of its law, the weight of its coin, and the nodes in post-order."""
        law, nodes = verification.logp.exp(), tree.tokens.shape[1]
        left, joint = torch.zeros_like(law[..., 0]), torch.ones_like(law[..., 0])
        left[:, 0] = 1
        whole, leaf, met = left.clone(), torch.ones_like(tree.tokens, dtype=torch.bool), torch.zeros_like(tree.tokens, dtype=torch.bool)
        size, begin = ancestors(tree.parents).sum(1), torch.zeros_like(tree.tokens)
        place = size - 1
        order, parents = sort_draws(tree)
        for number in range(order.shape[1]):
            child, tokens = landed(tree, order[:, number])
            new = (parents[:, number] < nodes) & ~met.gather(1, child[:, None])[:, 0]
            row = ((parents[:, number] < nodes) & (new | self.again)).nonzero()[:, 0]
            above, drawn = parents[row, number], draw_law(tree, order[:, number], law.dtype, law.shape[-1])[row]
            a, r, token = left[row, above], law[row, above], tokens[row]
            mine = drawn[torch.arange(len(row)), token]
            weight = self.weigh(a * r[torch.arange(len(row)), token] / mine)
            ratio = joint[row, above] * verification.logp.exp()[row, above, token] / mine
            left[row, above] = self.lose(a, (a[:, None] * r - drawn).clamp_min(0).sum(-1), mine)
            law[row, above] = self.rest(a, r, drawn)
            weight, ratio, above, row = weight[new[row]], ratio[new[row]], above[new[row]], row[new[row]]
            node = child[row]
            whole[row, node] = left[row, node] = weight
            joint[row, node] = ratio
            place[row, node] = begin[row, above] + size[row, node] - 1
            begin[row, node] = begin[row, above]
            begin[row, above] += size[row, node]
            met[row, node], leaf[row, above] = True, False
        place = torch.where(met | (torch.arange(nodes) == 0), place, nodes)
        return law, self.chance(left, whole, joint, leaf), place.argsort(-1)


def mutant_deferred() -> dict[str, Mutant]:
    """Every faulty rule with deferred coins by the name of its fault."""
    honest: Any = Deferred()

    def wrong(check: str, **fault: Any) -> Mutant:
        return Mutant(Deferred(**fault), f"law-{check}", honest, "defect 0[.][0-9]+;")

    chain, tree, mixed = "chain-3-iid", "tree-(2,2)-without-replacement", "tree-(2,2)-mixed"
    return {
        "block: weights are not capped at 1": wrong(chain, weigh=lambda share: share),
        "block: coin of the whole budget, not of what is left": wrong(chain, chance=lambda left, whole, joint, leaf: whole),
        "block: residual of token rejection": wrong(chain, rest=lambda a, r, q: left_over(r, q)),
        "block: stops at the first failure": wrong(chain, top_down=True),
        "block: the last ratio is not capped on its way (HSD)": wrong(
            chain, chance=lambda left, whole, joint, leaf: torch.where(leaf, joint, left)
        ),
        "traversal: budget divided by 1 - q(x)": wrong(
            tree, lose=lambda a, mass, drawn: torch.where(drawn < 1, mass / torch.where(drawn < 1, 1 - drawn, 1), 0)
        ),
        "traversal: budget unchanged by a failure": wrong(mixed, lose=lambda a, mass, drawn: torch.where(mass > 0, a, 0)),
        "traversal: budget is the mass left over": wrong(tree, lose=lambda a, mass, drawn: mass),
        "traversal: a second draw on a node takes no share": wrong("merged-paths-(2,1)-iid", again=False),
    }  # fmt: skip
