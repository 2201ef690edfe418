"""Modules for multi-token prediction: the layout of `speculators`, and DeepSeek's names inside a whole model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from ..heads import MTPConfig, MTPHead
from ..types import TargetFacts
from .build import check_weights, fill, fresh, write
from .llama import check_depth, read_layer, write_layer
from .maps import map_shapes, read_map, write_map
from .speculators import frame, layer_of
from .strict import folder_of, read_config, read_tensors, understood

__all__ = ["load_mtp", "save_mtp"]

_THEIRS = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"}
"""What `speculators` calls them."""
_DEEPSEEKS = {"norm": "shared_head.norm"}

_PREFIX = "mtp_layers.0."
_TARGETS = ("embed_tokens.", "lm_head.", "shared_head.head.")
"""What is stored a second time of the target's, and not read."""

_BEYOND = {
    "multi-head latent attention (MLA)": r"self_attn\.(q_a_|q_b_|kv_a_|kv_b_)",
    "a mixture of experts": r"mlp\.(experts\.|shared_expert|gate\.)",
    "norms of queries and keys": r"self_attn\.(q_norm|k_norm)\.",
}
"""By name in the module: what `MTPHead` does not compute."""


def load_mtp(path: str | Path, facts: TargetFacts) -> MTPHead:
    """The module of a checkpoint: made by `save_mtp`, or stored inside its target under DeepSeek's names. See docs/checkpoints.md.

    Weights keep the precision in which they are stored, and are put where the target is. Of a file that holds the target too nothing but
    the module is read; of several modules the first.

    Args:
        path: a folder, or a name on the Hugging Face hub.
        facts: of the target that will verify what the module drafts.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape (all are named); the module was made for another target; it has another
            attention than Llama's, or experts, which `MTPDrafter.from_target` runs where it came with the target; its vocabulary map is no
            map; the weights are a pickle that holds more than tensors.
    """
    folder = folder_of(path)
    file, raw = folder / "config.json", read_config(folder)
    theirs = "speculators_model_type" in raw
    layer = layer_of(raw, "mtp", "qwen2", file) if theirs else raw
    if theirs and raw.get("num_nextn_predict_layers", 1) != 1:
        raise ValueError(f"{file}: num_nextn_predict_layers: got {raw['num_nextn_predict_layers']!r}; allowed is 1")
    count = check_depth(layer, facts, file, "a module reads")
    prefix, called = (_PREFIX, _THEIRS) if theirs else (f"model.layers.{count}.", _DEEPSEEKS)
    tensors = read_tensors(folder, choose=lambda names: _module(names, prefix, "" if theirs else prefix, folder))
    with understood(file):
        config = _config(raw, layer, count, file)
    head = fresh(MTPHead, config, facts, folder)
    names, maps = _names(head, prefix, called), map_shapes(config)
    check_weights(head, names, tensors, folder, maps, maps if config.draft_vocab_size == config.vocab_size else ())
    return fill(head, names, tensors, read_map(tensors, config, folder), facts)


def save_mtp(head: Any, path: str | Path, *, verifier_name: str | None = None, verifier_architectures: Sequence[str] = ()) -> None:
    """Write a module so that `load_mtp` finds it, in the layout of `speculators`, which itself has no Llama layer in a module: see
    docs/checkpoints.md. Each file appears whole or not at all, the config last.

    Args:
        head: `specdec.heads.MTPHead`.
        verifier_name: where the target is found, and `verifier_architectures` what its config calls it.

    Raises:
        TypeError: it is another kind of module, such as one that came with the target, where it is stored already.
        ValueError: its ids are no tokens of the target, or two are the same one; nothing was written.
    """
    if not isinstance(head, MTPHead):
        raise TypeError(f"head: got {type(head).__name__}; give a specdec.heads.MTPHead: what came with a target is stored with it")
    config, state = head.config, head.state_dict()
    layer = write_layer(config) | {"num_hidden_layers": config.layers[0]}
    described = {
        "architectures": ["MTPDraftModel"],
        **frame("mtp", layer, config, head.weight.dtype, verifier_name, verifier_architectures),
        "num_nextn_predict_layers": 1,
    }
    tensors = {theirs: state[mine] for theirs, mine in _names(head, _PREFIX, _THEIRS).items()}
    write(Path(path).expanduser(), tensors | write_map(state["offsets"], config), described)


def _config(raw: Mapping[str, Any], layer: Mapping[str, Any], count: int, file: Path) -> MTPConfig:
    given = read_layer(layer, file, ("tie_word_embeddings", "num_hidden_layers"))
    drafted = raw.get("draft_vocab_size", given["vocab_size"])
    if isinstance(drafted, bool) or not isinstance(drafted, int) or not 1 <= drafted <= given["vocab_size"]:
        raise ValueError(f"{file}: draft_vocab_size: got {drafted!r}; allowed are 1 to {given['vocab_size']}")
    return MTPConfig((count,), draft_vocab_size=drafted, **given)


def _module(names: AbstractSet[str], prefix: str, within: str, folder: Path) -> AbstractSet[str]:
    """The names of the module's own tensors. Refuses those that no `MTPHead` has a use for before anything is read.

    Args:
        prefix: of its names, and `within` of all that are not somebody else's.
    """
    if not any(name.startswith(prefix) for name in names):
        raise ValueError(f"{folder}: no module for multi-token prediction: a name of its tensors would begin with {prefix}")
    found = {name for name in names if name.startswith(within) and not name.removeprefix(prefix).startswith(_TARGETS)}
    for what, pattern in _BEYOND.items():
        beyond = sorted({match[0] for match in (re.search(pattern + r"[^.]*", name) for name in found) if match})
        if beyond:
            raise ValueError(
                f"{folder}: the module has {what} ({', '.join(beyond[:8])}), which an MTPHead does not compute; a module that came with "
                "its target is run by MTPDrafter.from_target"
            )
    return {name for name in found if not name.endswith("rotary_emb.inv_freq")}


def _names(head: MTPHead, prefix: str, called: Mapping[str, str]) -> dict[str, str]:
    """Name in a file -> name here, of all weights."""

    def theirs(mine: str) -> str:
        part, dot, rest = mine.partition(".")
        return prefix + (rest if part == "layer" else f"{called.get(part, part)}{dot}{rest}")

    return {theirs(mine): mine for mine in head.state_dict() if mine != "offsets"}
