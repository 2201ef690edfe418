"""Token rows of their own lengths in one growing buffer, so that keeping history costs nothing in proportion to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .types import Int64

__all__ = ["Ragged", "pad_rows", "unpad_rows"]


@dataclass
class Ragged:
    """B rows of token ids on the CPU, left-aligned. Written in place; `ids` beyond a row's length is scrap."""

    ids: Int64[Tensor, "B capacity"]
    lengths: list[int]

    @classmethod
    def empty(cls, batch: int) -> Ragged:
        with torch.inference_mode(False):  # a call may begin in inference mode and go on outside it
            return cls(torch.zeros(batch, 256, dtype=torch.int64, device="cpu"), [0] * batch)

    def row(self, index: int) -> Int64[Tensor, " L"]:
        """A view of one row."""
        return self.ids[index, : self.lengths[index]]

    def last(self) -> Int64[Tensor, " B"]:
        """The last token of each row."""
        return self.ids.gather(1, torch.tensor(self.lengths, device="cpu")[:, None] - 1)[:, 0]

    def but_last(self) -> Ragged:
        """A view without the last token of each row."""
        return Ragged(self.ids, [length - 1 for length in self.lengths])

    def behind(self, skip: Sequence[int]) -> Ragged:
        """The rows without their first `skip` tokens: a view, or a copy where the rows skip different numbers."""
        lengths = [length - n for length, n in zip(self.lengths, skip, strict=True)]
        if len(set(skip)) <= 1:
            return Ragged(self.ids[:, max(skip, default=0) :], lengths)
        return Ragged(self.window(skip, max(lengths)), lengths)

    def window(self, starts: Sequence[int], size: int) -> Int64[Tensor, "B size"]:
        """`size` columns of each row from its own start on; behind a row's end is scrap."""
        at = torch.tensor(list(starts), device="cpu")[:, None] + torch.arange(size, device="cpu")
        return self.ids.gather(1, at.clamp_max(self.ids.shape[1] - 1))

    def extend(self, tokens: Int64[Tensor, "B D"] | Sequence[Sequence[int]], count: Int64[Tensor, " B"] | None = None) -> None:
        """Append to each row the first `count` of `tokens`, or all of its list."""
        if isinstance(tokens, Tensor):
            tokens = [row[:n] for row, n in zip(tokens.tolist(), count.tolist(), strict=True)]
        self._reserve(max(map(len, tokens)))
        for row, new in enumerate(tokens):
            start = self.lengths[row]
            if new:
                self.ids[row, start : start + len(new)] = torch.tensor(new, dtype=torch.int64, device="cpu")
            self.lengths[row] = start + len(new)

    def with_next(self, pending: Sequence[int]) -> list[Int64[Tensor, " _"]]:
        """Views of all rows with one more token each, which is not kept."""
        self._reserve(1)
        for row, token in enumerate(pending):
            self.ids[row, self.lengths[row]] = token
        return [self.ids[row, : n + 1] for row, n in enumerate(self.lengths)]

    def select(self, rows: Sequence[int]) -> Ragged:
        with torch.inference_mode(False):
            return Ragged(self.ids[list(rows)], [self.lengths[row] for row in rows])

    def _reserve(self, room: int) -> None:
        need = max(self.lengths, default=0) + room
        if need > self.ids.shape[1]:
            with torch.inference_mode(False):
                grown = self.ids.new_zeros(len(self.ids), max(need, 2 * self.ids.shape[1]))
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown


def unpad_rows(input_ids: Any, attention_mask: Any = None) -> list[Int64[Tensor, " _"]]:
    """The real tokens of each row, on the CPU.

    Args:
        input_ids: `[B, L]` or `[L]` integers, or a list of rows of any lengths.
        attention_mask: `[B, L]`, 1 at real tokens and 0 at padding; padding may stand on either side, not in between.
    """
    if isinstance(input_ids, Tensor):
        rows = list(input_ids[None] if input_ids.ndim == 1 else input_ids)
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask: it belongs to a padded tensor; a list of rows has no padding to mask")
        if isinstance(input_ids, str | Mapping) or not isinstance(input_ids, Sequence):
            raise TypeError(
                f"input_ids: got {type(input_ids).__name__}; give a tensor or lists of token ids (of an encoding its 'input_ids')"
            )
        nested = [input_ids] if input_ids and all(isinstance(token, Integral) for token in input_ids) else input_ids
        rows = [_row(i, row) for i, row in enumerate(nested)]
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
            raise ValueError(f"input_ids: rows of integer token ids are wanted, row {i} is {row.dtype} of shape {list(row.shape)}")
    rows = [row.to("cpu", torch.int64) for row in rows]
    if attention_mask is None:
        return rows
    mask = torch.as_tensor(attention_mask, device="cpu")
    mask = mask[None] if mask.ndim == 1 else mask
    if list(mask.shape) != [len(rows), *map(len, rows[:1])]:
        raise ValueError(f"attention_mask: {list(mask.shape)} does not fit input_ids of {[len(rows), *map(len, rows[:1])]}")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask: allowed are 1 at real tokens and 0 at padding")
    for i, keep in enumerate(mask == 1):
        at = keep.nonzero()[:, 0]
        if len(at) and int(at[-1] - at[0]) + 1 != len(at):
            raise ValueError(f"attention_mask: row {i} masks tokens in the middle; only padding on the left or right can be left out")
    return [row[keep] for row, keep in zip(rows, mask == 1, strict=True)]


def _row(index: int, tokens: Any) -> Tensor:
    try:
        return torch.as_tensor(tokens, device="cpu", **({} if len(tokens) else {"dtype": torch.int64}))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"input_ids: row {index} is {tokens!r}; give a tensor or a list of token ids") from None


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> tuple[Int64[Tensor, "B L"], Int64[Tensor, " B"]]:
    """The rows side by side, padded on the right, and their lengths."""
    longest = max(map(len, rows))
    padded = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=torch.int64, device="cpu")
    return padded, torch.tensor([len(row) for row in rows], device="cpu")
