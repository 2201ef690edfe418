"""Token rows of their own lengths in one growing buffer, so that keeping history costs nothing in proportion to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        return cls(torch.zeros(batch, 256, dtype=torch.int64), [0] * batch)

    def row(self, index: int) -> Int64[Tensor, " L"]:
        """A view of one row."""
        return self.ids[index, : self.lengths[index]]

    def last(self) -> Int64[Tensor, " B"]:
        """The last token of each row."""
        return self.ids.gather(1, torch.tensor(self.lengths)[:, None] - 1)[:, 0]

    def but_last(self) -> Ragged:
        """A view without the last token of each row."""
        return Ragged(self.ids, [length - 1 for length in self.lengths])

    def extend(self, tokens: Int64[Tensor, "B D"] | Sequence[Sequence[int]], count: Int64[Tensor, " B"] | None = None) -> None:
        """Append to each row the first `count` of `tokens`, or all of its list."""
        if isinstance(tokens, Tensor):
            tokens = [row[:n] for row, n in zip(tokens.tolist(), count.tolist(), strict=True)]
        self._reserve(max(map(len, tokens)))
        for row, new in enumerate(tokens):
            start = self.lengths[row]
            if new:
                self.ids[row, start : start + len(new)] = torch.tensor(new, dtype=torch.int64)
            self.lengths[row] = start + len(new)

    def with_next(self, pending: Sequence[int]) -> list[Int64[Tensor, " _"]]:
        """Views of all rows with one more token each, which is not kept."""
        self._reserve(1)
        for row, token in enumerate(pending):
            self.ids[row, self.lengths[row]] = token
        return [self.ids[row, : n + 1] for row, n in enumerate(self.lengths)]

    def select(self, rows: Sequence[int]) -> Ragged:
        return Ragged(self.ids[list(rows)], [self.lengths[row] for row in rows])

    def _reserve(self, room: int) -> None:
        need = max(self.lengths, default=0) + room
        if need > self.ids.shape[1]:
            grown = self.ids.new_zeros(len(self.ids), max(need, 2 * self.ids.shape[1]))
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown


def unpad_rows(input_ids: Tensor | Sequence[Any], attention_mask: Tensor | None = None) -> list[Int64[Tensor, " _"]]:
    """The real tokens of each row, on the CPU.

    Args:
        input_ids: `[B, L]` or `[L]` integers, or a list of rows of any lengths.
        attention_mask: `[B, L]`, nonzero at real tokens; padding may stand on either side, not in between.
    """
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            raise ValueError("attention_mask: it belongs to a padded tensor; a list of rows has no padding to mask")
        nested = [torch.as_tensor(row) for row in input_ids]
        rows = nested if all(row.ndim == 1 for row in nested) and nested else [torch.as_tensor(input_ids)]
    else:
        rows = list(input_ids[None] if input_ids.ndim == 1 else input_ids)
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
            raise ValueError(f"input_ids: rows of integer token ids are wanted, row {i} is {row.dtype} of shape {list(row.shape)}")
    rows = [row.to("cpu", torch.int64) for row in rows]
    if attention_mask is None:
        return rows
    mask = attention_mask.to("cpu").reshape(-1, attention_mask.shape[-1]) != 0
    if mask.shape != (len(rows), len(rows[0])):
        raise ValueError(f"attention_mask: {list(attention_mask.shape)} does not fit input_ids of {[len(rows), len(rows[0])]}")
    for i, keep in enumerate(mask):
        at = keep.nonzero()[:, 0]
        if len(at) and int(at[-1] - at[0]) + 1 != len(at):
            raise ValueError(f"attention_mask: row {i} masks tokens in the middle; only padding on the left or right can be left out")
    return [row[keep] for row, keep in zip(rows, mask, strict=True)]


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> tuple[Int64[Tensor, "B L"], Int64[Tensor, " B"]]:
    """The rows side by side, padded on the right, and their lengths."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows]), torch.tensor([len(row) for row in rows])
