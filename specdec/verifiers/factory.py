"""From what a user calls a model to a verifier."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..base import Verifier
from ..cache import causal_target
from .tree import TreeVerifier

__all__ = ["make_verifier"]


def make_verifier(model: Any, verifier: Verifier | None = None) -> tuple[Verifier, GenerationConfig | None]:
    """The verifier for a model, and a copy of the generation settings that the model carries, if any.

    Args:
        model: a decoder-only model of Hugging Face transformers, or an object with `facts`, `new_cache` and `forward` as in `CausalTarget`.
            With `verifier` given, it is asked for its settings alone and may be anything, `None` too.
        verifier: how the target is run; used as it is.

    Raises:
        TypeError: it is not clear how to run the model.
        ValueError: it is a Hugging Face model that can't verify trees, see `HFTarget`.
    """
    defaults = copy.deepcopy(model.generation_config) if isinstance(model, PreTrainedModel) else None
    if verifier is not None:
        return verifier, defaults
    try:
        return TreeVerifier(causal_target(model)), defaults
    except TypeError as error:
        advice = "For any other callable pass verifier=SequentialVerifier(fn, vocab_size=...), where fn maps ids [R, L] to logits [R, V]"
        raise TypeError(f"{error}. {advice}") from None
