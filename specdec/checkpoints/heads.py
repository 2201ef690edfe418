"""Heads from a folder and back: the same for every layout but for names and configs, which the layouts' own files know."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..heads import EagleConfig, EagleHead, fits
from ..types import Int64, TargetFacts
from . import eagle, speculators
from .strict import compare, folder_of, read_config, read_tensors

__all__ = ["load_head", "save_head"]


def load_head(path: str | Path, facts: TargetFacts) -> EagleHead:
    """The EAGLE head of a checkpoint: made by SafeAILab's code, SpecForge, `speculators` or `save_head`. See docs/checkpoints.md.

    Weights keep the precision in which they are stored, and are put where the target is.

    Args:
        path: a folder, or a name on the Hugging Face hub.
        facts: of the target that will verify what the head drafts.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape (all are named); the head was made for another target, or asks for what
            is not computed here; its vocabulary map is no map; the weights are a pickle that holds more than tensors.
    """
    folder = folder_of(path)
    file, raw, tensors = folder / "config.json", read_config(folder), read_tensors(folder)
    if "speculators_model_type" in raw:
        config, layer = speculators.read(raw, tensors, facts, file), "layers.0"
    else:
        config = eagle.read(raw, tensors, facts, file)
        layer = eagle.layer_name(config, tensors)
        if raw.get("norm_output") and config.version == 3:
            warnings.warn(
                f"{file}: norm_output=True is read as a norm before the output head. Trainers of late 2026 mean that the next "
                "step reads what was normed: such a head drafts worse here, and is read as it was meant from the layout 'speculators'",
                stacklevel=2,
            )
    try:
        fits(config, facts)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    with torch.device("meta"):
        head = EagleHead(config)
    # An old transformers stored what it turns positions with, which follows from the config.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    names = _names(head, layer)
    shapes = {theirs: head.state_dict()[mine].shape for theirs, mine in names.items()} | _map_shapes(config)
    same = config.draft_vocab_size == config.vocab_size
    compare(shapes, tensors, folder, optional=("d2t", "t2d") if same else ())
    odd = {name: str(tensors[name].dtype) for name in names if not tensors[name].is_floating_point()}
    if odd:
        raise ValueError(f"{folder}: got {odd}; weights must be floating-point numbers: quantized heads cannot be read")
    offsets = tensors.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    _check_map(offsets, tensors.get("t2d"), config, folder)
    state = {mine: tensors[theirs] for theirs, mine in names.items()}
    head.load_state_dict({**state, "offsets": offsets.to(torch.int64)}, assign=True)
    return head.to(facts.device).eval()


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
    tensors = {theirs: state[mine].cpu().contiguous() for theirs, mine in _names(head, layer).items()}
    offsets = state["offsets"].cpu()
    mapped = torch.zeros(config.vocab_size, dtype=torch.bool)
    ids = offsets + torch.arange(len(offsets))
    if bool((ids >= 0).all()) and bool((ids < config.vocab_size).all()):
        mapped[ids] = True
    _check_map(offsets, mapped, config, Path("head"))
    if config.draft_vocab_size != config.vocab_size:
        tensors |= {"d2t": offsets, "t2d": mapped}
    _write(folder, tensors, described)


def _names(head: EagleHead, layer: str) -> dict[str, str]:
    """Name in a file -> name here, of all weights."""
    return {f"{layer}.{name[6:]}" if name.startswith("layer.") else name: name for name in head.state_dict() if name != "offsets"}


def _map_shapes(config: EagleConfig) -> dict[str, torch.Size]:
    if config.version == 1:
        return {}
    return {"d2t": torch.Size([config.draft_vocab_size]), "t2d": torch.Size([config.vocab_size])}


def _check_map(offsets: Int64[Tensor, " Vd"] | Tensor, known: Tensor | None, config: EagleConfig, where: Path) -> None:
    """ValueError unless each draft token is a token of the target, and no two are the same one."""
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ValueError(f"{where}: d2t has type {offsets.dtype}; it holds the whole numbers target id minus draft id")
    ids = offsets.long() + torch.arange(len(offsets))
    outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero().flatten().tolist()
    if outside:
        first = outside[0]
        raise ValueError(
            f"{where}: d2t sends {len(outside)} draft tokens outside the target's vocabulary of {config.vocab_size}, first {first} to "
            f"{int(ids[first])}; it holds offsets (target id minus draft id), not ids"
        )
    tokens, counts = ids.unique(return_counts=True)
    if len(tokens) < len(ids):
        twice = tokens[counts > 1].tolist()
        raise ValueError(
            f"{where}: d2t sends more than one draft token to each of {twice[:5]}; it holds offsets (target id minus draft id)"
        )
    if len(ids) == config.vocab_size and bool(offsets.any()):
        raise ValueError(f"{where}: d2t is not all 0, though every token can be drafted; readers of such heads leave it out")
    if known is not None:
        differ = (known.bool() != torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)).nonzero().flatten().tolist()
        if differ:
            raise ValueError(f"{where}: t2d and d2t disagree on {len(differ)} tokens, first {differ[:5]}: one of them is of another head")


def _write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights, described = folder / f".model.{os.getpid()}.part", folder / f".config.{os.getpid()}.part"
    try:
        described.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(dict(tensors), weights, metadata={"format": "pt"})
        weights.chmod(described.stat().st_mode)  # safetensors writes for the owner's eyes alone
        os.replace(weights, folder / "model.safetensors")
        os.replace(described, folder / "config.json")
    finally:
        weights.unlink(missing_ok=True)
        described.unlink(missing_ok=True)
