"""Trees that do not say what was drawn: one fault each, made from an honest tree."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..tree import ancestors, draw_parents
from ..types import PAD, Bool, DraftTree, Draws, Float, Kind

__all__ = [
    "as_iid", "as_sampled", "best_kept", "multiplicity_forgotten", "normalised", "other_temperature", "raw_law", "resorted",
    "unlikely_dropped",
]  # fmt: skip


def normalised(weights: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """Laws in proportion to these weights."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def _redrawn(tree: DraftTree, **changes: Tensor) -> DraftTree:
    assert tree.draws is not None
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


def as_sampled(tree: DraftTree) -> DraftTree:
    """Chosen tokens, declared as samples of a law of which they are the argmax."""
    draws, vocab_size = tree.draws, tree.laws.shape[-1]
    token = tree.tokens.gather(1, draws.node.clamp_min(0))
    laws = 0.6 * torch.nn.functional.one_hot(token, vocab_size).double() + 0.4 / vocab_size
    numbers = torch.arange(draws.node.shape[1]).expand_as(draws.node)
    return _redrawn(replace(tree, laws=laws), kind=torch.full_like(draws.kind, Kind.IID), law=numbers)


def as_iid(tree: DraftTree) -> DraftTree:
    """Drawn without replacement, declared as drawn with it."""
    return _redrawn(tree, kind=torch.full_like(tree.draws.kind, Kind.IID))


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
