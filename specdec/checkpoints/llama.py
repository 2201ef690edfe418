"""What both layouts take over from the configs of Llama models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from ..heads.eagle import EagleConfig
from ..types import TargetFacts

__all__ = ["default_layers", "layer_ids", "read_layer", "write_layer"]

_NEEDED = {
    "hidden_act": "silu", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0,
    "tie_word_embeddings": False, "use_sliding_window": False, "quantization_config": None, "pretraining_tp": 1,
}  # fmt: skip
"""What an `EagleHead` computes, in the words of these configs. A config that says nothing means these, but for the layers' number."""

_DIMENSIONS = {
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "max_positions": "max_position_embeddings",
}  # fmt: skip


def read_layer(layer: Mapping[str, Any], file: Path, tied: bool = False) -> dict[str, Any]:
    """Arguments of an `EagleConfig`. What the config leaves out has the default that transformers gives a Llama model, since these
    configs are written as differences from it.

    Args:
        tied: it does not matter whether the config ties its embeddings.

    Raises:
        ValueError: the layer is none that an `EagleHead` computes.
    """
    needed = {name: value for name, value in _NEEDED.items() if not (tied and name == "tie_word_embeddings")}
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
    theta = rope.pop("rope_theta", None) or layer.get("rope_theta") or 10000.0
    usual = LlamaConfig()
    given: dict[str, Any] = {name: layer.get(theirs, getattr(usual, theirs)) for name, theirs in _DIMENSIONS.items()}
    given["num_kv_heads"] = layer.get("num_key_value_heads") or given["num_heads"]
    odd = {_DIMENSIONS[name]: value for name, value in given.items() if not isinstance(value, int) or value < 1}
    eps = layer.get("rms_norm_eps", usual.rms_norm_eps)
    odd |= {
        name: value for name, value in (("rms_norm_eps", eps), ("rope_theta", theta)) if not isinstance(value, int | float) or value <= 0
    }
    if odd:
        raise ValueError(f"{file}: got {odd}; allowed are positive numbers")
    width = layer.get("head_dim") or given["hidden_size"] // given["num_heads"]
    scaling = None if rope in ({}, {"rope_type": "default"}, {"type": "default"}) else rope
    return {**given, "head_dim": width, "rms_norm_eps": float(eps), "rope_theta": float(theta), "rope_scaling": scaling}


def write_layer(config: EagleConfig) -> dict[str, Any]:
    """The part that both layouts write, without how positions are turned and how numbers are stored. Nothing is left to defaults."""
    return {
        "model_type": "llama", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1, "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip


def default_layers(facts: TargetFacts, file: Path) -> tuple[int, ...]:
    """Which hidden states an EAGLE-3 head reads whose config does not say.

    Raises:
        ValueError: the target has too few layers for that, or does not say how many.
    """
    count = facts.num_layers
    if count is None:
        raise ValueError(f"{file}: names no layers, and the target's facts have no num_layers; add eagle_aux_hidden_state_layer_ids")
    layers = (2, count // 2, count - 3)
    if not 0 <= layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"{file}: names no layers, and those that are usual, {layers}, are not three rising ones of a target of {count}; "
            "add eagle_aux_hidden_state_layer_ids"
        )
    return layers


def layer_ids(given: Any, name: str, file: Path) -> tuple[int, ...]:
    """The ids as a config has them."""
    if not isinstance(given, list) or not given or not all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        raise ValueError(f"{file}: {name}: got {given!r}; give a list of layer ids")
    return tuple(given)
