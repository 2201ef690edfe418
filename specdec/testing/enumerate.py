"""Randomness that walks every branch: the exact law of any vectorised code that draws through a `Source`.

Each row of a batch follows a script of choices. Where the script ends the row takes the first option and queues the others as new
scripts, so running wave after wave of scripts as batches visits every trajectory once, with its probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import eq
from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from ..rng import Purpose, Rng, Source
from ..types import Bool, Float, Int64
from .purity import generators_at_rest, other_seed
from .races import second_race
from .tolerances import DUST, TOTAL

__all__ = ["AddressReuse", "Branch", "EnumeratingRng", "EnumeratingSource", "Irreproducible", "branches"]

Script = tuple[int, ...]


class AddressReuse(AssertionError):
    """A trajectory asked for the same noise twice: two decisions that should be independent are not."""


class Irreproducible(AssertionError):
    """The same choices gave another result: something was drawn past the source, or is remembered from an earlier run."""


Address = tuple[tuple[int, ...], int, Purpose, int]
"""Parts, absolute position, purpose, number."""


@no_type_check  # called some 100,000 times in a test, where annotations are executed
@dataclass
class _Walk:
    """One row's way through its choices."""

    row: int
    script: Script
    shared: frozenset[Purpose]
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    queued: list[Script] = field(default_factory=list)
    noise: dict[Address, tuple[float, float]] = field(default_factory=dict)
    """The addresses read so far and, where they are shared, what is known of their uniform variable."""
    races: dict[Address, tuple[list[float], int]] = field(default_factory=dict)
    """The same for shared noise of `Purpose.TARGET`: the weights of the race that was run, and who won it. Between two tokens a race is
    decided by the ratio of two clocks, which is one variable again."""

    def choose(self, at: Address, weights: Sequence[float]) -> int:
        """One of the options that have weight: the script's, or the first if the script has ended."""
        total = math.fsum(weights)
        if not 0 < total < math.inf or min(weights) < 0:
            raise ValueError(f"{_name(self.row, at)}: weights must be finite, not negative and not all 0, got {list(weights)}")
        shares = {option: weight / total for option, weight in enumerate(weights) if weight > DUST * total}
        if at in self.races:
            race = enumerate(second_race(*self.races[at], weights))
            shares = {option: share for option, share in race if share > DUST}
        elif at[2] in self.shared:
            shares = self._known(at, shares)
        elif at in self.noise:
            raise AddressReuse(
                f"{_name(self.row, at)} was drawn before in this trajectory; give every draw its own number, and use Purpose.TARGET only "
                "for the token that is emitted at that position"
            )
        place = len(self.taken)
        if place < len(self.script):
            option = self.script[place]
            if option not in shares:
                raise Irreproducible(f"{_name(self.row, at)}: option {option} was open to the same choices before and is not now")
        else:
            option, *others = shares
            self.queued += [(*self.taken, other) for other in others]
        self.taken.append(option)
        self.probability *= shares[option]
        if at[2] in self.shared and at[2] == Purpose.TARGET and len(weights) > 2:
            if at in self.noise:
                raise ValueError(f"{_name(self.row, at)}: a third race under one noise has no law that is known here")
            if at in self.races:
                self.noise[at] = _UNIT
            self.races[at] = list(weights), option
        elif at[2] in self.shared:
            self._learn(at, weights, total, option)
        else:
            self.noise[at] = _UNIT
        return option

    def _known(self, at: Address, shares: dict[int, float]) -> dict[int, float]:
        """The options' shares of what the uniform variable of this address may still be, cut as the inverse distribution function does."""
        low, high = self.noise.get(at, _UNIT)
        edges = list(accumulate(shares.values(), initial=0.0))
        parts = {o: (min(b, high) - max(a, low)) / (high - low) for o, a, b in zip(shares, edges, edges[1:], strict=False)}
        return {option: part for option, part in parts.items() if part > DUST}

    def _learn(self, at: Address, weights: Sequence[float], total: float, option: int) -> None:
        low, high = self.noise.get(at, _UNIT)
        start = math.fsum(weights[:option]) / total
        self.noise[at] = max(low, start), min(high, start + weights[option] / total)


_UNIT = 0.0, 1.0


def _name(row: int, at: Address) -> str:
    parts, position, purpose, number = at
    where = f"row {row}, position {position}, purpose {purpose.name}, number {number}"
    return f"{where}, part {parts}" if parts else where


class EnumeratingRng(Rng):
    """Every row of the call follows its own script.

    Args:
        scripts: the choices of each row, as `branches` collects them.
        roots: what each row starts from, for the code under test to read.
        shared: purposes whose noise may be read more than once; the address then keeps its value, as it does in `CounterRng`.
            Meant for a drafter that shares the noise of `Purpose.TARGET`, and for measuring what a reuse would do.
    """

    def __init__(self, scripts: Sequence[Script], roots: Sequence[Any] | None = None, *, shared: frozenset[Purpose] = frozenset()) -> None:
        self.roots: list[Any] = list(roots) if roots is not None else [None] * len(scripts)
        self.walks = [_Walk(row, script, shared) for row, script in enumerate(scripts)]

    def round(self, rows: Sequence[int], positions: Sequence[int], device: torch.device) -> EnumeratingSource:
        return EnumeratingSource([self.walks[row] for row in rows], positions, device)


class EnumeratingSource(Source):
    """The randomness of one round of an `EnumeratingRng`."""

    def __init__(self, walks: Sequence[_Walk], positions: Sequence[int], device: torch.device, parts: tuple[int, ...] = ()) -> None:
        self._walks, self._positions, self._device, self._parts = walks, list(positions), device, parts

    @no_type_check
    def _choose(self, row: int, purpose: Purpose, number: int, weights: Sequence[float]) -> int:
        position = self._positions[row]
        if purpose == Purpose.TARGET:
            return self._walks[row].choose(((), position + number, purpose, 0), weights)
        return self._walks[row].choose((self._parts, position, purpose, number), weights)

    def accept(self, num: Float[Tensor, " B"], den: Float[Tensor, " B"], number: int,
               active: Bool[Tensor, " B"] | None = None) -> Bool[Tensor, " B"]:  # fmt: skip
        passed = []
        for row, (n, d, on) in enumerate(zip(num.tolist(), den.tolist(), self._active(active), strict=True)):
            if math.isnan(n) or math.isnan(d):
                raise ValueError(f"row {row}, number {number}: a coin of probability {n} / {d}")
            chance = 0.0 if n <= 0 else 1.0 if n >= d else n / d
            passed.append(on and self._choose(row, Purpose.ACCEPT, number, (chance, 1 - chance)) == 0)
        return torch.tensor(passed, device=self._device)

    def categorical(self, weights: Float[Tensor, "B V"], purpose: Purpose, number: int,
                    active: Bool[Tensor, " B"] | None = None) -> Int64[Tensor, " B"]:  # fmt: skip
        rows = zip(weights.double().tolist(), self._active(active), strict=True)
        drawn = [self._choose(row, purpose, number, w) if on else 0 for row, (w, on) in enumerate(rows)]
        return torch.tensor(drawn, dtype=torch.int64, device=self._device)

    def part(self, index: int) -> EnumeratingSource:
        return EnumeratingSource(self._walks, self._positions, self._device, (*self._parts, index))

    def _active(self, active: Bool[Tensor, " B"] | None) -> list[bool]:
        return [True] * len(self._walks) if active is None else active.tolist()


class Branch(NamedTuple):
    """One trajectory."""

    probability: float
    result: Any
    root: Any
    """What the trajectory started from."""


def branches(run: Callable[[EnumeratingRng], Sequence[Any]], roots: Sequence[Hashable] = (None,), *,
             shared: frozenset[Purpose] = frozenset(), wave: int = 2048, limit: int = 200_000,
             same: Callable[[Any, Any], bool] = eq) -> list[Branch]:  # fmt: skip
    """Every trajectory of `run` with its probability, which is that of its root times one.

    Args:
        run: gives one result per row, drawing through the rng alone; row b starts from `rng.roots[b]`.
        roots: distinct starting points, whose trajectories are walked side by side as rows of the same batches.
        wave: rows of one batch at most.
        limit: give up beyond so many trajectories.
        same: whether two results are equal, for the replay of a sample of trajectories.

    Raises:
        AddressReuse: an address was drawn from twice.
        Irreproducible: a replay went another way, or a global generator moved.
        AssertionError: the probabilities of a root's trajectories do not sum to one.
    """
    queue: list[tuple[Any, Script]] = [(root, ()) for root in roots]
    found: list[tuple[Branch, Script]] = []
    with generators_at_rest(Irreproducible):
        while queue:
            queue, batch = queue[:-wave], queue[-wave:]
            for (root, _), walk, result in zip(batch, *_run(run, batch, shared), strict=True):
                found.append((Branch(walk.probability, result, root), tuple(walk.taken)))
                queue += [(root, script) for script in walk.queued]
            if len(found) + len(queue) > limit:
                raise ValueError(f"more than {limit} trajectories; use a smaller vocabulary or budget")
    with other_seed():
        _replay(run, found, shared, same, wave)
    for root in roots:
        total = math.fsum(branch.probability for branch, _ in found if branch.root == root)
        if abs(total - 1) > TOTAL:
            raise AssertionError(f"the trajectories from {root!r} have probability {total!r} in all: an option was lost or counted twice")
    return [branch for branch, _ in found]


def _run(run: Callable, batch: Sequence[tuple[Any, Script]], shared: frozenset[Purpose]) -> tuple[list[_Walk], Sequence[Any]]:
    rng = EnumeratingRng([script for _, script in batch], [root for root, _ in batch], shared=shared)
    results = run(rng)
    for walk in rng.walks:
        if len(walk.taken) < len(walk.script):
            counts = len(walk.taken), len(walk.script)
            raise Irreproducible(f"row {walk.row}: the same choices led to {counts[0]} draws, before it were {counts[1]} or more")
    return rng.walks, results


def _replay(run: Callable, found: Sequence[tuple[Branch, Script]], shared: frozenset[Purpose], same: Callable[[Any, Any], bool],
            wave: int) -> None:  # fmt: skip
    """Walk a sample again, in another order and so among other batch mates."""
    sample = found[:: -max(1, len(found) // 16)][:wave]
    for (branch, script), walk, result in zip(sample, *_run(run, [(b.root, script) for b, script in sample], shared), strict=True):
        if not same(result, branch.result) or tuple(walk.taken) != script:
            raise Irreproducible(f"the choices {script} gave {branch.result!r} before and {result!r} in a replay among other rows")
