"""Weaker tests, with what each would have let through: why the battery is as large as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from ..base import Acceptor, Drafter, Verifier
from ..loop import treats
from .counterexample import examples
from .drafters import TableDrafter
from .laws import Law, TargetLaw, Tokens, autoregressive, extended, hazard_defect, one_round, tabulated, total_variation
from .mutant_acceptors import mutant_acceptors
from .purity import RAISED
from .tables import TableVerifier, law_pairs
from .tolerances import ROUND_LAW

__all__ = ["WEAKER", "adequacy", "weaker_tests"]


@dataclass(frozen=True)
class _World:
    """One shape, below prompts with several kinds of laws."""

    drafter: Drafter
    verifier: Verifier
    prompts: tuple[Tokens, ...]
    names: tuple[str, ...]
    depth: int


@dataclass(frozen=True)
class _Seen:
    """What a rule made of one world: each prompt with its kind of laws, the law of a round, and the target."""

    world: _World
    found: tuple[tuple[str, Law, TargetLaw], ...]


@cache
def _world(vocab_size: int, levels: Sequence[str]) -> _World:
    pairs = law_pairs(vocab_size, len(levels))
    return _World(TableDrafter(pairs.draft, levels), TableVerifier(pairs.target), pairs.prompts, pairs.names, len(levels))


@cache
def _two_tokens(levels: Sequence[str]) -> _World:
    example = examples(2, levels, turned=True)
    return _World(example.drafter, example.verifier, tuple(example.pairs), ("simple",) * len(example.pairs), len(levels))


_CHAIN, _TREES = [(3, ("i", "i", "i"))], [(4, ("ii",)), (4, ("ww",)), (3, ("i", "ww")), (3, ("rp", "rp"))]


def _chains() -> list[_World]:
    return [_world(*where) for where in _CHAIN]


def _all() -> list[_World]:
    return [_world(*where) for where in (*_CHAIN, *_TREES)]


# ---------------------------------------------------------------------------------------------- how far off, seen through each test


def _hazard(only: str | None = None) -> Callable[[_Seen], float]:
    """The worst defect of a round over the pairs of laws, or over those of one kind."""
    return lambda seen: max((hazard_defect(law, target) for name, law, target in seen.found if only in (None, name)), default=0.0)


def _first_token(seen: _Seen) -> float:
    def off(law: Law, target: TargetLaw) -> float:
        wanted = target([()])[0].tolist()
        return max(abs(math.fsum(p for text, p in law.items() if text[0] == x) - w) for x, w in enumerate(wanted))

    return max(off(law, target) for _, law, target in seen.found)


def _without_bonus(seen: _Seen) -> float:
    n = seen.world.depth
    return max(total_variation(extended(law, target, n), autoregressive(target, n)) for _, law, target in seen.found)


_TOKENS, _EXCESS = 10_000, 20


def _frequencies(seen: _Seen) -> float:
    """A chi-square test of how often each id comes in 10,000 tokens of such texts: counted as blind where the statistic's mean lies
    less than 20 above that of an honest rule (a level of 1e-6 asks for some 30). The contexts are not told apart, so faults cancel."""
    n = seen.world.depth + 1

    def shares(laws: Iterator[Law]) -> list[float]:
        texts = [(text, p) for law in laws for text, p in law.items()]
        total = n * len(seen.found)
        return [math.fsum(p * text.count(x) for text, p in texts) / total for x in range(seen.world.verifier.facts.vocab_size)]

    given = shares(extended(law, target, n) for _, law, target in seen.found)
    wanted = shares(autoregressive(target, n) for _, law, target in seen.found)
    return _TOKENS * math.fsum((g - w) ** 2 / w for g, w in zip(given, wanted, strict=True)) / _EXCESS * ROUND_LAW


@dataclass(frozen=True)
class Weaker:
    """A test that somebody might think is enough.

    Args:
        worlds: what it looks at.
        defect: what it sees there; above the tolerance it rejects.
    """

    worlds: Callable[[], list[_World]]
    defect: Callable[[_Seen], float]

    def passes(self, seen: Callable[[_World], _Seen | None], acceptor: Acceptor) -> bool:
        """Whether it lets the acceptor through; what raises is not let through."""
        for world in self.worlds():
            if not treats(acceptor, world.drafter):
                continue
            got = seen(world)
            if got is None or self.defect(got) > ROUND_LAW:
                return False
        return True


WEAKER: dict[str, Weaker] = {
    "a vocabulary of 2": Weaker(
        lambda: [_two_tokens(levels) for levels in (("i", "i"), ("p", "p"), ("ii",), ("ww",), ("i", "ii"))], _hazard()
    ),
    "one drafted token": Weaker(lambda: [_world(4, (letter,)) for letter in "piw"], _hazard()),
    "chains only": Weaker(_chains, _hazard()),
    "one round only": Weaker(_all, _hazard()),
    "the first token only": Weaker(_all, _first_token),
    "no bonus": Weaker(_all, _without_bonus),
    "one-hot target only": Weaker(_all, _hazard("one-hot target")),
    "draft equal to target": Weaker(_all, _hazard("equal")),
    "frequency of each id": Weaker(_all, _frequencies),
}
"""Each is exact, and sees everything that its kind of test can see."""


def weaker_tests(acceptor: Acceptor) -> dict[str, bool]:
    """Whether each of the weaker tests would let this acceptor through."""
    found: dict[int, _Seen | None] = {}

    def seen(world: _World) -> _Seen | None:
        if id(world) not in found:
            found[id(world)] = _look(acceptor, world)
        return found[id(world)]

    return {name: test.passes(seen, acceptor) for name, test in WEAKER.items()}


def _look(acceptor: Acceptor, world: _World) -> _Seen | None:
    try:
        laws = one_round(world.drafter, world.verifier, acceptor, world.prompts, (16, world.depth, 9))
    except RAISED:  # a test that runs into it does not pass
        return None
    targets = tabulated(world.verifier, world.prompts, world.depth, greedy=acceptor.greedy)
    return _Seen(world, tuple((name, laws[p], targets[p]) for name, p in zip(world.names, world.prompts, strict=True)))


def adequacy() -> dict[str, dict[str, bool]]:
    """For every faulty acceptor: which of the weaker tests would have let it through."""
    return {name: weaker_tests(cast(Acceptor, mutant.part)) for name, mutant in mutant_acceptors().items()}
