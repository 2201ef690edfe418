"""Trees that do not say what was drawn: one fault each, made from an honest tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..tree import ancestors, draw_parents
from ..types import PAD, Bool, DraftTree, Draws, Float, Kind

__all__ = [
    "as_iid", "as_points", "as_sampled", "best_kept", "left_over", "multiplicity_forgotten",
    "normalised", "other_temperature", "raw_law", "reranked", "resorted", "second_after_first", "unlikely_dropped",
]  # fmt: skip


def normalised(weights: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """Laws in proportion to these weights."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def left_over(law: Float[Tensor, "*rows V"], drawn: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """What the draft does not cover of a law; the law itself if it covers all."""
    rest = (law - drawn).clamp_min(0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, normalised(rest), law)


def _redrawn(tree: DraftTree, **changes: Any) -> DraftTree:
    kept = {name: getattr(tree.draws, name) for name in ("node", "kind", "law")}
    return replace(tree, draws=Draws(**{**kept, **changes}))


def other_temperature(tree: DraftTree) -> DraftTree:
    """The law at twice the temperature that was drawn at."""
    return replace(tree, laws=normalised(tree.laws**0.5))


def raw_law(tree: DraftTree) -> DraftTree:
    """The law before top-k: what was drawn from is its truncation, exactly."""
    assert tree.laws is not None
    least = torch.where(tree.laws > 0, tree.laws, 1).amin(-1, keepdim=True)
    return replace(tree, laws=normalised(torch.where(tree.laws > 0, tree.laws, least / 2)))


def as_sampled(tree: DraftTree, vocab_size: int = 4) -> DraftTree:
    """Chosen tokens, declared as samples of a law of which they are the argmax."""
    draws = tree.draws
    token = tree.tokens.gather(1, draws.node.clamp_min(0))
    laws = 0.6 * torch.nn.functional.one_hot(token, vocab_size).double() + 0.4 / vocab_size
    numbers = torch.arange(draws.node.shape[1]).expand_as(draws.node)
    return _redrawn(replace(tree, laws=laws), kind=torch.full_like(draws.kind, Kind.IID), law=numbers)


def as_iid(tree: DraftTree) -> DraftTree:
    """Drawn without replacement, declared as drawn with it."""
    return _redrawn(tree, kind=torch.where(tree.draws.kind == Kind.WITHOUT_REPLACEMENT, Kind.IID, tree.draws.kind))


def _likelihood(tree: DraftTree) -> Float[Tensor, "B M"]:
    """What each draw's law says of its token."""
    token = tree.tokens.gather(1, tree.draws.node.clamp_min(0))
    rows = torch.arange(len(token))[:, None]
    return tree.laws[rows, tree.draws.law.clamp_min(0), token]


def _without(tree: DraftTree, gone: Bool[Tensor, "B M"]) -> DraftTree:
    """The tree less these draws, and less the nodes below them."""
    lost = torch.zeros(len(gone), tree.tokens.shape[1] + 1, dtype=torch.bool)
    lost = lost.scatter(1, torch.where(gone, tree.draws.node, tree.tokens.shape[1]), True)[:, :-1]
    lost = (ancestors(tree.parents) & lost[:, None, :]).any(-1)
    node = torch.where(lost.gather(1, tree.draws.node.clamp_min(0)), -1, tree.draws.node)
    return _redrawn(replace(tree, parents=torch.where(lost, PAD, tree.parents)), node=node)


def unlikely_dropped(tree: DraftTree) -> DraftTree:
    """A confidence threshold that takes the drawn token away instead of stopping behind it."""
    return _without(tree, (tree.draws.node >= 0) & (_likelihood(tree) < 0.3))


def best_kept(tree: DraftTree) -> DraftTree:
    """Siblings reranked by their values, and only the best kept, declared as if nothing had happened."""
    parent, likelihood = draw_parents(tree), _likelihood(tree)
    better = (parent[:, :, None] == parent[:, None, :]) & (likelihood[:, None, :] > likelihood[:, :, None])
    return _without(tree, (tree.draws.node >= 0) & (better & (tree.draws.node >= 0)[:, None, :]).any(-1))


def resorted(tree: DraftTree) -> DraftTree:
    """Siblings put in order of likelihood instead of draw order."""
    key = draw_parents(tree).double() - _likelihood(tree) / 2
    order = torch.where(tree.draws.node < 0, torch.inf, key).argsort(dim=-1, stable=True)
    node, kind, law = (part.gather(1, order) for part in (tree.draws.node, tree.draws.kind, tree.draws.law))
    return _redrawn(tree, node=node, kind=kind, law=law)


def multiplicity_forgotten(tree: DraftTree) -> DraftTree:
    """A trie of sampled paths in which every node counts as drawn once."""
    node = tree.draws.node
    again = (node[:, :, None] == node[:, None, :]) & (torch.arange(node.shape[1])[None, :] < torch.arange(node.shape[1])[:, None])
    return _redrawn(tree, node=torch.where(again.any(-1), -1, node))


def as_points(tree: DraftTree) -> DraftTree:
    """Declared as chosen, which is right however the tokens came about."""
    nothing = torch.full_like(tree.draws.law, -1)
    return _redrawn(replace(tree, laws=None), kind=torch.full_like(tree.draws.kind, Kind.POINT), law=nothing)


def reranked(tree: DraftTree) -> DraftTree:
    """The likelier half of all nodes, by the product of the draft's law down to each (EAGLE-2), declared as if nothing had happened."""
    likelihood, node = _likelihood(tree), tree.draws.node
    own = torch.ones_like(tree.tokens, dtype=likelihood.dtype).scatter(1, node.clamp_min(0), torch.where(node > 0, likelihood, 1))
    score = torch.where(ancestors(tree.parents), own[:, None, :], 1).prod(-1).gather(1, node.clamp_min(0))
    score = torch.where(node >= 0, score, -1)
    better = (score[:, None, :] > score[:, :, None]).sum(-1)
    return _without(tree, (node >= 0) & (better >= (node.shape[1] + 1) // 2))


def second_after_first(tree: DraftTree) -> DraftTree:
    """A second sample only where the first one is token 1: what is drawn next may depend on what was drawn, and here it does."""
    return _without(tree, (torch.arange(tree.draws.node.shape[1]) > 0) & (tree.tokens[:, 1:2] != 1))
