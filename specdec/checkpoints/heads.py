"""EAGLE heads from a folder and back: the same for both layouts but for names and configs, which the layouts' own files know."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..heads import EagleHead
from ..types import TargetFacts
from . import eagle, speculators
from .build import check_weights, fill, fresh, write
from .maps import map_shapes, read_map, write_map
from .strict import folder_of, read_config, read_tensors, understood

__all__ = ["load_head", "save_head"]


def load_head(path: str | Path, facts: TargetFacts, *, norm_output: bool | None = None) -> EagleHead:
    """The EAGLE head of a checkpoint: made by SafeAILab's code, SpecForge, `speculators` or `save_head`. See docs/checkpoints.md.

    Weights keep the precision in which they, or most of them, are stored, and are put where the target is.

    Args:
        path: a folder, or a name on the Hugging Face hub.
        facts: of the target that will verify what the head drafts: `specdec.cache.causal_target(model).facts`.
        norm_output: whether the next step reads what went through the final norm. Left out, the file says it; in the layout of SafeAILab,
            SpecForge and SGLang the word has had two meanings, and is read in the older.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape (all are named); the head was made for another target, or asks for what
            is not computed here; its vocabulary map is no map; the weights are a pickle that holds more than tensors.
    """
    folder = folder_of(path)
    file, raw, tensors = folder / "config.json", read_config(folder), read_tensors(folder)
    if "speculators_model_type" in raw:
        with understood(file):
            config, layer = speculators.read(raw, tensors, facts, file), "layers.0"
    else:
        known = raw if norm_output is None else {name: value for name, value in raw.items() if name != "norm_output"}
        with understood(file):
            config = eagle.read(known, tensors, facts, file)
        layer = eagle.layer_name(config, tensors)
        if known.get("norm_output") and config.version == 3:
            warnings.warn(
                f"{file}: norm_output=True is read as a norm before the output head. Trainers of late 2026 mean that the next "
                "step reads what was normed: such a head drafts worse here, and is read as it was meant from the layout 'speculators'",
                stacklevel=2,
            )
    config = config if norm_output is None else replace(config, norm_output=norm_output)
    head = fresh(EagleHead, config, facts, folder)
    # An old transformers stored what it turns positions with, which follows from the config.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    names, maps = _names(head, layer), {} if config.version == 1 else map_shapes(config)
    check_weights(head, names, tensors, folder, maps, maps if config.draft_vocab_size == config.vocab_size else ())
    return fill(head, names, tensors, read_map(tensors, config, folder), facts)


def save_head(head: EagleHead, path: str | Path, *, layout: str = "speculators",
              verifier_name: str | None = None, verifier_architectures: Sequence[str] = ()) -> None:  # fmt: skip
    """Write a head so that `load_head` and the readers of the layout find it: vLLM and `speculators`, or SGLang, SpecForge and SafeAILab.

    Each file appears whole or not at all, the config last.

    Args:
        layout: "speculators" has EAGLE-3 with every flag but `bias`; "eagle" has EAGLE-1 and -3.
        verifier_name: where the target is found, and `verifier_architectures` what its config calls it; "speculators" records both.

    Raises:
        ValueError: the head has a flag that the layout cannot express, or the layout is unknown; nothing was written.
    """
    config, folder = head.config, Path(path).expanduser()
    dtype = head.fc.weight.dtype
    if config.norm_before_fc and config.fc_norm:
        raise ValueError("norm_before_fc, fc_norm: both are True; no layout expresses that")
    if layout == "speculators":
        described, layer = speculators.write(config, dtype, verifier_name, verifier_architectures), "layers.0"
    elif layout == "eagle":
        described, layer = eagle.write(config, dtype), "midlayer" if config.version == 3 else "layers.0"
    else:
        raise ValueError(f"layout: got {layout!r}; allowed are 'speculators' and 'eagle'")
    state = head.state_dict()
    tensors = {theirs: state[mine] for theirs, mine in _names(head, layer).items()}
    write(folder, tensors | write_map(state["offsets"], config), described)


def _names(head: EagleHead, layer: str) -> dict[str, str]:
    """Name in a file -> name here, of all weights."""
    return {f"{layer}.{name[6:]}" if name.startswith("layer.") else name: name for name in head.state_dict() if name != "offsets"}
