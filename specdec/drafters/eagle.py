"""EAGLE-1, -2 and -3: a head that drafts from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..cache import causal_target
from ..checkpoints import load_head, save_head
from ..heads import EagleHead
from .grow import Shape
from .pairs import PairDrafter

__all__ = ["EagleDrafter"]


class EagleDrafter(PairDrafter):
    """Drafts with an EAGLE head.

    It is three things: where the features come from (`head.config.layers`), how the tree grows (`grow`) and which tokens can be drafted
    (`head.ids`). EAGLE-1 is a head of version 1 with a static tree, EAGLE-2 the same with `grow.dynamic()`, EAGLE-3 a head of version 3.
    The arguments, and what they do, are those of `PairDrafter`.
    """

    head: EagleHead

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path, target: Any, *, grow: Shape | None = None, sample: bool = True,
                        logits_processor: Sequence[Callable[..., Any]] | None = None) -> EagleDrafter:  # fmt: skip
        """A drafter with the head of a checkpoint, see `specdec.checkpoints.load_head`; the rest is as for the class."""
        head = load_head(path_or_name, causal_target(target).facts)
        return cls(head, target, grow=grow, sample=sample, logits_processor=logits_processor)

    def save_pretrained(self, path: str | Path, layout: str = "speculators") -> None:
        """Write the head, see `specdec.checkpoints.save_head`: `layout` is "speculators" or "eagle"."""
        told = self._lent.config
        name, kind = told.get("_name_or_path") or None, told.get("architectures") or ()
        save_head(self.head, path, layout=layout, verifier_name=name, verifier_architectures=kind)
