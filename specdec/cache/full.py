"""Keys and values of full attention, for rows of their own lengths, with transactions.

    slots   0 ........ lengths[b] ........ S ............ S + T        S = max(lengths)
            committed, row b    stale         scratch of one pass

Position p of row b lies at slot p. A pass writes its T nodes for all rows into one shared region behind the longest row, so that a
layer needs one slice write; a mask hides what is not a row's own. `commit` then moves the accepted nodes to each row's end, and
whatever was not committed is overwritten by the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import Bool, Float, Int64, sent

__all__ = ["FullCache"]


class FullCache:
    """The cache of a batch. Layers are known by their index and come into being at their first write, on their own device.

    Args:
        batch: rows, all empty at first.
    """

    def __init__(self, batch: int) -> None:
        self.lengths = [0] * batch
        """Committed tokens of each row. Read it; only `commit` and `rewind` change it."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._nodes: int | None = None

    @property
    def start(self) -> int:
        """The slot where the next pass writes: the length of the longest row."""
        return max(self.lengths, default=0)

    @property
    def aligned(self) -> bool:
        """Whether all rows are equally long, so that a plain causal mask over the slots is right for a chain."""
        return len(set(self.lengths)) <= 1

    @property
    def num_layers(self) -> int:
        """Layers that were written to."""
        return len(self._layers)

    def open(self, nodes: int) -> None:
        """Begin a transaction for a pass over `nodes` tokens of each row. One that was open before is dropped."""
        if nodes < 1:
            raise ValueError(f"nodes: a pass needs at least one token per row, got {nodes}")
        self._nodes = nodes

    def write(self, layer: int, keys: Float[Tensor, "B H T Dk"], values: Float[Tensor, "B H T Dv"]) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the open pass.

        Returns:
            Views `[B, H, S+T, Dk]` and `[B, H, S+T, Dv]` of all slots to attend over; see `mask`.
        """
        if keys.shape[2] != self._opened() or len(keys) != len(self.lengths):
            raise ValueError(
                f"keys: layer {layer} wrote {keys.shape[2]} tokens for {len(keys)} rows, "
                f"but open({self._nodes}) was called on a cache of {len(self.lengths)} rows"
            )
        start, end = self.start, self.start + keys.shape[2]
        old = self._layers.get(layer, (keys[:, :, :0], values[:, :, :0]))
        if old[0].shape[1::2] != keys.shape[1::2] or old[1].shape[1::2] != values.shape[1::2]:
            raise ValueError(
                f"keys, values: layer {layer} wrote {keys.shape[1]} heads of {keys.shape[3]} and {values.shape[3]}, the cache holds "
                f"{old[0].shape[1]} of {old[0].shape[3]} and {old[1].shape[3]}: it is another model's"
            )
        buffers = self._layers[layer] = (_grow(old[0], end), _grow(old[1], end))
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[:, :, start:end] = new.detach()
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def mask(self, tree_mask: Bool[Tensor, "B T T"]) -> Bool[Tensor, "B 1 T slots"]:
        """What each node of the open pass may attend to: its own row's committed slots, and nodes as `tree_mask` says."""
        nodes, device = tree_mask.shape[1], tree_mask.device
        lengths = sent(self.lengths, device)
        committed = torch.arange(self.start, device=device) < lengths[:, None]
        return torch.cat([committed[:, None].expand(-1, nodes, -1), tree_mask], dim=-1)[:, None]

    def commit(self, path: Int64[Tensor, "B D"], count: Int64[Tensor, " B"]) -> None:
        """Make the first `count` nodes of each row's path permanent, drop the rest, and end the transaction.

        Args:
            path: node indices of the pass, on the CPU, rising along a row.
            count: on the CPU; 0 leaves the row as it was.
        """
        nodes, start = self._opened(), self.start
        kept = [row[:n] for row, n in zip(path.tolist(), count.tolist(), strict=True)]
        for row, chosen in enumerate(kept):
            if any(not low < node < nodes for low, node in zip([-1, *chosen], chosen, strict=False)):
                raise ValueError(f"path: row {row} keeps nodes {chosen}; they must rise from the root down and lie below {nodes}")
        moves = [
            (row, start + node, length + at)
            for row, (chosen, length) in enumerate(zip(kept, self.lengths, strict=True))
            for at, node in enumerate(chosen)
            if start + node != length + at
        ]
        if moves:
            self._move(torch.tensor(moves, dtype=torch.int64, device="cpu").T)
        self.lengths = [length + len(chosen) for length, chosen in zip(self.lengths, kept, strict=True)]
        self._nodes = None

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget what lies behind these lengths, and any open transaction.

        Raises:
            ValueError: a row holds fewer tokens than that; `lengths` has another number of rows.
        """
        if len(lengths) != len(self.lengths) or any(not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"lengths: got {list(lengths)}, but the cache holds {self.lengths} tokens of its rows")
        self.lengths, self._nodes = list(lengths), None

    def select(self, rows: Sequence[int]) -> FullCache:
        """The cache with these rows, in this order, and no open transaction. This one may not be used any more."""
        chosen = FullCache(len(rows))
        chosen.lengths = [self.lengths[row] for row in rows]
        chosen._layers = self._layers
        if list(rows) != list(range(len(self.lengths))):
            with torch.inference_mode(False):
                chosen._layers = {n: (k[list(rows)], v[list(rows)]) for n, (k, v) in self._layers.items()}
        return chosen

    def _opened(self) -> int:
        if self._nodes is None:
            raise RuntimeError("cache: no transaction is open; call open(nodes) before write and commit")
        return self._nodes

    def _move(self, moves: Int64[Tensor, "3 R"]) -> None:
        placed: dict[torch.device, Int64[Tensor, "3 R"]] = {}
        for buffer in (tensor for pair in self._layers.values() for tensor in pair):
            if buffer.device not in placed:
                placed[buffer.device] = sent(moves, buffer.device)
            row, source, target = placed[buffer.device]
            # Indexing copies before anything is written, so a slot that is both source and target is safe.
            buffer[row, :, target] = buffer[row, :, source]


def _grow(buffer: Float[Tensor, "B H C D"], need: int) -> Float[Tensor, "B H capacity D"]:
    """The buffer if it has `need` slots, else a copy twice as long. New slots are zero: a mask does not stop NaN times zero."""
    batch, heads, capacity, size = buffer.shape
    if need <= capacity:
        return buffer
    with torch.inference_mode(False):  # else a cache begun under inference_mode could not be written to after it
        grown = buffer.new_zeros(batch, heads, max(need, 2 * capacity, 64), size)
        grown[:, :, :capacity] = buffer.detach()
    return grown
