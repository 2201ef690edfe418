"""From what a user calls a model to a verifier."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..base import Verifier
from ..cache import CausalTarget
from ..models.hf import HFTarget
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
    if isinstance(model, PreTrainedModel):
        return verifier or TreeVerifier(HFTarget(model)), copy.deepcopy(model.generation_config)
    if verifier is not None:
        return verifier, None
    if isinstance(model, CausalTarget):
        return TreeVerifier(model), None
    raise TypeError(
        f"model: got {type(model).__name__}; allowed are a decoder-only model of Hugging Face transformers (unwrapped: not compiled, no "
        "PEFT or data-parallel wrapper) and objects with facts, new_cache and forward as in specdec.cache.CausalTarget. "
        "For any other callable pass verifier=SequentialVerifier(fn, vocab_size=...), where fn maps ids [R, L] to logits [R, V]"
    )
