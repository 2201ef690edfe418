"""Is the law that a drafter declares the law that its tokens were drawn from?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base import Drafter, Verifier
from ..tree import check, draw_law, draw_parents, path_to
from ..types import Budget, DraftTree
from .enumerate import Branch, EnumeratingRng, branches
from .laws import Plan, Tokens, stand

__all__ = ["Drawn", "Untruth", "drafts", "drawn", "untruth"]


class Drawn(NamedTuple):
    """One draw, told without node numbers, which a drafter may choose as it likes."""

    above: tuple[int, Tokens]
    """The node it was made below: the first draw that landed there (-1 for the root or a probe) and the tokens down to it."""
    kind: int
    law: tuple[float, ...]
    """The law declared for this draw, given the draws before it."""
    token: int

    @property
    def path(self) -> Tokens:
        return (*self.above[1], self.token)

    def fits(self, other: Drawn, slack: float) -> bool:
        """The same draw but for the token, which is what chance decides, and the rounding of the law."""
        return self[:2] == other[:2] and all(abs(a - b) <= slack for a, b in zip(self.law, other.law, strict=True))


def drawn(tree: DraftTree, vocab_size: int) -> list[tuple[Drawn, ...]]:
    """The draws of each row in draw order."""
    batch, nodes = tree.tokens.shape
    tokens, landed, parents = tree.tokens.tolist(), tree.draws.node.tolist(), draw_parents(tree).tolist()
    kinds, paths = tree.draws.kind.tolist(), []
    for node in range(nodes):
        path, count = path_to(tree.parents, torch.full((batch,), node, device=tree.parents.device))
        paths.append([tuple(tokens[row][i] for i in p[1:n]) for row, (p, n) in enumerate(zip(path.tolist(), count.tolist(), strict=True))])
    laws = [draw_law(tree, torch.full_like(tree.tokens[:, 0], m), torch.float64, vocab_size).tolist() for m in range(len(landed[0]))]
    found = []
    for row in range(batch):
        first = {0: -1}
        for m, node in enumerate(landed[row]):
            first.setdefault(node, m)
        real = [m for m, node in enumerate(landed[row]) if node >= 0]
        above = {m: (first.get(parents[row][m], -1), paths[parents[row][m]][row]) for m in real}
        found.append(tuple(Drawn(above[m], kinds[row][m], tuple(laws[m][row]), tokens[row][landed[row][m]]) for m in real))
    return found


def drafts(drafter: Drafter, verifier: Verifier, prompts: Sequence[Tokens], plan: Plan, slack: float = 1e-9) -> list[Branch]:
    """Every draft that may follow each prompt, as its draws."""
    vocab_size, device = verifier.facts.vocab_size, verifier.facts.device

    @torch.no_grad()
    def run(rng: EnumeratingRng) -> list[tuple[Drawn, ...]]:
        at = stand(drafter, verifier, rng.roots)
        budget = Budget.of(*plan, batch=len(rng.roots))
        tree = drafter.propose(at.drafter, at.pending, budget, rng.round(range(len(rng.roots)), at.positions, device))
        check(tree, at.pending, budget, vocab_size)
        return drawn(tree, vocab_size)

    def same(a: tuple[Drawn, ...], b: tuple[Drawn, ...]) -> bool:
        return len(a) == len(b) and all(x.fits(y, slack) and x.token == y.token for x, y in zip(a, b, strict=True))

    return branches(run, prompts, same=same)


class Untruth(NamedTuple):
    """The worst difference between a declared law and the law drawn from, and where it is."""

    defect: float
    where: str


def untruth(found: Sequence[Branch], slack: float = 1e-9) -> Untruth:
    """No peek: whatever was drawn before, and given that a draw was made below this node with this kind and declared law,
    its token follows that law. Checked for every history of draws, so a token that was dropped, moved or re-weighted because of its own
    value shows, and so does a law that was not drawn from.

    Args:
        found: every draft that may follow one prompt.
        slack: laws closer than this are one law.
    """
    worst, todo = Untruth(0.0, ""), [((), list(found))]
    while todo:
        history, here = todo.pop()
        for draw, group in _alike([b for b in here if len(b.result) > len(history)], len(history), slack):
            total = math.fsum(b.probability for b in group)
            by_token: dict[int, list[Branch]] = {}
            for branch in group:
                by_token.setdefault(branch.result[len(history)].token, []).append(branch)
            real = [math.fsum(b.probability for b in by_token.get(x, ())) / total for x in range(len(draw.law))]
            defect = max(abs(a - b) for a, b in zip(real, draw.law, strict=True))
            if defect > worst.defect:
                worst = Untruth(defect, f"draw {len(history)} below tokens {draw.above[1]}, after the draws {history}: declared "
                                        f"{_short(draw.law)}, drawn from {_short(real)}")  # fmt: skip
            todo += [((*history, token), branch) for token, branch in by_token.items()]
    return worst


def _alike(found: Sequence[Branch], number: int, slack: float) -> list[tuple[Drawn, list[Branch]]]:
    groups: list[tuple[Drawn, list[Branch]]] = []
    for branch in found:
        draw = branch.result[number]
        for known, group in groups:
            if known.fits(draw, slack):
                group.append(branch)
                break
        else:
            groups.append((draw, [branch]))
    return groups


def _short(law: Sequence[float]) -> list[float]:
    return [round(p, 4) for p in law]
