"""What rounding does to the rules and to the target, on a real model's own rows, and what a rule is worth on a given tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..acceptors.residual import failing, passing
from ..base import Context
from ..tree import chain, draw_law, landed, sort_draws
from ..types import DraftTree, Float, Round, Verification
from ..verifiers.factory import make_verifier
from ..warp import Warper
from .audit import tie_width

__all__ = ["Drift", "Node", "chain_worth", "drift", "kernel_defect", "kernel_defects"]

# ------------------------------------------------------------------------------------------------------ the kernel, token by token


@dataclass(frozen=True)
class Node:
    """How well the two sides of the kernel's identity agree at one node for one draw."""

    budget: float
    """a, with which the node went into the draw."""
    defect: float
    """Largest difference over the vocabulary."""
    total: float
    """Half the sum of the differences: by how much the law of what the node brings is off, at most."""


@torch.no_grad()
def kernel_defects(done: Round) -> Iterator[Node]:
    """q alpha + F a' r' against a r (`specdec.acceptors.residual`) at every draw of a round: with coins flipped at once, where a = 1, and
    with coins kept, where a is what came down to the node. alpha, a' and r' are computed in the dtype of the laws, as acceptors
    compute them; F, the chance that the child fails, and both sides in float64.

    Args:
        done: with all laws in it (`keep_all`, `return_rounds="all"`).
    """
    tree, verification = done.tree.to(done.verification.scores.device), done.verification
    order, parents = sort_draws(tree)
    for row in range(len(order)):
        nodes = torch.zeros(len(order), dtype=torch.int64, device=order.device)
        root = verification.law(nodes)[row][None]
        whole = torch.zeros_like(root[:, 0], dtype=torch.float64)
        kept: dict[int, tuple[Tensor, Tensor]] = {0: (whole, root)}  # by node: log-budget and residual law
        eager = {0: root}
        for number in range(order.shape[1]):
            above = int(parents[row, number])
            if above >= tree.tokens.shape[1]:
                break  # padding stands last
            child, token = landed(tree, order[:, number])
            drawn = draw_law(tree, order[:, number], root.dtype, root.shape[1])[row][None]
            (budget, residual), alone = kept[above], eager[above]
            yield kernel_defect(budget, residual, drawn)
            if bool(budget != 0):
                yield kernel_defect(whole, alone, drawn)
            at = int(child[row])
            law = verification.law(child)[row][None]
            if at not in kept:  # a second draw of a token has no weight
                kept[at] = passing(budget, residual, drawn, token[row][None]), law
                eager[at] = law
            kept[above] = failing(budget, residual, drawn)
            eager[above] = failing(whole, alone, drawn)[1]


def kernel_defect(budget: Float[Tensor, " 1"], residual: Float[Tensor, "1 V"], law: Float[Tensor, "1 V"]) -> Node:
    """The same for one draw from `law` at a node with this log-budget and residual law."""
    size = residual.shape[1]
    every = torch.arange(size, device=law.device)
    # One row per token that might have been drawn; expanded, so none of them is stored.
    weight = passing(budget.expand(size), residual.expand(size, -1), law.expand(size, -1), every).exp()
    less, rest = failing(budget, residual, law)
    q, r = law[0].double(), residual[0].double()
    fails = 1 - (q * weight).sum()
    off = (q * weight + fails * less.exp() * rest[0].double() - budget.exp() * r).abs()
    return Node(float(budget.exp()), float(off.max()), float(off.sum() / 2))


# ------------------------------------------------------------------------------------------------- what a rule is worth on a tree


@torch.no_grad()
def chain_worth(tree: DraftTree, verification: Verification) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """How many tokens a round with these chains is expected to emit, bonus included: under token rejection and under block verification.

    The sum over the drafted nodes of the chance that the node stands, given the chain down to it and averaged over what is drafted
    below: the product of min(1, p / q), and the node's budget. No coin is flipped, and the mean over chains is that of the rule. A budget
    is never less than the product, so on no chain is block verification the worse.

    Args:
        tree: chains; rows may differ in length.
    """
    order, parents = sort_draws(tree)
    node = torch.zeros_like(tree.tokens[:, 0])
    zero = torch.zeros_like(node, dtype=torch.float64)
    alone, kept, token, block = zero, zero, zero + 1, zero + 1
    for number in range(order.shape[1]):
        going = parents[:, number] == node
        child, drafted = landed(tree, order[:, number])
        law = verification.law(node)
        drawn = draw_law(tree, order[:, number], law.dtype, law.shape[1])
        alone = torch.where(going, alone + passing(zero, law, drawn, drafted), -torch.inf)
        kept = torch.where(going, passing(kept, law, drawn, drafted), -torch.inf)
        token, block = token + alone.exp(), block + kept.exp()
        node = torch.where(going, child, node)
    return token, block


# --------------------------------------------------------------------------------------------- forwards of different shapes


@dataclass(frozen=True)
class Drift:
    """How the passes over one token differ from the passes over several, on the same texts."""

    positions: int
    logits: float
    """Largest difference."""
    tv_mean: float
    tv_max: float
    flips: tuple[tuple[float, float], ...]
    """Where the most likely token is another one: how far that token lies below the best logit of the pass over one token, and the
    `tie_width` there."""

    @property
    def beyond(self) -> int:
        """Flips that rounding does not explain."""
        return sum(gap > width for gap, width in self.flips)


@torch.no_grad()
def drift(model: Any, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], width: int) -> Iterator[Drift]:
    """Score each text behind its prompt twice, one token at a time and `width` at a time, as plain decoding and a verifier do; one
    `Drift` a text."""
    for prompt, text in zip(prompts, texts, strict=True):
        one, more = (_scores(model, prompt, text, size) for size in (1, width))
        flips = []
        for at in (one.argmax(-1) != more.argmax(-1)).nonzero()[:, 0].tolist():
            best = float(one[at].max())
            flips.append((best - float(one[at, more[at].argmax()]), tie_width(model.dtype, best)))
        off = (one.double().softmax(-1) - more.double().softmax(-1)).abs().sum(-1) / 2
        yield Drift(len(text), float((one.double() - more.double()).abs().max()), float(off.mean()), float(off.max()), tuple(flips))


def _scores(model: Any, prompt: Sequence[int], text: Sequence[int], size: int) -> Float[Tensor, "L V"]:
    """The logits that each token of the text was up against, from passes over `size` tokens."""
    verifier, _ = make_verifier(model)
    ctx = Context(1, verifier.facts, Warper([], batch=1), False, len(prompt) + len(text))
    state, before = verifier.begin(ctx), torch.tensor([list(prompt[:-1])], dtype=torch.int64)
    verifier.extend(state, before, torch.tensor([before.shape[1]]))
    read, found = [prompt[-1], *text[:-1]], []
    for start in range(0, len(read), size):
        tree = chain([read[start : start + size]])
        found.append(verifier.verify(state, tree).logits[0].float().cpu())
        count = tree.tokens.shape[1]
        verifier.commit(state, torch.arange(count)[None], torch.tensor([count]))
    return torch.cat(found)
