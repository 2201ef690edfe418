"""Medusa: several heads guess the next tokens from one hidden state of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base import Context
from ..cache import causal_target, output_rows
from ..checkpoints import load_medusa, save_medusa
from ..heads import MedusaHeads
from ..ragged import Ragged
from ..types import Float
from .grow import Shape
from .growth import Growing
from .heads import HeadDrafter, HeadState

__all__ = ["MedusaDrafter"]


class MedusaDrafter(HeadDrafter):
    """Drafts with Medusa's heads, each of which guesses one level of the tree from the last hidden state that the target computed.

    What a head says does not depend on the tokens drafted above: all nodes of a level have the same scores below them, unless a logits
    processor tells them apart. So a level costs one product, whatever its width, and the tree is no deeper than there are heads. Drawn
    tokens are as exact as any: their declared law is the head's.

    Args:
        heads: see `specdec.checkpoints.load_medusa`, or `from_pretrained` here.
        target: the model that verifies. Its final norm, and its output head where the heads share it, are used as they are.
        grow: the shape of the tree and how its tokens are drawn, see `specdec.drafters.grow`. Left out, `dynamic(8)` as deep as there are
            heads where points alone are drawn, as in greedy decoding, and else `mixed(3, 1)`.
        sample: draw each token from the head's law. Without it, or when decoding greedily, as many of the most likely ones are taken.
        logits_processor: what shapes the heads' laws. Left out, what shapes the target's; an empty list leaves the softmax as it is. One
            that raises behind some text ends the draft there; if one has a memory and a token that stays can't be shown to it, that row is
            drafted for no more.

    Raises:
        TypeError: it is not clear how to run the target, or it does not lend its modules; a processor with memory can't be copied.
        ValueError: the heads were made for another target; `grow` draws from two models.
    """

    head: MedusaHeads

    def __init__(self, heads: MedusaHeads, target: Any, *, grow: Shape | None = None, sample: bool = True,
                 logits_processor: Sequence[Callable[..., Any]] | None = None) -> None:  # fmt: skip
        if not isinstance(heads, MedusaHeads):
            raise TypeError(
                f"heads: got {type(heads).__name__}; give specdec.heads.MedusaHeads, or a path to MedusaDrafter.from_pretrained"
            )
        super().__init__(heads, target, 1 << 62, grow, sample, logits_processor, heads.config.heads)

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path, target: Any, *, grow: Shape | None = None, sample: bool = True,
                        logits_processor: Sequence[Callable[..., Any]] | None = None) -> MedusaDrafter:  # fmt: skip
        """A drafter with the heads of a checkpoint, see `specdec.checkpoints.load_medusa`; the rest is as for the class."""
        heads = load_medusa(path_or_name, causal_target(target).facts)
        return cls(heads, target, grow=grow, sample=sample, logits_processor=logits_processor)

    def save_pretrained(self, path: str | Path, layout: str = "vllm", *, output: bool = False) -> None:
        """Write the heads, see `specdec.checkpoints.save_medusa`: `layout` is "vllm" or "medusa".

        Args:
            output: write the target's output head with heads that share it. vLLM itself does not take it from the target.
        """
        rows = output_rows(self._model, self._lent) if output else None
        if output and rows is None:
            raise ValueError("output: the target's logits are no product of its output head, so it can't be written for other readers")
        save_medusa(self.head, path, layout=layout, base_model=self._lent.config.get("_name_or_path") or None, output=rows)

    def begin(self, ctx: Context) -> HeadState:
        return self._begun(ctx)

    def select(self, state: HeadState, rows: Sequence[int]) -> HeadState:
        return replace(state, **self._selected(state, rows))

    def resume(self, state: HeadState, ctx: Context, keep: Sequence[int]) -> HeadState:
        """Goes back any way: where no feature is left, the next token brings one."""
        return self._resumed(state, ctx, keep)

    def _room(self, state: HeadState) -> list[int]:
        return [self.head.config.heads if len(known) and limit else 0 for known, limit in zip(state.features, state.limit, strict=True)]

    def _root(self, state: HeadState, text: Ragged, active: list[bool]) -> Float[Tensor, "B 1 d"]:
        """The hidden state itself. No scores belong to the tokens that processors with memory are shown: who would give them is gone."""
        while state.warper.remembers:
            rows = zip(active, state.shown, state.ids.lengths, state.limit, strict=True)
            behind = [on and shown < length and limit > 0 for on, shown, length, limit in rows]
            if not any(behind):
                break
            self._show(state, None, state.shown, behind)
        found = self.head.weight.new_zeros(len(active), 1, self.head.config.hidden_size)
        rows = [row for row, on in enumerate(active) if on]
        found[rows] = self._read(torch.stack([state.features[row][-1:] for row in rows]))
        return found

    def _levels(self, state: HeadState, growth: Growing, said: Float[Tensor, "B 1 d"]) -> Iterator[Float[Tensor, "B P d"]]:
        while True:
            yield said.expand(-1, growth.last.stop - growth.last.start, -1)

    def _scores(self, said: Float[Tensor, "B P d"], level: int) -> Float[Tensor, "B P Vd"]:
        return self.head.rank(level, said[:, :1], self._output).expand(-1, said.shape[1], -1)

    def _committed(self, state: HeadState, prompt: bool) -> list[int]:
        return [0] * len(state.features)
