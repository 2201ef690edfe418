"""Is this text drawn from the target's law? A bet against it that may be settled at any time, where no law can be enumerated.

A gambler sees the emitted tokens one by one, and before each the law p that it is claimed to follow (the row of the round's verifying
pass), the law q that the draft was drawn from at that place, and the place in the round. The drafted token itself is not shown: given it,
the emitted one does not follow p. On token y the gambler's capital is multiplied by r(y) / p(y) for a law r of his own. If the claim is
true the capital is a non-negative martingale, whatever the bets, so it reaches 1 / alpha with probability alpha at most, also if one
looks after every token and stops when one likes (Ville 1939; the identity behind `hazard_defect` is why the place may be known).

A bet is written as a tilt f, with r = p f / sum(p f). The capital is spread over fixed tilts, each of them on all places or on one kind of
place, and over a bettor that learns in which bins of p / q too many tokens fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ..tree import draw_law, draw_parents
from ..types import Bool, Float, Int64, Round

__all__ = ["EProcess", "Evidence", "FIRST", "MIDDLE", "BONUS", "begin", "evidence", "look", "pooled", "visible"]

FIRST, MIDDLE, BONUS = range(3)
"""Kinds of place: a round's first token, those behind it, and the one behind the deepest drafted token."""
_PLACES = 3

_POWERS = (0.1, -0.1, 0.3, -0.3)
_TEMPERATURES = (0.8, 0.95, 1.05, 1.25)
_SHARES = (0.05, 0.2)
_BETS = len(_POWERS) + len(_TEMPERATURES) + 2 * len(_SHARES) + 3 + 2
_SURE = 0.9
_FAR = 20.0
"""Logarithms of p / q are cut here, so that a token that the draft rules out does not take all of a bet."""

_RATIO_EDGES = (-1.0, 0.0, 0.25, 0.5, 0.8, 1.2, 2.0)
"""Of log(p / q): finer where p > q, since that is where what a rejection leaves over lies."""
_LAW_EDGES = (-10.0, -7.0, -5.0, -3.5, -2.0, -1.0, -0.3)
"""Of log p, where nothing was drafted."""
_BINS = 8
_STIFF = 30.0
"""Expected tokens in a bin before the learning bettor believes half of what it saw there; till then a round's first token and those
behind it, which many faults treat alike, lean on each other."""


@dataclass(frozen=True)
class Evidence:
    """What N emitted tokens are worth to each bettor."""

    gains: Float[Tensor, "N bets"]
    """log r(y) / p(y) of the fixed bets."""
    bin: Int64[Tensor, " N"]
    mass: Float[Tensor, "N bins"]
    """What p gives to each bin."""
    place: Int64[Tensor, " N"]
    impossible: Bool[Tensor, " N"]
    """Tokens with p(y) = 0."""

    def __getitem__(self, rows: Tensor) -> Evidence:
        return Evidence(*(getattr(self, name)[rows] for name in ("gains", "bin", "mass", "place", "impossible")))


def evidence(law: Float[Tensor, "N V"], draft: Float[Tensor, "N V"], drafted: Bool[Tensor, " N"], place: Int64[Tensor, " N"],
             token: Int64[Tensor, " N"]) -> Evidence:  # fmt: skip
    """Weigh N tokens, float64 throughout.

    Args:
        law, draft: p and q; where nothing was `drafted` q is not looked at.
        place: `FIRST`, `MIDDLE` or `BONUS`.
        token: what was emitted, y.
    """
    p = law.double() / law.double().sum(-1, keepdim=True)
    q, known, at = draft.double(), drafted[:, None], token[:, None]
    logp = p.clamp_min(1e-300).log()
    ratio = torch.where(known, (logp - q.clamp_min(1e-300).log()).clamp(-_FAR, _FAR), 0.0)

    def gain(r: Tensor, tilt: Tensor) -> Tensor:
        """Of the law `r`, which is p times the tilt but for a factor."""
        return tilt.gather(1, at)[:, 0].log() - r.sum(-1).log()

    gains = []
    for power in _POWERS:
        tilt = (-power * ratio).exp()
        gains.append(gain(p * tilt, tilt))
    for temperature in _TEMPERATURES:
        tilt = ((1 / temperature - 1) * logp.clamp_min(-100)).exp()
        gains.append(gain(p * tilt, tilt))
    left, safe = _rest(p, q, p), torch.where(p > 0, p, 1.0)
    peak = torch.nn.functional.one_hot(left.argmax(-1), left.shape[-1])
    # What token rejection emits if it draws its correction from p, from the residual's own residual, or is greedy about it.
    passed, failed = torch.minimum(p, q), (p - q).clamp_min(0).sum(-1, keepdim=True)
    faults = [passed + failed * wrong for wrong in (p, _rest(left, q, left), peak)]
    for other, share in [*product((q, left), _SHARES), *((fault, _SURE) for fault in faults)]:
        mixed = torch.where(known & (p > 0), (1 - share) * p + share * other, p)
        gains.append(gain(mixed, mixed / safe))
    top = p == p.amax(-1, keepdim=True)
    for factor in (1.1, 0.9):
        tilt = torch.where(top, factor, 1.0)
        gains.append(gain(p * tilt, tilt))

    edges = torch.tensor([_RATIO_EDGES, _LAW_EDGES], dtype=torch.float64, device=p.device)
    bins = torch.where(known, torch.bucketize(ratio, edges[0]), torch.bucketize(logp, edges[1]))
    mass = torch.zeros(len(p), _BINS, dtype=torch.float64, device=p.device).scatter_add(1, bins, p)
    impossible = p.gather(1, at)[:, 0] <= 0
    worth = torch.where(impossible[:, None], 0.0, torch.stack(gains, 1))
    return Evidence(worth, bins.gather(1, at)[:, 0], mass, place, impossible)


def _rest(a: Float[Tensor, "N V"], b: Float[Tensor, "N V"], otherwise: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """(a - b)+ as a law; where nothing is left, the other one."""
    left = (a - b).clamp_min(0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / torch.where(mass > 0, mass, 1.0), otherwise)


def look(done: Round) -> Iterator[tuple[Int64[Tensor, " N"], Evidence]]:
    """The evidence of a round, token by token: rows of the call that emitted a token at this place in the round, and what it is worth.

    Args:
        done: with all laws in it (`keep_all`, `return_rounds="all"`).
    """
    law_device = done.verification.scores.device
    tree = done.tree.to(law_device)
    parents, rows = draw_parents(tree), torch.tensor(done.rows, device=law_device)
    for number in range(max(map(len, done.emitted))):
        there = torch.tensor([number < len(new) for new in done.emitted], device=law_device)
        token = torch.tensor([new[number] if number < len(new) else 0 for new in done.emitted], device=law_device)
        node = done.acceptance.path[:, number].clamp_min(0)
        law = done.verification.law(node)
        below = parents == node[:, None]
        drafted = below.any(-1)
        # Of several draws below one node the first follows its declared law given the text alone.
        draft = draw_law(tree, below.int().argmax(-1), law.dtype, law.shape[1]) if below.shape[1] else law
        place = torch.full_like(node, MIDDLE if number else FIRST)
        if number:
            place = torch.where(drafted, place, BONUS)
        yield rows[there], evidence(law[there], draft[there], drafted[there], place[there], token[there])


@dataclass(frozen=True)
class EProcess:
    """The capital of R independent tests."""

    alpha: float
    fixed: Float[Tensor, "R bets places"]
    """log-capital of the fixed bets, on all places and on each kind of them."""
    learned: Float[Tensor, " R"]
    """log-capital of the bettor that learns."""
    seen: Float[Tensor, "R kinds bins"]
    expected: Float[Tensor, "R kinds bins"]
    tokens: Int64[Tensor, " R"]
    used: Int64[Tensor, " R"]
    """Tokens after which the claim was rejected; 0 if it was not."""
    highest: Float[Tensor, " R"]
    """log of the largest capital so far."""

    @property
    def log_e(self) -> Float[Tensor, " R"]:
        """log of the capital; it began with 1, half of it with the bettor that learns."""
        fixed = self.fixed.flatten(1)
        half = torch.stack([self.learned, fixed.logsumexp(-1) - math.log(fixed.shape[1])], 1)
        return half.logsumexp(-1) - math.log(2)

    @property
    def rejected(self) -> Bool[Tensor, " R"]:
        return self.used > 0

    def after(self, runs: Int64[Tensor, " N"], found: Evidence) -> EProcess:
        """The capital when each of these runs (all different) has emitted one token."""
        cell = runs, found.place
        # What was seen in each bin against what should have been, drawn towards the same ratio of several places, and that towards 1.
        alike = found.place[:, None] < BONUS
        seen, due = (torch.where(alike, one[runs, :BONUS].sum(1), one[cell]) for one in (self.seen, self.expected))
        believed = (self.seen[cell] + _STIFF * (seen + _STIFF) / (due + _STIFF)) / (self.expected[cell] + _STIFF)
        won = believed.gather(1, found.bin[:, None])[:, 0].log() - (believed * found.mass).sum(-1).log()
        where = torch.nn.functional.one_hot(found.place, _PLACES).double()
        stake = torch.cat([torch.ones_like(where[:, :1]), where], 1)
        lost = torch.where(found.impossible, torch.inf, 0.0)
        grown = replace(
            self,
            fixed=self.fixed.index_add(0, runs, found.gains[:, :, None] * stake[:, None] + lost[:, None, None]),
            learned=self.learned.index_add(0, runs, won + lost),
            seen=self.seen.index_put(cell, torch.nn.functional.one_hot(found.bin, _BINS).double(), accumulate=True),
            expected=self.expected.index_put(cell, found.mass, accumulate=True),
            tokens=self.tokens.index_add(0, runs, torch.ones_like(runs)),
        )
        now = grown.log_e
        over = (grown.used == 0) & (now >= -math.log(self.alpha))
        return replace(grown, used=torch.where(over, grown.tokens, grown.used), highest=torch.maximum(grown.highest, now))

    def watch(self, done: Round) -> EProcess:
        """The capital after a round in which each row is a test of its own."""
        state = self
        for rows, found in look(done):
            state = state.after(rows, found)
        return state


def begin(runs: int, alpha: float, device: torch.device | str = "cpu") -> EProcess:
    """`runs` tests, each of which rejects a true claim with probability `alpha` at most.

    Raises:
        ValueError: alpha is not between 0 and 1.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha: got {alpha}; give a probability between 0 and 1")
    zero, none = torch.zeros(runs, dtype=torch.float64, device=device), torch.zeros(runs, dtype=torch.int64, device=device)
    cells = zero.new_zeros(runs, _PLACES, _BINS)
    return EProcess(alpha, zero.new_zeros(runs, _BETS, 1 + _PLACES), zero, cells, cells, none, none, zero)


def pooled(rounds: Iterable[Round], alpha: float, tokens: int) -> Iterator[EProcess]:
    """One test over the texts of all rows, after each round, until it rejects or has seen so many tokens. Rows are drawn independently,
    so their tokens may be taken one after another."""
    state: EProcess | None = None
    for done in rounds:
        state = begin(1, alpha, done.verification.scores.device) if state is None else state
        for rows, found in look(done):
            for row in range(len(rows)):
                state = state.after(torch.zeros_like(rows[:1]), found[torch.tensor([row], device=rows.device)])
        yield state
        if state.rejected.all() or int(state.tokens.min()) >= tokens:
            return


def visible(tokens: int, alpha: float) -> float:
    """The least bias that a good bet shows in so many tokens: the total variation between the emitted token's law and p (root mean
    square over the tokens). A bet on the true law gains KL a token, needs log(1 / alpha), and KL >= 2 TV^2 (Pinsker)."""
    return min(1.0, math.sqrt(-math.log(alpha) / (2 * tokens))) if tokens else 1.0
