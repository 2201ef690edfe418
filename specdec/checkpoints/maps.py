"""Which tokens a head can draft, as files have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..types import Int64

__all__ = ["check_ids", "map_shapes", "read_map", "write_map"]

_OFFSETS = "it holds offsets (target id minus draft id)"


@runtime_checkable
class Drafts(Protocol):
    """The part of a config that says how much can be drafted."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...


def map_shapes(config: Drafts) -> dict[str, torch.Size]:
    """Of `d2t` and `t2d`, which may be missing where every token can be drafted."""
    return {"d2t": torch.Size([config.draft_vocab_size]), "t2d": torch.Size([config.vocab_size])}


def read_map(tensors: Mapping[str, Tensor], config: Drafts, where: Path) -> Int64[Tensor, " Vd"]:
    """Target id minus draft id, from `d2t` and `t2d` of the right shapes.

    Raises:
        ValueError: a draft token is no token of the target, or two are the same one; `t2d` says otherwise.
    """
    offsets = tensors.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    _check(offsets, tensors.get("t2d"), config, where)
    return offsets.to(torch.int64)


def write_map(offsets: Int64[Tensor, " Vd"], config: Drafts) -> dict[str, Tensor]:
    """`d2t` and `t2d`; nothing where every token can be drafted.

    Raises:
        ValueError: it is no map, as in `read_map`.
    """
    offsets = offsets.cpu()
    _check(offsets, None, config, Path("head"))
    if config.draft_vocab_size == config.vocab_size:
        return {}
    return {"d2t": offsets, "t2d": _known(offsets, config)}


def check_ids(ids: Int64[Tensor, " Vd"], vocab_size: int, name: str, where: Path, hint: str) -> None:
    """ValueError unless each draft token is a token of the target, and no two are the same one.

    Args:
        name: of the tensor that says so, and `hint` what it holds.
    """
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten().tolist()
    if outside:
        first = outside[0]
        raise ValueError(
            f"{where}: {name} sends {len(outside)} draft tokens outside the target's vocabulary of {vocab_size}, first {first} to "
            f"{int(ids[first])}; {hint}"
        )
    tokens, counts = ids.unique(return_counts=True)
    if len(tokens) < len(ids):
        twice = tokens[counts > 1].tolist()
        raise ValueError(f"{where}: {name} sends more than one draft token to each of {twice[:5]}; {hint}")


def _check(offsets: Tensor, known: Tensor | None, config: Drafts, where: Path) -> None:
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ValueError(f"{where}: d2t has type {offsets.dtype}; it holds the whole numbers target id minus draft id")
    offsets = offsets.long()
    check_ids(offsets + torch.arange(len(offsets)), config.vocab_size, "d2t", where, f"{_OFFSETS}, not ids")
    if len(offsets) == config.vocab_size and bool(offsets.any()):
        raise ValueError(f"{where}: d2t is not all 0, though every token can be drafted; readers of such heads leave it out")
    if known is not None:
        differ = (known.bool() != _known(offsets, config)).nonzero().flatten().tolist()
        if differ:
            raise ValueError(f"{where}: t2d and d2t disagree on {len(differ)} tokens, first {differ[:5]}: one of them is of another head")


def _known(offsets: Tensor, config: Drafts) -> Tensor:
    return torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, offsets + torch.arange(len(offsets)), True)
