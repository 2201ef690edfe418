"""Is a text the one that it has to be, token for token? Where it is not, is that a proven tie?

Greedy texts are compared with what `model.generate` gives; texts whose noise belongs to the position (`CoupledAcceptor`) with plain
decoding under the same seed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..acceptors import CoupledAcceptor
from ..base import Acceptor, ContextDrafter, Drafter
from ..generation import generate, stream
from ..planning import FixedPlanner
from ..rng import CounterRng, Purpose, derive_seeds
from ..tree import from_lists
from ..types import ROOT, Budget, DraftTree, Float, Int64, Round

__all__ = [
    "Comparison", "Echoes", "SAMPLED", "audit_coupled", "audit_greedy", "compare", "coupled_texts", "reference_draft", "sampled_rounds",
    "tie_width",
]  # fmt: skip

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
"""Options under which the law is the model's own, and no text ends early."""

NEAR_TIE = 1e-4
"""Two logits closer than this may swap places between forwards of different shapes in float32; measured differences are 5e-5."""
_ULPS = 5
"""The same in half precision, in units in the last place of the best logit, the grid to which the sums behind logits are rounded. Measured:
the distance of a leading logit from the best differs by 1 unit in the median, 2.9 in 95 % and 4.6 in all of 144 places between a pass
over one token and one over the whole text (SmolLM2-135M, bfloat16)."""


@dataclass(frozen=True)
class Comparison:
    """How one text compares with the plain one."""

    verdict: str
    """"equal", "near_tie" or "different"."""
    position: int | None = None
    """New token at which they part."""
    gap: float | None = None
    """By how much the logits of one forward there would have to move for the other token. Greedy: how far the worse of the two lies below
    the best."""


def tie_width(dtype: torch.dtype, best: float) -> float:
    """How far a token may lie below the best logit of one forward and still win in another, by rounding alone.

    It wins there because its distance from the best became negative, so the distance here is at most what the distance of two logits
    differs by between forwards of different shapes. That is measured: as it is from float32 up, in units in the last place below.
    """
    eps = torch.finfo(dtype).eps
    if eps <= torch.finfo(torch.float32).eps or best == 0:
        return NEAR_TIE
    return _ULPS * eps * 2.0 ** math.floor(math.log2(abs(best)))


@torch.no_grad()
def compare(model: Any, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], near_tie: float | None = None) -> Comparison:
    """Compare two greedy continuations of a prompt. What follows a near-tie is another text, and is not judged.

    Args:
        near_tie: a gap of the logits up to this is one; left out, `tie_width` of the model's dtype.
    """
    at = _parting(plain, other)
    if at is None:
        return Comparison("equal")
    if at == min(len(plain), len(other)):
        return Comparison("different", at)
    logits = _logits(model, [*prompt, *plain[:at]])
    gap = float(logits.max() - torch.minimum(logits[plain[at]], logits[other[at]]))
    width = tie_width(model.dtype, float(logits.max())) if near_tie is None else near_tie
    return Comparison("near_tie" if gap <= width else "different", at, gap)


def _parting(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; one of them may end there."""
    if list(plain) == list(other):
        return None
    return next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), min(len(plain), len(other)))


def _logits(model: Any, ids: Sequence[int]) -> Float[Tensor, " V"]:
    return model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -1].double()


def audit_greedy(
    model: Any, prompts: Sequence[Sequence[int]], drafter: Drafter, *, max_new_tokens: int, batch: int = 1
) -> Iterator[Comparison]:
    """Compare greedy decoding with a drafter, `batch` prompts at a time, with transformers' own plain decoding, one at a time."""
    for start in range(0, len(prompts), batch):
        group = [list(prompt) for prompt in prompts[start : start + batch]]
        ours = generate(model, group, drafter=drafter, max_new_tokens=max_new_tokens, do_sample=False).new_tokens
        for prompt, new in zip(group, ours, strict=True):
            ids = torch.tensor([prompt], device=model.device)
            plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
            yield compare(model, prompt, plain[0, len(prompt) :].tolist(), new.tolist())


# ------------------------------------------------------------------------------------------------------------- sampled texts


def reference_draft(model: Any, share: float = 0.075, seed: int = 0) -> Any:
    """A draft model for tests, not for speed: a copy of the model with Gaussian noise on each weight matrix, of this share of the matrix's
    standard deviation. With the default, SmolLM2-135M and its draft agree on 60 to 80 % of a token's law at temperature 1."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (parameter for parameter in draft.parameters() if parameter.ndim > 1):
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((share * weight.std() * noise.to(weight.device)).to(weight.dtype))
    return draft


class Echoes(ContextDrafter):
    """A tree for tests: what followed the latest few occurrences of the last token, a branch each, equal ones beside each other.

    Args:
        branches: how many.
    """

    def __init__(self, branches: int = 3) -> None:
        self._branches = branches

    def guess(self, ids: list[Int64[Tensor, " _"]], budget: Budget) -> DraftTree:
        return from_lists([
            self._tree(row.tolist(), nodes, depth, min(width, self._branches))
            for row, nodes, depth, width in zip(ids, budget.nodes.tolist(), budget.depth.tolist(), budget.width.tolist(), strict=True)
        ])  # fmt: skip

    def _tree(self, text: list[int], nodes: int, depth: int, width: int) -> tuple[list[int], list[int]]:
        tokens, parents = [text[-1]], [ROOT]
        places = [i for i in range(len(text) - 1) if text[i] == text[-1]][::-1][:width]
        for place in places:
            above = 0
            for token in text[place + 1 : place + 1 + min(depth, nodes // len(places))]:
                tokens.append(token)
                parents.append(above)
                above = len(tokens) - 1
        return tokens, parents


def sampled_rounds(model: Any, prompts: Sequence[Sequence[int]], drafter: Drafter, acceptor: Acceptor, *, max_new_tokens: int,
                   batch: int = 1, num_draft: int = 8, seed: int = 0) -> Iterator[Round]:  # fmt: skip
    """Rounds with all their laws, for as long as one likes: text after text at temperature 1, `batch` at a time; when the prompts are used
    up they come again, under other seeds."""
    turn, tokens = 0, [list(prompt) for prompt in prompts]
    while True:
        group = [tokens[(turn * batch + i) % len(tokens)] for i in range(batch)]
        seeds = derive_seeds(seed, (turn + 1) * batch)[turn * batch :]
        yield from stream(
            model, group, drafter=drafter, acceptor=acceptor, planner=FixedPlanner(num_draft), max_new_tokens=max_new_tokens, seed=seeds,
            keep_all=True, **SAMPLED,
        )  # fmt: skip
        turn += 1


def coupled_texts(model: Any, prompts: Sequence[Sequence[int]], drafter: Drafter, seeds: Sequence[int], *, max_new_tokens: int,
                  batch: int = 1, num_draft: int = 8) -> Iterator[list[int]]:  # fmt: skip
    """The new tokens of each prompt, of its own seed, with noise that belongs to the position."""
    for start in range(0, len(prompts), batch):
        found = generate(
            model, [list(prompt) for prompt in prompts[start : start + batch]], drafter=drafter, acceptor=CoupledAcceptor(),
            planner=FixedPlanner(num_draft), max_new_tokens=max_new_tokens, seed=list(seeds[start : start + batch]), **SAMPLED,
        )  # fmt: skip
        yield from (new.tolist() for new in found.new_tokens)


def audit_coupled(model: Any, prompts: Sequence[Sequence[int]], drafter: Drafter, seeds: Sequence[int], plain: Sequence[Sequence[int]], *,
                  max_new_tokens: int, batch: int = 1, num_draft: int = 8) -> Iterator[Comparison]:  # fmt: skip
    """Compare texts drafted under position-bound noise with plain ones under the same seeds.

    Args:
        seeds: one per prompt.
        plain: `coupled_texts` of a `NullDrafter`, one prompt at a time.
    """
    texts = coupled_texts(model, prompts, drafter, seeds, max_new_tokens=max_new_tokens, batch=batch, num_draft=num_draft)
    for prompt, seed, wanted, got in zip(prompts, seeds, plain, texts, strict=True):
        yield _same_race(model, prompt, seed, wanted, got)


@torch.no_grad()
def _same_race(model: Any, prompt: Sequence[int], seed: int, plain: Sequence[int], other: Sequence[int]) -> Comparison:
    """A near-tie here: the two tokens change places in their race when their logits move by the width of a tie."""
    at = _parting(plain, other)
    if at is None:
        return Comparison("equal")
    if at == min(len(plain), len(other)):
        return Comparison("different", at)
    logits = _logits(model, [*prompt, *plain[:at]])
    width, pair = tie_width(model.dtype, float(logits.max())), torch.tensor([plain[at], other[at]], device=logits.device)
    source = CounterRng([seed]).round([0], [len(prompt) + at - 1], logits.device)

    def plain_wins(shift: float) -> bool:
        """When its logit is moved so far."""
        raced = torch.full_like(logits, -torch.inf)
        raced[pair] = logits[pair] - logits[pair].max()
        raced[pair[0]] += shift
        return int(source.categorical(raced.exp()[None], Purpose.TARGET, 0)) == plain[at]

    low, high = -64.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if plain_wins(middle) else (middle, high)
    gap = abs(high)
    return Comparison("near_tie" if gap <= width else "different", at, gap)
