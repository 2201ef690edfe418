"""Multi-token prediction: a module like those that DeepSeek-V3 was trained with drafts one token after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..cache import causal_target
from ..checkpoints import load_mtp, save_mtp
from ..heads import PairHead
from .grow import Shape
from .pairs import PairDrafter

__all__ = ["MTPDrafter", "MultiToken"]


@runtime_checkable
class MultiToken(Protocol):
    """A `CausalTarget` that may have been trained with modules for multi-token prediction."""

    def multi_token(self) -> PairHead:
        """The first of them. ValueError if it has none."""
        ...


class MTPDrafter(PairDrafter):
    """Drafts with a module for multi-token prediction: `specdec.heads.MTPHead`, or one that came with the target.

    For every token of a chain, and for every level of a tree, the same module is used again, on what it said itself; its cache holds
    nothing but what it made of the target's own hidden states. The arguments, and what they do, are those of `PairDrafter`.
    """

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path, target: Any, *, grow: Shape | None = None, sample: bool = True,
                        logits_processor: Sequence[Callable[..., Any]] | None = None) -> MTPDrafter:  # fmt: skip
        """A drafter with the module of a checkpoint, see `specdec.checkpoints.load_mtp`; the rest is as for the class."""
        head = load_mtp(path_or_name, causal_target(target).facts)
        return cls(head, target, grow=grow, sample=sample, logits_processor=logits_processor)

    @classmethod
    def from_target(cls, target: Any, *, grow: Shape | None = None, sample: bool = True,
                    logits_processor: Sequence[Callable[..., Any]] | None = None) -> MTPDrafter:  # fmt: skip
        """A drafter with the module that the target itself was trained with, such as DeepSeek-V3 or GLM-4.5; of several the first.

        Raises:
            TypeError: this kind of target can have no such modules.
            ValueError: it has none.
        """
        model = causal_target(target)
        if not isinstance(model, MultiToken):
            raise TypeError(f"target: {type(model).__name__} has no modules for multi-token prediction; use MTPDrafter.from_pretrained")
        return cls(model.multi_token(), target, grow=grow, sample=sample, logits_processor=logits_processor)

    def save_pretrained(self, path: str | Path) -> None:
        """Write the module, see `specdec.checkpoints.save_mtp`. One that came with the target stays there: TypeError."""
        save_mtp(self.head, path, verifier_name=self._lent.config.get("_name_or_path") or None)
