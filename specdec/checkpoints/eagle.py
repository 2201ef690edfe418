"""The layout of SafeAILab, SpecForge and SGLang: EAGLE-1, -2 and -3, one flat config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads.eagle import EagleConfig
from ..types import TargetFacts
from .llama import default_layers, last_layer, layer_ids, read_layer, write_layer
from .strict import read_flag

__all__ = ["layer_name", "read", "write"]


def read(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: TargetFacts, file: Path) -> EagleConfig:
    """What a head of this layout is made of. The weights are asked for what the config may leave to them: a bias, an embedding, and
    which version it is.

    Raises:
        ValueError: the config asks for what an `EagleHead` does not compute, or is of two minds.
    """
    first = _is_first(raw, tensors)
    given = read_layer(raw, file, ("tie_word_embeddings",) if first else ())
    own: dict[str, Any] = {"own_embedding": "embed_tokens.weight" in tensors, "bias": read_flag(raw, "bias", "fc.bias" in tensors, file)}
    if first:
        layers = (last_layer(facts, file, "a head of EAGLE-1 reads"),)
        return EagleConfig(1, layers, target_hidden_size=given["hidden_size"], draft_vocab_size=given["vocab_size"], **given, **own)
    eagle = raw.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise ValueError(f"{file}: use_aux_hidden_state: got False; a head that reads the target's last hidden state alone cannot be run")
    # The same key in SpecForge's own words: "norm before the output head", which every EAGLE-3 head has. See docs/checkpoints.md.
    if not read_flag(raw, "norm_output", True, file):
        raise ValueError(
            f"{file}: norm_output: got False; in this layout that is a head without a norm before its output head, or, if it was written "
            "later, a plain EAGLE-3. Only the second can be run: if it is that, remove the key"
        )
    return EagleConfig(
        3, _layers(raw, eagle, facts, file), target_hidden_size=int(raw.get("target_hidden_size") or given["hidden_size"]),
        draft_vocab_size=int(raw.get("draft_vocab_size") or given["vocab_size"]), **given, **own,
        norm_before_residual=read_flag(raw, "norm_before_residual", False, file), fc_norm=read_flag(raw, "fc_norm", False, file),
        norm_before_fc=read_flag(raw, "norm_before_fc", read_flag(eagle, "norm_before_fc", False, file), file),
    )  # fmt: skip


def layer_name(config: EagleConfig, tensors: Mapping[str, Tensor]) -> str:
    """What the one layer is called in this file: `midlayer`, or `layers.0` in EAGLE-1 and some of EAGLE-3."""
    usual = any(name.startswith("midlayer.") for name in tensors) or not any(name.startswith("layers.0.") for name in tensors)
    return "midlayer" if config.version == 3 and usual else "layers.0"


def write(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config of a head in this layout.

    Raises:
        ValueError: it names a flag for which the layout has no word that all its readers take alike.
    """
    for name in ("norm_output", "norm_before_residual"):
        if getattr(config, name):
            raise ValueError(f"layout: 'eagle' cannot express {name}=True, which its readers ignore or take differently; use 'speculators'")
    saved = write_layer(config) | {
        "rope_theta": config.rope_theta, "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "bias": config.bias, "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    if config.version == 1:
        if len(config.layers) != 1:
            raise ValueError(
                f"layers: got {config.layers}; a head of EAGLE-1 in layout 'eagle' reads what enters the final norm, and that alone"
            )
        return {"architectures": ["LlamaForCausalLMEagle"], **saved}
    if min(config.layers) < 1:
        raise ValueError(
            f"layers: got {config.layers}; layout 'eagle' counts the outputs of layers and cannot express boundary 0; use 'speculators'"
        )
    return {
        "architectures": ["LlamaForCausalLMEagle3"], **saved, "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size, "norm_before_fc": config.norm_before_fc, "fc_norm": config.fc_norm,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.layers]},
    }  # fmt: skip


def _is_first(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    third = (
        "draft_vocab_size" in raw or "eagle_config" in raw or any("eagle3" in str(name).lower() for name in raw.get("architectures") or [])
    )
    return not third and not any(name.startswith("midlayer.") or name in ("d2t", "lm_head.weight") for name in tensors)


def _layers(raw: Mapping[str, Any], eagle: Mapping[str, Any], facts: TargetFacts, file: Path) -> tuple[int, ...]:
    """As input boundaries. Inside `eagle_config` SpecForge and SGLang count the output of a layer, which is the next one's input (SGLang
    adds the 1 when it reads). The same key at the top is vLLM's, who counts input boundaries."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner, outer = eagle.get(name), raw.get(name)
    ids = None if inner is None else tuple(one + 1 for one in layer_ids(inner, f"eagle_config.{name}", file))
    top = None if outer is None else layer_ids(outer, name, file)
    if ids is not None and top is not None and ids != top:
        raise ValueError(f"{file}: {name} is {outer} at the top (inputs of layers) and {inner} in eagle_config (outputs): remove one")
    return ids or top or default_layers(facts, file)
