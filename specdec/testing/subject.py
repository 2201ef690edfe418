"""A drafter under check: where it stands, what it drafts, what becomes of a text that is played with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..acceptors import (
    BlockAcceptor,
    CoupledAcceptor,
    GreedyAcceptor,
    KSeqAcceptor,
    MatchAcceptor,
    RejectionAcceptor,
    TraversalAcceptor,
)
from ..base import Acceptor, Drafter, Verifier
from ..loop import decode
from ..models.table import TableModel
from ..planning import FixedPlanner
from ..rng import CounterRng
from ..tree import check
from ..types import Budget, DraftTree, Round
from .laws import Plan, Standing, Tokens, endless, stand
from .purity import DraftNoise
from .tables import TableVerifier
from .tolerances import LAW
from .truth import Drawn, drawn

__all__ = ["LENGTH", "LOSSLESS", "Story", "Subject", "play", "propose", "propose_at", "same_draws", "same_story", "stories", "subject"]

LOSSLESS: tuple[Acceptor, ...] = (
    GreedyAcceptor(), MatchAcceptor(), CoupledAcceptor(), RejectionAcceptor(), BlockAcceptor(), TraversalAcceptor(), KSeqAcceptor(),
)  # fmt: skip
"""The rules under which a drafter's law is computed end to end."""

LENGTH = 6
"""Tokens of a text that is played."""

Story = list[tuple[tuple[Drawn, ...], Tokens]]
"""What became of one row: the draws and the emitted tokens of each of its rounds."""


@dataclass(frozen=True)
class Subject:
    """A drafter and the tiny world that it is checked in."""

    drafter: Drafter
    verifier: Verifier
    acceptors: tuple[Acceptor, ...]
    contexts: tuple[Tokens, ...]
    plans: tuple[Plan, ...]

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self.verifier.facts.vocab_size

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the declared laws; float64 if there are none."""
        laws = propose(self, self.contexts, [0] * len(self.contexts)).laws
        return torch.float64 if laws is None else laws.dtype


def subject(drafter: Drafter, *, vocab_size: int = 4, verifier: Verifier | None = None, acceptors: Sequence[Acceptor] = LOSSLESS,
            contexts: Sequence[Tokens] | None = None, plans: Sequence[Plan] = ((3, 3, 3), (3, 2, 2))) -> Subject:  # fmt: skip
    """See `check_drafter` for the arguments."""
    if verifier is None:
        if drafter.needs:
            layers = drafter.needs.layers
            raise ValueError(f"verifier: {type(drafter).__name__} reads target layers {layers}; pass a verifier that shows them")
        verifier = TableVerifier(TableModel.random(vocab_size, 2, seed=7, zeros=0.2))
    if contexts is None:
        texts = ((1,), (2, 0), (1, 2, 3, 1, 2), (3, 3, 0, 3, 3, 0, 3), (0, 1, 2, 3, 0, 1))
        contexts = [tuple(token % verifier.facts.vocab_size for token in text) for text in texts]
    return Subject(drafter, verifier, tuple(acceptors), tuple(contexts), tuple(plans))


def propose(s: Subject, contexts: Sequence[Tokens], seeds: Sequence[int], budget: Budget | None = None) -> DraftTree:
    """The first draft of fresh rows with these seeds."""
    at = stand(s.drafter, s.verifier, contexts)
    return propose_at(s, at, seeds, Budget.of(*s.plans[0], batch=len(contexts)) if budget is None else budget)


@torch.no_grad()
def propose_at(s: Subject, at: Standing, seeds: Sequence[int], budget: Budget) -> DraftTree:
    """The next draft of rows that stand somewhere, checked for its form."""
    source = CounterRng(seeds).round(range(len(seeds)), at.positions, s.verifier.facts.device)
    tree = s.drafter.propose(at.drafter, at.pending, budget, DraftNoise(source))
    check(tree, at.pending, budget, s.vocab_size, sums=True)
    if not tree.draws.kinds <= s.drafter.draws:
        raise AssertionError(f"draws: declared are {sorted(s.drafter.draws)}, the tree holds {tree.draws.kinds}")
    return tree


def play(s: Subject, contexts: Sequence[Tokens], seeds: Sequence[int], drafter: Drafter | None = None, nodes: int = 3) -> Iterator[Round]:
    """`LENGTH` tokens for each context through the real loop."""
    return decode(
        s.verifier, [torch.tensor(context) for context in contexts], endless(contexts, False, LENGTH), drafter=drafter or s.drafter,
        acceptor=MatchAcceptor(), planner=FixedPlanner(nodes), rng=CounterRng(seeds), keep_all=True,
    )  # fmt: skip


def stories(s: Subject, rounds: Sequence[Round], batch: int) -> list[Story]:
    """The rounds of a call, told row by row."""
    told: list[Story] = [[] for _ in range(batch)]
    for done in rounds:
        for row, draws, tokens in zip(done.rows, drawn(done.tree, s.vocab_size), done.emitted, strict=True):
            told[row].append((draws, tokens))
    return told


def same_draws(s: Subject, a: tuple[Drawn, ...], b: tuple[Drawn, ...]) -> bool:
    """Equal tokens below the same nodes, from laws that are equal but for rounding."""
    slack = LAW[s.dtype]
    return len(a) == len(b) and all(x.fits(y, slack) and x.token == y.token for x, y in zip(a, b, strict=True))


def same_story(s: Subject, got: Story, wanted: Story, what: str) -> None:
    """Raise unless two rows went the same way."""
    for number, ((draws, tokens), (draws_too, tokens_too)) in enumerate(zip(got, wanted, strict=False)):
        if tokens != tokens_too or not same_draws(s, draws, draws_too):
            raise AssertionError(
                f"{what}: in round {number} it drafted {[d.path for d in draws]} and emitted {tokens}, but alone "
                f"{[d.path for d in draws_too]} and {tokens_too}"
            )
    assert len(got) == len(wanted), f"{what}: {len(got)} rounds instead of {len(wanted)}"
