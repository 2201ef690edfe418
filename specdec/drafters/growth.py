"""A draft on its way: who has a law for each node of the last level lets it grow by another level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..rng import Purpose, Source
from ..tree import root_only
from ..types import PAD, ROOT, Bool, DraftTree, Draws, Float, Int64, Kind, probabilities, sent

__all__ = ["KINDS", "Growing", "Growth", "Place", "drawable"]

KINDS = {"p": Kind.POINT, "i": Kind.IID, "w": Kind.WITHOUT_REPLACEMENT, "r": Kind.IID}


@runtime_checkable
class Growing(Protocol):
    """A tree on its way, see `Growth`."""

    @property
    def more(self) -> bool: ...
    @property
    def height(self) -> int: ...
    @property
    def last(self) -> slice: ...
    @property
    def tokens(self) -> Int64[Tensor, "B N"]: ...
    @property
    def parents(self) -> Int64[Tensor, "B N"]: ...
    def likelihood(self) -> Float[Tensor, "B P"]: ...
    def level(self, laws: Float[Tensor, "B P V"], source: Source, open: Bool[Tensor, "B P"] | None = None,
              other: Float[Tensor, "B P V"] | None = None, floor: float = 0.0,
              ids: Int64[Tensor, " V"] | None = None) -> None: ...  # fmt: skip
    def tree(self) -> DraftTree: ...


@dataclass(frozen=True)
class Place:
    """Where a draw may land, if a row has room for it."""

    column: int
    parent: int
    """Column above, 0 for the root."""
    letter: str
    number: int
    """In the whole shape."""
    room: tuple[bool, ...]
    """Which rows have it."""
    skip: int = 0
    """For a point: how many likelier tokens are passed over before it."""


def drawable(scores: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """The law of these scores; where they have none, a sure token 0."""
    law = probabilities(scores)
    # What is no law is NaN throughout. Another one is as exact, and to look whether it is needed would be to wait for the device.
    sure = torch.nn.functional.pad(law.new_ones(1), (0, law.shape[-1] - 1))
    return torch.where(law[..., :1].isnan(), sure, law)


class Growth:
    """A tree on its way. Column 0 is the root, and each place that some row has room for is a column of its own.

    Nothing here waits for a device.
    """

    def __init__(self, places: Iterable[list[Place]], pending: Int64[Tensor, " B"], *, merge: bool = False, samplers: int = 1) -> None:
        self._left, self._merge, self._samplers = list(places), merge, samplers
        room = [place.room for level in self._left for place in level]
        self._room = sent(room, pending.device).view(len(room), len(pending))
        self._token, self._parent = [pending], [torch.full_like(pending, ROOT)]
        self._node = [torch.zeros_like(pending)]
        """The node that each place's draw landed on, -1 where nothing was drawn."""
        self._kind: list[int] = []
        self._law: list[int] = []
        self._laws: list[Float[Tensor, "B V"]] = []
        self._from: list[Float[Tensor, "B V"]] = []
        self.height = 0
        """Levels that are grown."""
        self.last = slice(0, 1)
        """The columns of the last level."""

    @property
    def more(self) -> bool:
        """Whether some row has room for another level."""
        return bool(self._left)

    @property
    def tokens(self) -> Int64[Tensor, "B N"]:
        return torch.stack(self._token, 1)

    @property
    def parents(self) -> Int64[Tensor, "B N"]:
        """`PAD` where nothing was drawn."""
        return torch.stack(self._parent, 1)

    def likelihood(self) -> Float[Tensor, "B P"]:
        """How likely each token of the last level was under the law that it was drawn or chosen from."""
        pairs = zip(self._from, self._token[self.last], strict=True)
        return torch.stack([law.gather(1, token[:, None])[:, 0] for law, token in pairs], 1)

    def level(self, laws: Float[Tensor, "B P V"], source: Source, open: Bool[Tensor, "B P"] | None = None,
              other: Float[Tensor, "B P V"] | None = None, floor: float = 0.0,
              ids: Int64[Tensor, " V"] | None = None) -> None:  # fmt: skip
        """Grow the next level. A draw that has no mass left is not made.

        Args:
            laws: for each column of the last level, what follows its node; the very weights that are drawn from, and declared. Of columns
                without a node they mean nothing. Where points alone are drawn any ranking serves.
            open: below which columns something may be drawn, from what is known of them and of what lies above; all if left out.
            other: the same of a second model, for capitals.
            floor: what is no more than this has no probability. Points can be ranked by scores, of which it is -inf.
            ids: the token that each column of the laws stands for, where points alone are drawn; its own number if left out.
        """
        if other is None and self._samplers > 1:
            raise ValueError("other: capitals draw from a second model, whose laws are missing")
        above, self.last = self.last, slice(len(self._token), len(self._token) + len(self._left[0]))
        if self._merge:  # the node of a place may stand in an elder's column
            at = (torch.stack(self._node[above], 1) - above.start).clamp_min(0)
            across = at[..., None].expand(-1, -1, laws.shape[2])
            laws, other = laws.gather(1, across), None if other is None else other.gather(1, across)
            open = None if open is None else open.gather(1, at)
        self._from = []
        for parent, family in groupby(self._left.pop(0), key=lambda place: place.parent):
            places, at = list(family), parent - above.start
            wanted = self._node[parent] >= 0 if open is None else (self._node[parent] >= 0) & open[:, at]
            samplers = [
                self._below(x[:, at], [p for p in places if p.letter.isupper() == capital], floor)
                for capital, x in enumerate((laws, other)) if x is not None
            ]  # fmt: skip
            for place in places:
                self._add(place, samplers[place.letter.isupper()], wanted & self._room[place.column - 1], source, ids)
        self.height += 1

    def tree(self) -> DraftTree:
        """What was drawn. A place where nothing was is padding."""
        if not self.height:
            return root_only(self._token[0])
        node = torch.stack(self._node[1:], 1)
        kind, law = (sent(part, node.device, torch.int64).expand_as(node) for part in (self._kind, self._law))
        draws = Draws(node, kind, law, frozenset(map(Kind, self._kind)))
        laws = torch.stack(self._laws, 1) if self._laws else None
        return DraftTree(self.tokens, self.parents, draws, laws, self.height)

    def _below(self, law: Float[Tensor, "B V"], places: Sequence[Place], floor: float) -> _Sampler:
        """Choose the points of a node's places, and see what they leave."""
        best, left = [], law
        for place in (p for p in places if p.letter in "pP"):
            for _ in range(place.skip):
                left = left.scatter(1, left.argmax(-1, keepdim=True), floor)
            mass, token = left.max(-1)  # of equals the lowest
            best.append((token, mass > floor))
            # A point without room leaves its token to the rest.
            left = left.scatter(1, token[:, None], torch.where(self._room[place.column - 1], floor, mass)[:, None])
        if any(p.letter in "rR" for p in places):
            mass = left.sum(-1, keepdim=True)
            left = left / torch.where(mass > 0, mass, 1)
        return _Sampler(best, {"p": law, "i": law, "w": law, "r": left}, {})

    def _add(self, place: Place, sampler: _Sampler, wanted: Bool[Tensor, " B"], source: Source,
             ids: Int64[Tensor, " V"] | None) -> None:  # fmt: skip
        letter, column = place.letter.lower(), len(self._token)
        weights = sampler.weights[letter]
        if letter == "p":
            token, some = sampler.best.pop(0)
            wanted = wanted & some
            token = torch.where(wanted, token if ids is None else ids[token], 0)
        else:
            # With less than this, which can't be divided by, nothing is left.
            wanted = wanted & (weights.sum(-1) >= torch.finfo(weights.dtype).tiny)
            token = source.categorical(weights, Purpose.DRAFT, place.number, wanted)
        if letter == "w":  # a row that did not draw has no room for a younger one either
            sampler.weights["w"] = weights.scatter(1, token[:, None], 0.0)
        below = self._node[place.parent]
        node = torch.where(wanted, column, -1)
        if self._merge and column > self.last.start:
            here, elders = slice(self.last.start, column), torch.arange(self.last.start, column, device=token.device)
            node_of, parent_of, token_of = (torch.stack(part[here], 1) for part in (self._node, self._parent, self._token))
            same = (node_of == elders) & (parent_of == below[:, None]) & (token_of == token[:, None])
            # At most one elder has a node with this token of its own.
            node = torch.where(wanted & same.any(-1), (same * elders).sum(-1), node)
        self._token.append(token)
        self._parent.append(torch.where(node == column, below, PAD))
        self._node.append(node)
        self._kind.append(KINDS[letter])
        self._law.append(-1 if letter == "p" else self._declared(sampler, "r" if letter == "r" else "i"))
        self._from.append(sampler.weights["r" if letter == "r" else "i"])

    def _declared(self, sampler: _Sampler, letter: str) -> int:
        """The number of a law; siblings without replacement know each other by it."""
        if letter not in sampler.numbers:
            sampler.numbers[letter] = len(self._laws)
            self._laws.append(sampler.weights[letter])
        return sampler.numbers[letter]


@dataclass
class _Sampler:
    """What one model says below one node."""

    best: list[tuple[Int64[Tensor, " B"], Bool[Tensor, " B"]]]
    """The points that are not placed yet, and whether they have mass."""
    weights: dict[str, Float[Tensor, "B V"]]
    """What the next child of each letter is taken from."""
    numbers: dict[str, int]
    """Which of the declared laws it is."""
