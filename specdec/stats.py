"""What happened, in numbers. Statistics of rounds add up: any grouping of them gives the same total."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from .types import Round

__all__ = ["PHASES", "Stats"]

# By the host's clock. What a CUDA device is given runs behind it and is waited for where its outcome is read, in "accept".
PHASES = ("prefill", "draft", "verify", "accept", "commit", "other")


@dataclass(frozen=True)
class Stats:
    """Counts over rounds and rows. Decoding reads none of them. `emitted == accepted + rounds - truncated`."""

    rounds: int = 0
    """Rounds of single rows: a batch of 3 that does 5 rounds counts 15."""
    steps: int = 0
    """Target passes that scored a tree, over the whole batch."""
    drafted: int = 0
    accepted: int = 0
    """Drafted tokens that were emitted."""
    emitted: int = 0
    prefilled: int = 0
    """Prompt tokens that the target read without scoring them."""
    truncated: int = 0
    """Rounds that ended at a drafted token because the output ended there."""
    attempted_by_depth: tuple[int, ...] = ()
    """Rounds in which a drafted token of this depth (from 1) was up for acceptance."""
    accepted_by_depth: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by phase, see `PHASES`."""
    lossy: int = 0
    """Rounds whose acceptor was no lossless one: of those the counts say how many tokens it took, not how many the target would have."""

    @classmethod
    def of(cls, done: Round) -> Stats:
        """The statistics of one round."""
        drafted = int((done.tree.parents >= 0).sum())
        emitted, accepted = sum(map(len, done.emitted)), sum(done.accepted)
        deepest = max(done.attempted)
        return cls(
            rounds=sum(map(bool, done.emitted)), steps=1, drafted=drafted, accepted=accepted, emitted=emitted, prefilled=done.prefilled,
            truncated=sum(a == len(e) for a, e in zip(done.accepted, done.emitted, strict=True) if e),
            attempted_by_depth=tuple(sum(a > d for a in done.attempted) for d in range(deepest)),
            accepted_by_depth=tuple(sum(a > d for a in done.accepted) for d in range(deepest)), seconds=done.seconds,
            lossy=0 if done.lossless else sum(map(bool, done.emitted)),
        )  # fmt: skip

    def __add__(self, other: Stats) -> Stats:
        def add(name: str) -> Any:
            a, b = getattr(self, name), getattr(other, name)
            if isinstance(a, tuple):
                return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
            if isinstance(a, Mapping):
                return {phase: a.get(phase, 0.0) + b.get(phase, 0.0) for phase in {**a, **b}}
            return a + b

        return Stats(**{f.name: add(f.name) for f in fields(self)})

    @property
    def lossless(self) -> bool:
        """Whether every round's acceptor was."""
        return self.lossy == 0

    @property
    def tokens_per_round(self) -> float:
        """Mean emitted tokens of a row's round, bonus included; 0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were emitted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, the prefill left out."""
        spent = sum(s for phase, s in self.seconds.items() if phase != "prefill")
        return self.emitted / spent if spent else 0.0
