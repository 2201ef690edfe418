"""The law of a round from every state that a drafter can be in, not only from every text.

A drafter may remember more than the text: what it drafted, what was rejected. If its next draws follow another law than they declare for
some of these stories and the contrary one for others, the law given the text alone is right, and the rule is not: what the user sees of a
story (how fast it went, where it stopped) then tells of the tokens to come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base import Acceptor, Drafter, Verifier
from ..loop import decode
from ..planning import FixedPlanner
from .enumerate import EnumeratingRng, branches
from .laws import Law, Plan, Tokens, endless, hazard_defect, target_law
from .truth import drawn

__all__ = ["State", "reachable", "worst_state"]

_DIGITS = 4
"""Laws in a story are told to so many places: the same state, reached in another batch, may differ in the last place of a float."""

Told = tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class State:
    """What can be known after the first round."""

    prompt: Tokens
    draws: Told
    """Of each draw: what it was made below, its kind, its declared law, and the token."""
    emitted: Tokens
    probability: float
    law: Law
    """Of the second round's text, given all that."""

    @property
    def text(self) -> Tokens:
        return (*self.prompt, *self.emitted)

    def __str__(self) -> str:
        drafted = [draw[-1] for draw in self.draws]
        return f"context {self.prompt}, where the first round drafted {drafted} and emitted {self.emitted}"


def reachable(drafter: Drafter, verifier: Verifier, acceptor: Acceptor, prompts: Sequence[Tokens], plan: Plan) -> list[State]:
    """Every state after one round of the real loop, with the exact law of the round that follows."""
    vocab_size = verifier.facts.vocab_size

    def run(rng: EnumeratingRng) -> list[tuple[Told, Tokens, Tokens]]:
        calls = decode(
            verifier, [torch.tensor(prompt) for prompt in rng.roots], endless(rng.roots, acceptor.greedy, 3 * (plan[1] + 1)),
            drafter=drafter, acceptor=acceptor, planner=FixedPlanner(*plan), rng=rng, keep_all=True,
        )  # fmt: skip
        first, second = next(calls), next(calls)
        told = [
            tuple((d.above, d.kind, tuple(round(p, _DIGITS) for p in d.law), d.token) for d in row) for row in drawn(first.tree, vocab_size)
        ]
        return list(zip(told, first.emitted, second.emitted, strict=True))

    found: dict[tuple[Tokens, Told, Tokens], dict[Tokens, list[float]]] = {}
    for branch in branches(run, prompts):
        draws, emitted, then = branch.result
        found.setdefault((branch.root, draws, emitted), {}).setdefault(then, []).append(branch.probability)
    states = []
    for (prompt, draws, emitted), texts in found.items():
        law = {text: math.fsum(p) for text, p in texts.items()}
        total = math.fsum(law.values())
        states.append(State(prompt, draws, emitted, total, {text: p / total for text, p in law.items()}))
    return states


def worst_state(states: Sequence[State], verifier: Verifier, *, greedy: bool = False) -> tuple[float, State]:
    """The largest hazard defect of the second round over all states, and where it is."""
    texts = {state.text for state in states}
    targets = {text: target_law(verifier, text, greedy=greedy) for text in texts}
    return max(((hazard_defect(state.law, targets[state.text]), state) for state in states), key=lambda found: found[0])
