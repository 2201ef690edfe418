"""Tensors of a folder, read whole and without running anything, and compared name by name with what should be there."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["PACKAGED", "compare", "folder_of", "read_config", "read_tensors"]

PACKAGED = Path(__file__).parent / "packaged"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In this order, each whole or in parts that an index names."""


def folder_of(path: str | Path) -> Path:
    """The folder itself, the head of that name that comes with this package, or the local copy of what the Hugging Face hub has.

    Raises:
        ValueError: there is neither.
    """
    for folder in (Path(path).expanduser(), PACKAGED / path):
        if folder.is_dir():
            return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", *_WEIGHTS, "*.safetensors", "pytorch_model*.bin"]))
    except Exception as error:  # the hub's errors are many, and differ between its versions
        raise ValueError(f"path: got {str(path)!r}, which is neither a folder nor a name that the hub answers to: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` says.

    Raises:
        ValueError: it is not there, or no JSON object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not readable as JSON ({error}); a checkpoint is a folder with a config.json and its weights") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: holds a {type(config).__name__}; a config is an object")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, on the CPU, in the precision in which it is stored.

    Raises:
        ValueError: there are no weights; a file is damaged, or holds more than tensors.
    """
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return _read(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _read_parts(folder / f"{name}.index.json")
    raise ValueError(f"{folder}: no weights; allowed are {' and '.join(_WEIGHTS)}, whole or in parts with an index")


def _read_parts(index: Path) -> dict[str, Tensor]:
    where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    parts = {part: _read(index.parent / part) for part in sorted(set(where.values()))}
    tensors = {name: tensor for part in parts.values() for name, tensor in part.items()}
    lost = sorted(name for name, part in where.items() if name not in parts[part])
    if lost or len(tensors) != len(where):
        raise ValueError(f"{index}: the parts do not hold what it says; not there: {lost}, not named: {sorted(set(tensors) - set(where))}")
    return tensors


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file}: holds more than tensors, and to read it could run what it holds; nothing was read. Ask its author for a "
            f"model.safetensors, or convert it where that can do no harm ({str(error).splitlines()[0]})"
        ) from error
    except (OSError, RuntimeError, EOFError, SafetensorError) as error:
        raise ValueError(f"{file}: damaged or not there ({error}); fetch it again") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{file}: is no table of tensors by name; save the model's state_dict() alone")
    return dict(found)


def compare(expected: Mapping[str, torch.Size], found: Mapping[str, Tensor], where: Path, optional: Iterable[str] = ()) -> None:
    """Nothing if the names and shapes agree; those of `optional` may be missing.

    Raises:
        ValueError: it names every tensor that is missing, that nobody asked for, or that has another shape.
    """
    faults = [f"missing: {name} {_shape(expected[name])}" for name in expected if name not in found and name not in set(optional)]
    faults += [f"unexpected: {name} {_shape(found[name].shape)}" for name in sorted(found) if name not in expected]
    faults += [
        f"another shape: {name} is {_shape(found[name].shape)}, expected {_shape(expected[name])}"
        for name in expected
        if name in found and found[name].shape != expected[name]
    ]
    if faults:
        raise ValueError(f"{where}: the weights are not those of the head that config.json describes\n  " + "\n  ".join(faults))


def _shape(shape: torch.Size) -> str:
    return str(list(shape))
