"""One target pass over a whole tree, with tree attention and a transactional cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ..base import Context, Verifier
from ..cache.full import FullCache
from ..ragged import Ragged
from ..tree import ancestors
from ..types import Bool, Commit, DraftTree, Float, Int64, TargetFacts, Verification
from ..warp import WarpState

__all__ = ["CausalTarget", "TreeVerifier"]


@runtime_checkable
class CausalTarget(Protocol):
    """What a tree verifier asks of a model."""

    @property
    def facts(self) -> TargetFacts: ...

    def new_cache(self, batch: int) -> FullCache:
        """An empty cache for this many rows."""
        ...

    def forward(self, tokens: Int64[Tensor, "B T"], positions: Int64[Tensor, "B T"], mask: Bool[Tensor, "B 1 T slots"] | None,
                cache: FullCache, *, logits: bool, layers: tuple[int, ...] = ()) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """One pass over T tokens of each row; their keys and values are written to `cache`, where `open(T)` was called.

        Args:
            mask: what each token sees of the cache's slots; `None` for all earlier slots and its own.
            logits: whether they are wanted; the prompt does not need them.
            layers: input-boundary ids of the hidden states wanted, see `Features`.

        Returns:
            Raw logits `[B, T, V]` or `None`, and features `[B, T, F]` or `None` where no layers were asked for.
        """
        ...


@dataclass
class _State:
    ctx: Context
    cache: FullCache
    history: Ragged
    warp: WarpState
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
        return _State(ctx, self._target.new_cache(ctx.batch), Ragged.empty(ctx.batch), ctx.warper.begin())

    def extend(self, state: _State, tokens: Int64[Tensor, "B T"], count: Int64[Tensor, " B"]) -> Commit:
        nodes, device = tokens.shape[1], self.facts.device
        if nodes == 0:
            return Commit(tokens, count)
        steps = torch.arange(nodes)
        # A row that ends early repeats its last position: one more could lie beyond the target's last.
        positions = torch.tensor(state.cache.lengths)[:, None] + torch.minimum(steps, (count[:, None] - 1).clamp_min(0))
        state.cache.open(nodes)
        mask = None if state.cache.aligned else state.cache.mask((steps <= steps[:, None]).expand(len(tokens), -1, -1).to(device))
        _, features = self._target.forward(
            torch.where(steps < count[:, None], tokens.cpu(), 0).to(device), positions.to(device), mask, state.cache,
            logits=False, layers=state.ctx.needs.layers,
        )  # fmt: skip
        state.cache.commit(steps.expand(len(tokens), -1), count)
        state.history.extend(tokens, count)
        return Commit(tokens, count, features)

    def verify(self, state: _State, tree: DraftTree) -> Verification:
        state.tree = state.features = None  # a pass that fails leaves nothing to commit
        there = tree.to(self.facts.device)
        nodes = there.tokens.shape[1]
        seen = ancestors(there.parents)
        positions = torch.tensor(state.cache.lengths, device=seen.device)[:, None] + seen.sum(-1) - 1
        state.cache.open(nodes)
        mask = None if nodes == 1 and state.cache.aligned else state.cache.mask(seen)
        logits, features = self._target.forward(there.tokens, positions, mask, state.cache, logits=True, layers=state.ctx.needs.layers)
        logp = state.ctx.warper(state.warp, cast(Tensor, logits), tree, state.history)
        state.tree, state.features = there, features
        return Verification(logp, features=features)

    def commit(self, state: _State, path: Int64[Tensor, "B D"], count: Int64[Tensor, " B"]) -> Commit:
        if state.tree is None:
            raise RuntimeError("commit: there is no verified tree; call verify first, and commit it at most once")
        state.cache.commit(path, count)
        state.ctx.warper.commit(state.warp, path, count)
        node = path.clamp_min(0).to(state.tree.tokens.device)
        tokens = state.tree.tokens.gather(1, node)
        features = state.features
        if features is not None:
            features = features.gather(1, node[..., None].expand(-1, -1, features.shape[-1]))
        state.history.extend(tokens, count)
        state.tree = state.features = None
        return Commit(tokens, count, features)

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        warp = state.ctx.warper.select(state.warp, rows)
        return replace(state, cache=state.cache.select(rows), history=state.history.select(rows), warp=warp, tree=None, features=None)
