"""From samples to figures. Every comparison is paired: the same prompts, one after the other on the same machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..stats import PHASES, Stats
from .measure import Sample

__all__ = ["by_category", "interval", "ratio", "summary"]

RESAMPLES = 2000
BASELINES = {"vs_hf_plain": "hf-plain", "vs_hf_lookup": "hf-lookup"}

Pairs = Sequence[tuple[int, float]]
"""(tokens, seconds) of each sample."""


def rate(samples: Pairs) -> float:
    """Tokens per second: all tokens over all seconds."""
    return sum(tokens for tokens, _ in samples) / sum(seconds for _, seconds in samples)


def ratio(samples: Pairs, baseline: Pairs) -> float:
    """How many times faster than the baseline: the ratio of the rates. Long answers weigh more than short ones, as they do for a user
    who waits for all of them."""
    return rate(samples) / rate(baseline)


def interval(samples: Pairs, baseline: Pairs, seed: int = 0) -> tuple[float, float]:
    """A 95 % interval of `ratio` over other prompts of this kind: percentiles of the paired bootstrap (Efron and Tibshirani 1993).

    Prompts are drawn again with replacement, each with its samples of both sides, so what slowed both down cancels. One prompt alone
    says nothing about others: both ends are then the ratio itself.
    """
    if len(samples) != len(baseline):
        raise ValueError(f"samples, baseline: {len(samples)} and {len(baseline)} of them; they are paired, so give as many of each")
    draws = torch.randint(len(samples), (RESAMPLES, len(samples)), generator=torch.Generator().manual_seed(seed))
    (tokens, seconds), (base_tokens, base_seconds) = (torch.tensor(side, dtype=torch.float64).T for side in (samples, baseline))
    totals = [column[draws].sum(1) for column in (tokens, base_seconds, seconds, base_tokens)]
    ratios = totals[0] * totals[1] / (totals[2] * totals[3])
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def by_category(categories: Sequence[str], samples: Pairs, baseline: Pairs) -> dict[str, float]:
    """The ratio within each category, in order of appearance."""
    found = {}
    for wanted in dict.fromkeys(categories):
        at = [i for i, category in enumerate(categories) if category == wanted]
        found[wanted] = ratio([samples[i] for i in at], [baseline[i] for i in at])
    return found


def summary(samples: Mapping[str, Sequence[Sample]], verdicts: Mapping[str, Mapping[str, int] | None]) -> dict[str, dict[str, Any]]:
    """The figures of every method, `plain` among them.

    `tokens_per_s` is all emitted tokens over the wall seconds of the whole calls, prefill included, for every method alike.
    `seconds` are the phases of our own rounds, over all calls; `outside` is what the calls took besides. `acceptance_by_depth` is how often
    a drafted token of each depth was accepted where all above it had been. What is not known is None.

    Args:
        samples: for each method, paired by position.
        verdicts: for each method how many texts are "equal", "near_tie" and "different"; None where they were sampled.
    """
    return {name: {**_own(own), **_against(own, samples), "equal_to_plain": verdicts[name]} for name, own in samples.items()}


def _own(samples: Sequence[Sample]) -> dict[str, Any]:
    rounds = _rounds(samples)
    categories = dict.fromkeys(one.category for one in samples)
    total = sum(one.seconds for one in samples)
    phases: dict[str, float | None] = dict.fromkeys((*PHASES, "outside"))
    depths: list[float] | None = None
    stats = [one.decoded.stats for one in samples if one.decoded.stats is not None]
    if len(stats) == len(samples):
        every = sum(stats, Stats())
        phases = {phase: every.seconds.get(phase, 0.0) for phase in PHASES}
        phases["outside"] = total - sum(seconds or 0.0 for seconds in phases.values())
        depths = [taken / tried for taken, tried in zip(every.accepted_by_depth, every.attempted_by_depth, strict=True)]
    return {
        "tokens_per_s": rate(_pairs(samples)), "tokens_per_round": _per_round(samples), "rounds": rounds,
        "tokens": sum(one.tokens for one in samples), "seconds_total": total, "seconds": phases, "acceptance_by_depth": depths,
        "tokens_per_round_by_category": {c: _per_round([one for one in samples if one.category == c]) for c in categories},
    }  # fmt: skip


def _against(own: Sequence[Sample], samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    total, (low, high), categories = _versus(own, samples["plain"])
    found: dict[str, Any] = {"speedup": {"total": total, "low": low, "high": high, "by_category": categories}}
    for key, name in BASELINES.items():
        versus = _versus(own, samples[name]) if name in samples else (None, None, None)
        found |= dict(zip((key, f"{key}_interval", f"{key}_by_category"), versus, strict=True))
    return found


def _versus(own: Sequence[Sample], baseline: Sequence[Sample]) -> tuple[float, tuple[float, float], dict[str, float]]:
    mine, theirs = _pairs(own), _pairs(baseline)
    return ratio(mine, theirs), interval(mine, theirs), by_category([one.category for one in own], mine, theirs)


def _pairs(samples: Sequence[Sample]) -> Pairs:
    return [(one.tokens, one.seconds) for one in samples]


def _rounds(samples: Sequence[Sample]) -> int | None:
    counts = [one.decoded.rounds for one in samples if one.decoded.rounds is not None]
    return sum(counts) if len(counts) == len(samples) else None


def _per_round(samples: Sequence[Sample]) -> float | None:
    rounds = _rounds(samples)
    return sum(one.tokens for one in samples) / rounds if rounds else None
