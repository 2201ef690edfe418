"""The smallest example on which a rule leaves the target's law, in fractions, for a person to check by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import torch

from ..base import Acceptor
from ..loop import treats
from ..models.table import TableModel
from .drafters import TableDrafter
from .laws import Law, Tokens, one_round
from .purity import RAISED, WatchedAcceptor
from .tables import TableVerifier
from .tolerances import ROUND_LAW

__all__ = ["Counterexample", "Example", "examples", "minimal"]

Fractions = tuple[Fraction, ...]

_KINDS = {"p": "point", "i": "iid", "w": "without replacement"}
_SMALL: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("chain 1", 2, ("x",)), ("chain 1", 3, ("x",)), ("chain 2", 2, ("x", "x")), ("siblings 2", 2, ("xx",)), ("siblings 2", 3, ("xx",)),
    ("chain 2", 3, ("x", "x")),
)  # fmt: skip
_LARGE: tuple[tuple[str, int, tuple[str, ...], int], ...] = (
    ("siblings 2", 4, ("xx",), 36), ("chain 3", 2, ("x", "x", "x"), 49), ("chain 3", 3, ("x", "x", "x"), 8),
    ("tree (2,2)", 2, ("xx", "xx"), 8), ("tree (2,2)", 3, ("xx", "xx"), 4),
)  # fmt: skip
"""With how many pairs of laws: branches multiply."""


def _laws(*weights: Sequence[int]) -> tuple[Fractions, ...]:
    return tuple(tuple(Fraction(w, sum(law)) for w in law) for law in weights)


LAWS: dict[int, tuple[Fractions, ...]] = {
    2: _laws((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 0), (0, 1)),
    3: _laws((1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 3, 2), (4, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 0)),
    4: _laws((1, 1, 1, 1), (3, 3, 1, 1), (1, 1, 3, 3), (4, 2, 1, 1), (1, 1, 0, 0), (0, 0, 1, 1)),
}
"""Laws with small denominators, by vocabulary."""


@dataclass(frozen=True)
class Example:
    """One shape over every pair of the laws, all of them rows of one batch."""

    drafter: TableDrafter
    verifier: TableVerifier
    pairs: dict[Tokens, tuple[Fractions, Fractions, Fractions]]
    """After each prompt: the target's law, its law below the first token of the round, and the draft's."""

    def target(self, prompt: Tokens, continuations: Sequence[Tokens], greedy: bool) -> list[list[float]]:
        first, below, _ = self.pairs[prompt]
        laws = [list(map(float, below if text else first)) for text in continuations]
        return [[float(x == law.index(max(law))) for x in range(len(law))] for law in laws] if greedy else laws


def examples(vocab_size: int, levels: Sequence[str], *, turned: bool = False, limit: int | None = None) -> Example:
    """Every pair of `LAWS` on one shape.

    A prompt is a 1 and the number of its pair; the window of the tables is long enough to see it from every node.

    Args:
        levels: of a `TableDrafter`.
        turned: below the first token the target's law is read backwards, so that it depends on where it is asked for.
        limit: the first so many pairs.
    """
    laws, depth = LAWS[vocab_size], len(levels)
    pairs = sorted(product(range(len(laws)), repeat=2), key=lambda pair: (sum(pair), pair))[:limit]
    digits = next(n for n in range(1, 9) if vocab_size**n >= len(pairs))
    numbers = dict(zip(product(range(vocab_size), repeat=digits), pairs, strict=False))
    told = {(1, *number): (laws[p], laws[p][::-1] if turned else laws[p], laws[q]) for number, (p, q) in numbers.items()}
    order = 1 + digits + depth
    tables = torch.full((2, *(vocab_size,) * order, vocab_size), 1 / vocab_size, dtype=torch.float64)
    for prompt, (first, below, draft) in told.items():
        for d in range(depth + 1):
            for text in product(range(vocab_size), repeat=d):
                window = (*[0] * (depth - d), *prompt, *text)
                tables[(0, *window)] = torch.tensor([float(x) for x in (below if d else first)], dtype=torch.float64)
                tables[(1, *window)] = torch.tensor([float(x) for x in draft], dtype=torch.float64)
    target, draft_model = map(TableModel, tables)
    return Example(TableDrafter(draft_model, levels), TableVerifier(target), told)


@dataclass(frozen=True)
class Counterexample:
    """What a rule does to one pair of laws."""

    acceptor: str
    shape: str
    proposal: str
    """How the tokens are drawn."""
    target: Fractions
    below: Fractions
    """The target's law after the first token of the round; the same, if it depends on nothing."""
    draft: Fractions
    error: str | None = None
    """What the rule raised, instead of what follows."""
    prefix: Tokens = ()
    token: int | None = None
    going: Fraction | None = None
    """How likely a round's text begins with `prefix` and goes on."""
    given: Fraction | None = None
    """How likely `token` is next, given that."""
    wanted: Fraction | None = None
    """What the target says of `token` after `prefix`."""
    law: tuple[tuple[Tokens, Fraction], ...] = ()
    """How likely each text of the round is."""

    def __str__(self) -> str:
        further = "" if self.below == self.target else f" for the first token of the round, then {_told(self.below)}"
        chosen = "the most likely of " if self.proposal == "point" else ""
        laws = f"{self.acceptor} on {self.shape}, {self.proposal}: target {_told(self.target)}{further}; draft {chosen}{_told(self.draft)}"
        if self.error is not None:
            return f"{laws}\n  it raises {self.error}"
        texts = ", ".join(f"{' '.join(map(str, text))}: {chance}" for text, chance in self.law)
        begun = f"begins with {' '.join(map(str, self.prefix))} and goes on with probability {self.going}; the next token is then"
        first = begun if self.prefix else "begins with"
        return (
            f"{laws}\n  a round emits {texts}\n  its text {first} {self.token} with probability {self.given}; the target says {self.wanted}"
        )

    def as_json(self) -> dict[str, Any]:
        """Fractions as strings, texts as lists of ids."""
        said = {name: None if getattr(self, name) is None else str(getattr(self, name)) for name in ("going", "given", "wanted")}
        laws = {name: [str(x) for x in getattr(self, name)] for name in ("target", "below", "draft")}
        plain = {name: getattr(self, name) for name in ("shape", "proposal", "error", "token")}
        return plain | laws | {"prefix": list(self.prefix)} | said | {"law": [[list(t), str(p)] for t, p in self.law], "told": str(self)}


def minimal(acceptor: Acceptor, tolerance: float = ROUND_LAW) -> Counterexample | None:
    """The first defect of one round, from small shapes and simple laws to larger ones; `None` if none of them shows one.

    Args:
        acceptor: held to the target's law, or to its argmax if it is a greedy rule, whether or not it claims to be lossless.
        tolerance: of the defect.
    """
    for shape, vocab_size, levels, turned, limit in _searched():
        for letter, kind in _KINDS.items():
            example = examples(vocab_size, [level.replace("x", letter) for level in levels], turned=turned, limit=limit)
            if not treats(acceptor, example.drafter):
                continue
            found = _first(acceptor, example, tolerance)
            if found is not None:
                prompt, what = found
                return Counterexample(type(acceptor).__name__, shape, kind, *example.pairs[prompt], **what)
    return None


def _searched() -> Iterator[tuple[str, int, tuple[str, ...], bool, int | None]]:
    for turned in (False, True):
        yield from ((*small, turned, None) for small in _SMALL)
    yield from ((shape, vocab_size, levels, False, limit) for shape, vocab_size, levels, limit in _LARGE)


def _first(acceptor: Acceptor, example: Example, tolerance: float) -> tuple[Tokens, dict[str, Any]] | None:
    """The first prompt that shows a defect, and what it is."""
    prompts = list(example.pairs)
    plan = 9, len(example.drafter.levels), 9

    def laws(some: Sequence[Tokens]) -> dict[Tokens, Law]:
        return one_round(example.drafter, example.verifier, WatchedAcceptor(acceptor), some, plan)

    try:
        found = laws(prompts)
    except RAISED:  # one after the other tells for which laws
        found = {}
        for prompt in prompts:
            try:
                found |= laws([prompt])
            except RAISED as error:
                return prompt, {"error": f"{type(error).__name__}: {error}"}
    for prompt, law in found.items():
        for s, token, going, given, wanted in _defects(law, example, prompt, acceptor.greedy):
            if abs(given - wanted) > tolerance:
                texts = tuple((text, _exact(p)) for text, p in sorted(law.items()) if p > 0)
                return prompt, {
                    "prefix": s, "token": token, "going": _exact(going), "given": _exact(given), "wanted": _exact(wanted), "law": texts,
                }  # fmt: skip
    return None


def _defects(law: Law, example: Example, prompt: Tokens, greedy: bool) -> Iterator[tuple[Tokens, int, float, float, float]]:
    """For each beginning, shortest first: the token whose probability is furthest off, how likely it goes on, and both probabilities."""
    begun = sorted({text[:n] for text in law for n in range(len(text))}, key=lambda s: (len(s), s))
    for s, after in zip(begun, example.target(prompt, begun, greedy), strict=True):
        ways = [(text[len(s)], p) for text, p in law.items() if len(text) > len(s) and text[: len(s)] == s]
        going = math.fsum(p for _, p in ways)
        given = [math.fsum(p for y, p in ways if y == x) / going for x in range(len(after))]
        token = max(range(len(after)), key=lambda x: abs(given[x] - after[x]))
        yield s, token, going, given[token], after[token]


def _exact(p: float) -> Fraction:
    """Fractions of such small denominators lie further apart than a float64 is off."""
    return Fraction(p).limit_denominator(10**8)


def _told(law: Fractions) -> str:
    return f"({', '.join(map(str, law))})"
