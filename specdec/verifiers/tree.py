"""One target pass over a whole tree, with tree attention and a transactional cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from ..base import Context, Verifier
from ..cache import CausalTarget, FullCache, read
from ..tree import ancestors
from ..types import Commit, DraftTree, Float, Int64, Scores, TargetFacts, sent

__all__ = ["TreeVerifier"]


@dataclass
class _State:
    cache: FullCache
    layers: tuple[int, ...]
    """Whose features go with every commit."""
    tree: DraftTree | None = None
    features: Float[Tensor, "B N F"] | None = None


class TreeVerifier(Verifier):
    """Scores a tree in one pass: a node attends to its row's committed tokens and to its own ancestors, at position length + depth.

    Args:
        target: a decoder-only model behind the `CausalTarget` protocol.
    """

    def __init__(self, target: CausalTarget) -> None:
        self._target = target

    @property
    def facts(self) -> TargetFacts:
        return self._target.facts

    def begin(self, ctx: Context) -> _State:
        return _State(self._target.new_cache(ctx.batch), ctx.needs.layers)

    def extend(self, state: _State, tokens: Int64[Tensor, "B T"], count: Int64[Tensor, " B"]) -> Commit:
        if tokens.shape[1] == 0:
            return Commit(tokens, count)
        _, features = read(self._target, state.cache, tokens, count, logits=False, layers=state.layers)
        return Commit(tokens, count, features)

    def verify(self, state: _State, tree: DraftTree) -> Scores:
        state.tree = state.features = None  # a pass that fails leaves nothing to commit
        there = tree.to(self.facts.device)
        nodes = there.tokens.shape[1]
        seen = ancestors(there.parents)
        positions = sent(state.cache.lengths, seen.device)[:, None] + seen.sum(-1) - 1
        state.cache.open(nodes)
        mask = None if nodes == 1 and state.cache.aligned else state.cache.mask(seen)
        # A tree that was drafted on a device is checked when it is read, after this pass; an id outside would end the device's context.
        tokens = there.tokens.clamp(0, self.facts.vocab_size - 1)
        logits, features = self._target.forward(tokens, positions, mask, state.cache, logits=True, layers=state.layers)
        state.tree, state.features = tree, features  # as it was given: reading it back could mean a wait for the device
        return Scores(cast(Tensor, logits), features)

    def commit(self, state: _State, path: Int64[Tensor, "B D"], count: Int64[Tensor, " B"]) -> Commit:
        if state.tree is None:
            raise RuntimeError("commit: there is no verified tree; call verify first, and commit it at most once")
        state.cache.commit(path, count)
        tokens, features, node = state.tree.tokens, state.features, path.clamp_min(0)
        tokens = tokens.gather(1, sent(node, tokens.device))
        if features is not None:
            features = features.gather(1, sent(node, features.device)[..., None].expand(-1, -1, features.shape[-1]))
        state.tree = state.features = None
        return Commit(tokens, count, features)

    def resume(self, state: _State, ctx: Context, held: Sequence[int], keep: Sequence[int]) -> _State:
        if state.cache.lengths != list(held):
            raise ValueError(
                f"session: its cache holds {state.cache.lengths} tokens of its rows where {list(held)} were read: it was changed outside; "
                "begin a new session"
            )
        state.cache.rewind(keep)
        return _State(state.cache, ctx.needs.layers)

    def adopt(self, cache: FullCache) -> _State:
        if self.facts.num_layers not in (None, cache.num_layers):
            raise ValueError(f"session: the cache has {cache.num_layers} layers, the model {self.facts.num_layers}: it is another model's")
        return _State(cache, ())

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        return _State(state.cache.select(rows), state.layers)
