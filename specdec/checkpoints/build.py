"""From tensors to a head and back to a folder: what does not depend on the layout."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..heads import HeadConfig, fits
from ..types import Int64, TargetFacts
from .strict import compare

__all__ = ["check_weights", "fill", "fresh", "write"]

C = TypeVar("C", bound=HeadConfig)
H = TypeVar("H", bound=nn.Module)

_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Those of 8 bits are floating-point numbers too, but mean nothing without scales."""


def fresh(kind: Callable[[C], H], config: C, facts: TargetFacts, folder: Path) -> H:
    """A head without numbers.

    Raises:
        ValueError: it was made for another target.
    """
    try:
        fits(config, facts)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    with torch.device("meta"):
        return kind(config)


def check_weights(head: nn.Module, names: Mapping[str, str], tensors: Mapping[str, Tensor], folder: Path,
                  more: Mapping[str, torch.Size] | None = None, optional: Collection[str] = ()) -> None:  # fmt: skip
    """Nothing if the tensors are those of the head, and `more`.

    Args:
        names: name in the file -> name in the head.

    Raises:
        ValueError: see `compare`; weights are quantized.
    """
    state = head.state_dict()
    compare({theirs: state[mine].shape for theirs, mine in names.items()} | dict(more or {}), tensors, folder, optional)
    odd = {name: str(tensors[name].dtype) for name in names if tensors[name].dtype not in _PRECISIONS}
    if odd:
        raise ValueError(f"{folder}: got {odd}; weights must be floating-point numbers: quantized heads cannot be read")


def fill(head: H, names: Mapping[str, str], tensors: Mapping[str, Tensor], offsets: Int64[Tensor, " Vd"], facts: TargetFacts) -> H:
    """The head with these numbers, where the target is; all in the precision that most of them are stored in."""
    head.load_state_dict({**{mine: tensors[theirs] for theirs, mine in names.items()}, "offsets": offsets}, assign=True)
    sizes = Counter[torch.dtype]()
    for weight in head.parameters():
        sizes[weight.dtype] += weight.numel()
    return head.to(facts.device, sizes.most_common(1)[0][0]).eval()


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str = "model.safetensors") -> None:
    """Put both files into the folder, each whole or not at all, the config last."""
    folder.mkdir(parents=True, exist_ok=True)
    weights, described = folder / f".model.{os.getpid()}.part", folder / f".config.{os.getpid()}.part"
    try:
        described.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(_apart(tensors), weights, metadata={"format": "pt"})
        weights.chmod(described.stat().st_mode)  # safetensors writes for the owner's eyes alone
        os.replace(weights, folder / name)
        os.replace(described, folder / "config.json")
    finally:
        weights.unlink(missing_ok=True)
        described.unlink(missing_ok=True)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, and none in the memory of another, which safetensors refuses."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        found[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in taken else tensor
        taken.add(found[name].untyped_storage().data_ptr())
    return found
