"""The layout of the package `speculators`, which vLLM reads: EAGLE-3 alone, the layer's config inside the head's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads.eagle import EagleConfig
from ..types import TargetFacts
from .llama import default_layers, layer_ids, read_layer, write_layer

__all__ = ["VERSION", "read", "write"]

VERSION = "0.9.0"
"""The release of `speculators` whose files these are, and against which they were tested."""

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""All False where the config is silent: so `speculators` itself has it. (vLLM takes a missing `norm_before_residual` for True.)"""


def read(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: TargetFacts, file: Path) -> EagleConfig:
    """What a head of this layout is made of.

    Raises:
        ValueError: it is no EAGLE-3 head, or asks for what an `EagleHead` does not compute.
    """
    kind = raw["speculators_model_type"]
    if kind != "eagle3":
        raise ValueError(f"{file}: speculators_model_type: got {kind!r}; allowed is 'eagle3'")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{file}: transformer_layer_config: got {layer!r}; it should describe the head's layer")
    if "model_type" not in layer:
        raise ValueError(f"{file}: transformer_layer_config has no model_type, which means qwen3; allowed is 'llama'")
    given = read_layer(layer, file)
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
    scaling = dict(config.rope_scaling or {})
    kind = scaling.pop("type", "default")
    layer = write_layer(config) | {
        "dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": {"rope_type": kind, **scaling, "rope_theta": config.rope_theta},
    }
    way = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3", "proposal_methods": [way], "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer, "draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.layers), **{flag: getattr(config, flag) for flag in _FLAGS},
        "embed_requires_grad": False, "tie_word_embeddings": False, "dtype": layer["dtype"],
    }  # fmt: skip
