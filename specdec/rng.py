"""Randomness with an address.

A drafter or acceptor never calls a random number generator; it asks a `Source`. Every draw has the address (row seed, position of
the round's pending token, purpose, number in the round). A round commits at least one token, so no address recurs, and a row's
draws depend neither on its batch mates nor on the order of calls. Tests swap in a source that walks every branch instead.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum
from operator import index
from typing import Any, no_type_check

import torch
from torch import Tensor

from .types import Bool, Float, Int64, sent

__all__ = ["CounterRng", "Purpose", "Rng", "Source", "derive_seeds", "uniform"]


class Purpose(IntEnum):
    """Separate streams: what the draft was drawn with never decides whether it is accepted (`number` counts within a stream)."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2
    """The correction or bonus; a rule that draws the target's tokens one by one draws each of them here."""
    TARGET = 3
    """Noise tied to an absolute position, `number` tokens after the pending one, the same in every `part`. Only for rules that draw
    the target's own token there: such a draw is consumed once, when the token is emitted. Coins must never use it. A source that decodes
    draws here by a race in which each token has noise of its own, so that laws that are close nearly always give the same token."""


class Source(ABC):
    """The randomness of one round. Rows outside `active` consume nothing and get False or 0."""

    @abstractmethod
    def accept(
        self, num: Float[Tensor, " B"], den: Float[Tensor, " B"], number: int, active: Bool[Tensor, " B"] | None = None
    ) -> Bool[Tensor, " B"]:
        """A coin of probability min(1, num / den), strictly: `num <= 0` never passes, and `num > 0 = den` always does."""

    @abstractmethod
    def categorical(
        self, weights: Float[Tensor, "B V"], purpose: Purpose, number: int, active: Bool[Tensor, " B"] | None = None
    ) -> Int64[Tensor, " B"]:
        """An index drawn in proportion to `weights`, which need not sum to one; weight 0 is never drawn."""

    @abstractmethod
    def part(self, index: int) -> Source:
        """A source whose addresses meet none of this one's: one for each of several drafters that draw in the same round."""


class Rng(ABC):
    """The randomness of one call: hands out the source of each round."""

    @abstractmethod
    def round(self, rows: Sequence[int], positions: Sequence[int], device: torch.device) -> Source:
        """The source for a round of these rows of the call, whose pending tokens stand at these absolute positions."""


# -------------------------------------------------------------------------------------- counter-based: what decoding uses

_GOLDEN, _MIX1, _MIX2 = (c - (1 << 64) if c >> 63 else c for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


# Not checked where annotations are executed: a draw calls them a dozen times.


@no_type_check
def _shift(x: Int64[Tensor, "*n"], bits: int) -> Int64[Tensor, "*n"]:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 with its sign


@no_type_check
def _mix(x: Int64[Tensor, "*n"]) -> Int64[Tensor, "*n"]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) on wrapping int64, the same on every device."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


@no_type_check
def _fold(key: Int64[Tensor, "*n"], value: Int64[Tensor, "*n"] | int) -> Int64[Tensor, "*n"]:
    return _mix(key + (_wrap((value + 1) * _GOLDEN) if isinstance(value, int) else (value + 1) * _GOLDEN))


@no_type_check
def uniform(key: Int64[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """53 bits of the key as a float64 in [0, 1)."""
    return _shift(_mix(key), 11).double() * 2.0**-53


@no_type_check
def _race(key: Int64[Tensor, " B"], weights: Float[Tensor, "B V"]) -> Int64[Tensor, " B"]:
    """The first of independent exponential clocks with these rates: drawn in proportion to them. Two laws under one key give different
    tokens with a probability of at most 2 TV / (1 + TV) (Daliri, Musco and Suresh 2024, theorem 1)."""
    noise = -torch.log1p(-uniform(_fold(key[:, None], torch.arange(weights.shape[1], device=key.device))))
    return torch.where(weights > 0, noise / weights, torch.inf).argmin(-1)


def derive_seeds(seed: Any, batch: int) -> list[int]:
    """One seed per row: the given ones, or as many as needed from one integer, or with `None` fresh ones from the system."""
    if seed is None:
        return [secrets.randbits(63) for _ in range(batch)]
    try:
        seed = seed.tolist() if isinstance(seed, Tensor) else seed
        seeds = [index(one) for one in seed] if isinstance(seed, Iterable) else index(seed)
    except TypeError:
        raise TypeError(f"seed: got {seed!r}; give one integer, or one per row") from None
    if isinstance(seeds, int):
        key = torch.tensor([_wrap(seeds)] * batch, device="cpu")
        return _shift(_fold(key, torch.arange(batch, device="cpu")), 1).tolist()
    if len(seeds) != batch:
        raise ValueError(f"seed: {len(seeds)} seeds for a batch of {batch}; give one integer, or one per row")
    return seeds


def _wrap(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


class CounterRng(Rng):
    """Draws that are pure functions of their address.

    Args:
        seeds: one integer per row of the call.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = [_wrap(s) for s in seeds]

    def round(self, rows: Sequence[int], positions: Sequence[int], device: torch.device) -> CounterSource:
        seed = sent([self.seeds[row] for row in rows], device, torch.int64)
        return CounterSource(seed, sent(list(positions), device, torch.int64))


class CounterSource(Source):
    def __init__(self, seed: Int64[Tensor, " B"], position: Int64[Tensor, " B"], parts: tuple[int, ...] = ()) -> None:
        self._seed, self._position, self._parts = seed, position, parts

    def _key(self, purpose: Purpose, number: int) -> Int64[Tensor, " B"]:
        if purpose == Purpose.TARGET:
            address = (self._position + number, int(purpose))
        else:
            address = (self._position, int(purpose), number, *self._parts)
        key = _fold(self._seed, len(address))
        for value in address:
            key = _fold(key, value)
        return key

    def _uniform(self, purpose: Purpose, number: int) -> Float[Tensor, " B"]:
        return uniform(self._key(purpose, number))

    def accept(
        self, num: Float[Tensor, " B"], den: Float[Tensor, " B"], number: int, active: Bool[Tensor, " B"] | None = None
    ) -> Bool[Tensor, " B"]:
        passed = self._uniform(Purpose.ACCEPT, number) * den.double() < num.double()
        return passed if active is None else passed & active

    def categorical(
        self, weights: Float[Tensor, "B V"], purpose: Purpose, number: int, active: Bool[Tensor, " B"] | None = None
    ) -> Int64[Tensor, " B"]:
        if purpose == Purpose.TARGET:
            token = _race(self._key(purpose, number), weights.double())
            return token if active is None else torch.where(active, token, 0)
        # Inverse of the distribution function in float64: with 53 random bits the law realised differs from the one asked for by
        # at most V 2^-53 (1.7e-11 at V = 152k), and that difference can be computed, not only estimated.
        cdf = weights.double().cumsum(-1)
        total = cdf[:, -1:]
        # u < 1 and rounding could still give u * total == total; the last token with mass is then the right answer.
        below = torch.nextafter(total, torch.zeros_like(total))
        at = torch.minimum(self._uniform(purpose, number)[:, None] * total, below)
        token = torch.searchsorted(cdf, at, right=True)[:, 0].clamp_max(weights.shape[-1] - 1)
        return token if active is None else torch.where(active, token, 0)

    def part(self, index: int) -> CounterSource:
        return CounterSource(self._seed, self._position, (*self._parts, index))
