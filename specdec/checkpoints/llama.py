"""What layouts take over from the configs of Llama models."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from ..heads import EagleConfig, MTPConfig, usual_layers
from ..types import TargetFacts

__all__ = ["check_depth", "default_layers", "last_layer", "layer_ids", "read_layer", "write_layer", "write_rope"]

_NEEDED = {
    "hidden_act": "silu", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0,
    "tie_word_embeddings": False, "use_sliding_window": False, "quantization_config": None, "pretraining_tp": 1,
}  # fmt: skip
"""What a head computes, in the words of these configs. A config that says nothing means these, but for the layers' number."""

_DIMENSIONS = {
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "max_positions": "max_position_embeddings",
}  # fmt: skip


def read_layer(layer: Mapping[str, Any], file: Path, passed: Collection[str] = ()) -> dict[str, Any]:
    """Arguments of an `EagleConfig` or `MTPConfig`. What the config leaves out has the default that transformers gives a Llama model, since
    these configs are written as differences from it.

    Args:
        passed: what it says of these does not matter.

    Raises:
        ValueError: the layer is none that a head computes.
    """
    needed = {name: value for name, value in _NEEDED.items() if name not in passed}
    wrong = {name: layer[name] for name, value in needed.items() if layer.get(name, value) not in (value, None)}
    if "sliding_attention" in (layer.get("layer_types") or []):
        wrong["layer_types"] = layer["layer_types"]
    if layer.get("model_type", "llama") != "llama":
        wrong["model_type"] = layer["model_type"]
    if wrong:
        every = {**needed, "layer_types": ["full_attention"], "model_type": "llama"}
        allowed = {name: every[name] for name in wrong}
        raise ValueError(f"{file}: got {wrong}; a head is computed with {allowed} only")
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{file}: a head whose positions turn a part of each query alone (partial_rotary_factor) cannot be run")
    theta = rope.pop("rope_theta", None) or layer.get("rope_theta") or 10000.0
    usual = LlamaConfig()
    given: dict[str, Any] = {name: layer.get(theirs, getattr(usual, theirs)) for name, theirs in _DIMENSIONS.items()}
    given["num_kv_heads"] = layer.get("num_key_value_heads") or given["num_heads"]
    sizes = {**{_DIMENSIONS[name]: value for name, value in given.items()}, "head_dim": layer.get("head_dim") or 1}
    odd = {name: value for name, value in sizes.items() if not isinstance(value, int) or isinstance(value, bool) or value < 1}
    reals = {"rms_norm_eps": layer.get("rms_norm_eps", usual.rms_norm_eps), "rope_theta": theta}
    odd |= {name: value for name, value in reals.items() if not isinstance(value, int | float) or not 0 < value < math.inf}
    if odd:
        raise ValueError(f"{file}: got {odd}; allowed are positive numbers, and whole ones for sizes")
    width = layer.get("head_dim") or given["hidden_size"] // given["num_heads"]
    scaling = None if rope in ({}, {"rope_type": "default"}, {"type": "default"}) else rope
    return {**given, "head_dim": width, "rms_norm_eps": float(reals["rms_norm_eps"]), "rope_theta": float(theta), "rope_scaling": scaling}


def write_layer(config: EagleConfig | MTPConfig) -> dict[str, Any]:
    """The part that all layouts write, without how positions are turned and how numbers are stored. Nothing is left to defaults."""
    return {
        "model_type": "llama", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1, "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip


def write_rope(config: EagleConfig | MTPConfig) -> dict[str, Any]:
    """How positions are turned, in the words of transformers 5."""
    scaling = dict(config.rope_scaling or {})
    kind = scaling.pop("type", "default")
    return {"rope_type": kind, **scaling, "rope_theta": config.rope_theta}


def last_layer(facts: TargetFacts, file: Path, what: str) -> int:
    """The input boundary of the target's final norm.

    Raises:
        ValueError: the target does not say how many layers it has.
    """
    if facts.num_layers is None:
        raise ValueError(f"{file}: {what} what enters the target's final norm, and the facts have no num_layers")
    return facts.num_layers


def check_depth(layer: Mapping[str, Any], facts: TargetFacts, file: Path, what: str) -> int:
    """`last_layer`, of a config whose number of layers is the target's.

    Raises:
        ValueError: it is another target's.
    """
    count, stated = last_layer(facts, file, what), layer.get("num_hidden_layers", LlamaConfig().num_hidden_layers)
    if stated != count:
        raise ValueError(f"{file}: num_hidden_layers, the target's, is {stated}, but this one has {count}: it was made for another target")
    return count


def default_layers(facts: TargetFacts, file: Path) -> tuple[int, ...]:
    """Which hidden states an EAGLE-3 head reads whose config does not say.

    Raises:
        ValueError: the target has too few layers for that, or does not say how many.
    """
    try:
        return usual_layers(facts.num_layers)
    except ValueError as error:
        raise ValueError(f"{file}: {error}: add eagle_aux_hidden_state_layer_ids") from error


def layer_ids(given: Any, name: str, file: Path) -> tuple[int, ...]:
    """The ids as a config has them."""
    if not isinstance(given, list) or not given or not all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        raise ValueError(f"{file}: {name}: got {given!r}; give a list of layer ids")
    return tuple(given)
