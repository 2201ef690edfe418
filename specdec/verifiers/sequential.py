"""The slow oracle: one evaluation of the target per node, each on the node's own tokens, nothing cached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import Context, Verifier
from ..ragged import Ragged
from ..tree import path_to
from ..types import Commit, DraftTree, Float, Int64, Scores, TargetFacts

__all__ = ["SequentialVerifier"]


@dataclass
class _State:
    history: Ragged
    tree: DraftTree | None = None


class SequentialVerifier(Verifier):
    """Verifies with any callable, however it computes the law: exact by construction, and slow.

    Args:
        target: `ids [R, L] int64 -> logits [R, V]`, the law after the last token of each row.
        vocab_size: V.
        dtype: of the logits; float64 keeps exact tests exact.
        max_positions: longest row that the target can read.
    """

    def __init__(self, target: Callable[[Tensor], Tensor], vocab_size: int, *, dtype: torch.dtype = torch.float64,
                 device: torch.device | str = "cpu", max_positions: int | None = None) -> None:  # fmt: skip
        self._target = target
        self._facts = TargetFacts(vocab_size, dtype, torch.device(device), max_positions)

    @property
    def facts(self) -> TargetFacts:
        return self._facts

    def begin(self, ctx: Context) -> _State:
        if ctx.needs:
            raise ValueError(f"drafter: it reads target layers {ctx.needs.layers}, but a callable target shows none; use TreeVerifier")
        return _State(Ragged.empty(ctx.batch))

    def extend(self, state: _State, tokens: Int64[Tensor, "B T"], count: Int64[Tensor, " B"]) -> Commit:
        state.history.extend(tokens, count)
        return Commit(tokens, count)

    def verify(self, state: _State, tree: DraftTree) -> Scores:
        state.tree = tree = tree.to(self.facts.device)
        return Scores(self._logits(state.history, tree))

    def _logits(self, history: Ragged, tree: DraftTree) -> Float[Tensor, "B N V"]:
        batch, nodes = tree.tokens.shape
        groups: dict[int, list[tuple[int, int, Tensor]]] = defaultdict(list)
        for node in range(nodes):
            path, count = path_to(tree.parents, torch.full((batch,), node, device=self.facts.device))
            for row in range(batch):
                if node == 0 or tree.parents[row, node] >= 0:
                    ids = torch.cat([history.row(row).to(path.device), tree.tokens[row, path[row, : count[row]]]])
                    groups[len(ids)].append((row, node, ids))
        logits = torch.zeros(batch, nodes, self.facts.vocab_size, dtype=self.facts.dtype, device=self.facts.device)
        for group in groups.values():
            rows, at, ids = zip(*group, strict=True)
            logits[list(rows), list(at)] = self._target(torch.stack(ids)).to(logits)
        return logits

    def commit(self, state: _State, path: Int64[Tensor, "B D"], count: Int64[Tensor, " B"]) -> Commit:
        tokens = state.tree.tokens.gather(1, path.to(self.facts.device).clamp_min(0))
        state.history.extend(tokens, count)
        state.tree = None
        return Commit(tokens, count)

    def resume(self, state: _State, ctx: Context, held: Sequence[int], keep: Sequence[int]) -> _State:
        if state.history.lengths != list(held):
            raise ValueError(f"session: it holds {state.history.lengths} tokens of its rows, not {list(held)}; begin a new session")
        return _State(Ragged(state.history.ids, list(keep)))

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        return _State(state.history.select(rows))
