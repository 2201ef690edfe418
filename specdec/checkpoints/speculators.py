"""The layout of the package `speculators`, which vLLM reads: the layer's config inside the head's. Here EAGLE-3; see `.mtp` for MTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads import EagleConfig, MTPConfig
from ..types import TargetFacts
from .llama import default_layers, layer_ids, read_layer, write_layer, write_rope

__all__ = ["VERSION", "frame", "layer_of", "read", "write"]

VERSION = "0.9.0"
"""The release of `speculators` whose files these are, and against which they were tested."""

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""All False where the config is silent: so `speculators` itself has it. (vLLM takes a missing `norm_before_residual` for True.)"""


def read(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: TargetFacts, file: Path) -> EagleConfig:
    """What a head of this layout is made of.

    Raises:
        ValueError: it is no EAGLE-3 head, or asks for what an `EagleHead` does not compute.
    """
    given = read_layer(layer_of(raw, "eagle3", "qwen3", file), file)
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    flags: dict[str, Any] = {name: bool(raw.get(name)) for name in _FLAGS}
    wrong = {name: raw[name] for name in _FLAGS if raw.get(name) not in (None, True, False)}
    if wrong:
        raise ValueError(f"{file}: got {wrong}; allowed are true and false")
    return EagleConfig(
        3, default_layers(facts, file) if ids is None else layer_ids(ids, "eagle_aux_hidden_state_layer_ids", file),
        target_hidden_size=int(raw.get("target_hidden_size") or given["hidden_size"]), **given,
        draft_vocab_size=int(raw.get("draft_vocab_size", 32000)), own_embedding="embed_tokens.weight" in tensors,
        **flags,
    )  # fmt: skip


def write(config: EagleConfig, dtype: torch.dtype, name: str | None, architectures: Sequence[str]) -> dict[str, Any]:
    """The config of a head in this layout, every flag spelled out.

    Args:
        name: of the target, and `architectures`, as its own config has them.

    Raises:
        ValueError: it names a flag that the layout does not have.
    """
    if config.version != 3:
        raise ValueError(f"layout: 'speculators' cannot express version={config.version}; use 'eagle'")
    if config.bias:
        raise ValueError("layout: 'speculators' cannot express bias=True; use 'eagle'")
    return {
        "architectures": ["Eagle3Speculator"], **frame("eagle3", write_layer(config), config, dtype, name, architectures),
        "target_hidden_size": config.target_hidden_size, "eagle_aux_hidden_state_layer_ids": list(config.layers),
        **{flag: getattr(config, flag) for flag in _FLAGS}, "embed_requires_grad": False,
    }  # fmt: skip


def layer_of(raw: Mapping[str, Any], kind: str, silent: str, file: Path) -> Mapping[str, Any]:
    """The layer's config.

    Args:
        silent: the model type that `speculators` takes where it is left out.

    Raises:
        ValueError: the head is of another kind, or its layer is not Llama's.
    """
    if raw["speculators_model_type"] != kind:
        raise ValueError(f"{file}: speculators_model_type: got {raw['speculators_model_type']!r}; allowed is {kind!r}")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{file}: transformer_layer_config: got {layer!r}; it should describe the head's layer")
    if "model_type" not in layer:
        raise ValueError(f"{file}: transformer_layer_config has no model_type, which means {silent}; allowed is 'llama'")
    return layer


def frame(kind: str, layer: Mapping[str, Any], config: EagleConfig | MTPConfig, dtype: torch.dtype, name: str | None,
          architectures: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """What the configs of all kinds of heads say."""
    stored = str(dtype).removeprefix("torch.")
    way = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_model_type": kind, "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind, "proposal_methods": [way], "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": list(architectures)},
        },
        "transformer_layer_config": {**layer, "dtype": stored, "rope_parameters": write_rope(config)},
        "draft_vocab_size": config.draft_vocab_size, "tie_word_embeddings": False, "dtype": stored,
    }  # fmt: skip
