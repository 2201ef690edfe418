"""Tensors of a folder, read whole and without running anything, and compared name by name with what should be there."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

__all__ = ["PACKAGED", "WEIGHTS", "Choose", "compare", "folder_of", "read_config", "read_flag", "read_tensors", "understood"]

PACKAGED = Path(__file__).parent / "packaged"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In this order, each whole or in parts that an index names."""

_PATTERNS = ("*.json", "*.safetensors", "pytorch_model*.bin", "medusa_lm_head.pt")

Choose = Callable[[AbstractSet[str]], AbstractSet[str]]
"""Of all the names that a folder has tensors for, those to read. It may raise before anything is read."""


def folder_of(path: str | Path) -> Path:
    """The folder itself, the head of that name that comes with this package, or the local copy of what the Hugging Face hub has.

    Raises:
        ValueError: there is neither.
    """
    for folder in (Path(path).expanduser(), PACKAGED / path):
        if folder.is_dir():
            return folder
    if str(path).startswith(("/", ".", "~")):
        raise ValueError(f"path: got {str(path)!r}, and there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=list(_PATTERNS)))
    except Exception as error:  # the hub's errors are many, and differ between its versions
        raise ValueError(f"path: got {str(path)!r}, which is neither a folder nor a name that the hub answers to: {error}") from error


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """Whatever a config holds that is of another kind than it should be, a list for a number, becomes a ValueError that names the file."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{file}: something in it is not of the kind that it should be ({type(error).__name__}: {error})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` says.

    Raises:
        ValueError: it is not there, or no JSON object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not readable as JSON ({error}); a checkpoint is a folder with a config.json and its weights") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: holds a {type(config).__name__}; a config is an object")
    return config


def read_flag(raw: Mapping[str, Any], name: str, default: bool, file: Path) -> bool:
    """What the config says of this.

    Raises:
        ValueError: neither true nor false.
    """
    value = raw.get(name)
    if value not in (None, True, False):
        raise ValueError(f"{file}: {name}: got {value!r}; allowed are true and false")
    return default if value is None else bool(value)


def read_tensors(folder: Path, files: Sequence[str] = WEIGHTS, choose: Choose | None = None) -> dict[str, Tensor]:
    """The tensors of the folder, on the CPU, in the precision in which they are stored.

    Args:
        files: where to look, the first that is there counts.
        choose: left out, every tensor is read.

    Raises:
        ValueError: there are no weights; a file is damaged, or holds more than tensors.
    """
    choose = choose or (lambda names: names)
    for name in files:
        if (folder / name).is_file():
            return _read(folder / name, choose)
        if (folder / f"{name}.index.json").is_file():
            return _read_parts(folder / f"{name}.index.json", choose)
    raise ValueError(f"{folder}: no weights; allowed are {' and '.join(files)}, whole or in parts with an index")


def _read_parts(index: Path, choose: Choose) -> dict[str, Tensor]:
    with understood(index):
        where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if not all(isinstance(part, str) for part in where.values()):
            raise TypeError("weight_map names files")
    chosen, tensors = choose(where.keys()), {}
    for part in sorted({where[name] for name in chosen}):
        here = {name for name in chosen if where[name] == part}
        tensors |= _read(index.parent / part, lambda names, here=here: {name for name in names if name in here or name not in where})
    lost, more = sorted(chosen - tensors.keys()), sorted(tensors.keys() - where.keys())
    if lost or more:
        raise ValueError(f"{index}: the parts do not hold what it says; not there: {lost}, not named: {more}")
    return tensors


def _read(file: Path, choose: Choose) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as stored:
                return {name: stored.get_tensor(name) for name in sorted(choose(set(stored.keys())))}
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file}: holds more than tensors, and to read it could run what it holds; nothing was read. Ask its author for a "
            f"model.safetensors, or convert it where that can do no harm ({str(error).splitlines()[0]})"
        ) from error
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, SafetensorError) as error:
        raise ValueError(f"{file}: damaged or not there ({error}); fetch it again") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{file}: is no table of tensors by name; save the model's state_dict() alone")
    return {name: found[name] for name in sorted(choose(found.keys()))}


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
