"""The target's own first layers guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..cache import Shortened, causal_target
from .grow import Shape
from .model import ModelDrafter

__all__ = ["EarlyExitDrafter"]


class EarlyExitDrafter(ModelDrafter):
    """A `ModelDrafter` whose model is the target with its later layers left out (LayerSkip, Elhoushi et al. 2024; Zhang et al. 2024).

    The weights are the target's own; keys and values of the first layers are computed again, in a cache of their own. How good the guess
    is depends on the training: only a model that learned to predict from its middle drafts well like this.

    Args:
        model: the target, or another model of its vocabulary.
        layers: how many of its decoder layers, from the first, stand before the final norm and the head.
        grow, sample, logits_processor: see `ModelDrafter`.

    Raises:
        TypeError: it is not clear how to run the model, or how to shorten it.
        ValueError: `layers` is below 1 or more than the model has; `grow` draws from two models.
    """

    def __init__(self, model: Any, layers: int, *, grow: Shape | None = None, sample: bool = True,
                 logits_processor: Sequence[Callable[..., Any]] | None = None) -> None:  # fmt: skip
        target = causal_target(model)
        if not isinstance(target, Shortened):
            raise TypeError(
                f"model: {type(model).__name__} cannot be run with its first layers alone; allowed are models of Hugging Face transformers "
                "and objects with a method first(layers) as in specdec.cache.Shortened"
            )
        super().__init__(target.first(layers), grow=grow, sample=sample, logits_processor=logits_processor)
