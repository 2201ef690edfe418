"""The exact law of what a round emits, and what it has to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from ..base import Acceptor, Context, Drafter, Verifier
from ..drafters import NullDrafter
from ..loop import compatible, decode
from ..options import Options
from ..planning import FixedPlanner
from ..ragged import pad_rows
from ..rng import Purpose
from ..stops import Ends
from ..tree import root_only
from ..types import Acceptance, Budget, DraftTree, Float, Int64, Scores, Verification
from ..warp import Warper
from .enumerate import EnumeratingRng, branches

__all__ = [
    "Law", "Standing", "TargetLaw", "autoregressive", "emitted", "endless", "expected_tokens", "extended", "hazard_defect", "one_round",
    "laws_after", "several_rounds", "shown", "stand", "tabulated", "target_law", "total_variation",
]  # fmt: skip

Tokens = tuple[int, ...]
Law = Mapping[Tokens, float]
"""Probability of each emitted text."""
TargetLaw = Callable[[Sequence[Tokens]], Float[Tensor, "R V"]]
"""The target's laws after the prompt and each of these continuations."""
Plan = tuple[int, int, int]
"""Nodes, depth and width of a budget."""


# --------------------------------------------------------------------------------------------------------------- running


@dataclass
class Standing:
    """A batch between its prompts and its first round."""

    ctx: Context
    verifier: Any
    drafter: Any
    pending: Int64[Tensor, " B"]
    positions: list[int]


def stand(drafter: Drafter, verifier: Verifier, prompts: Sequence[Tokens], *, greedy: bool = False) -> Standing:
    """Read the prompts, each of them of one token or more, in one chunk."""
    batch = len(prompts)
    ctx = Context(batch, verifier.facts, Warper([], batch=batch), greedy, max(map(len, prompts)) + 64, drafter.needs)
    states = [verifier.begin(ctx), drafter.begin(ctx)]
    tokens, lengths = pad_rows(prompts, 0)
    if tokens.shape[1] > 1:
        states[1] = drafter.observe(states[1], verifier.extend(states[0], tokens[:, :-1], lengths - 1))
    pending = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    return Standing(ctx, states[0], states[1], pending, (lengths - 1).tolist())


def shown(scores: Scores) -> Verification:
    """What an acceptor is shown: scores that are no log-probabilities, as a temperature leaves them, and raw logits that are others, as
    processors make them. The law is that of `scores`."""
    logp = scores.logp
    return Verification(scores=logp + torch.arange(1, 1 + logp.shape[1], device=logp.device)[:, None] / 4, logits=logp.flip(-1))


def emitted(tree: DraftTree, acceptance: Acceptance) -> list[Tokens]:
    """What a round adds to each row's text: the accepted tokens, then the correction or bonus."""
    tokens = tree.tokens.gather(1, acceptance.path.clamp_min(0)).tolist()
    ends = zip(tokens, acceptance.count.tolist(), acceptance.next_token.tolist(), strict=True)
    return [(*row[1:count], last) for row, count, last in ends]


def one_round(drafter: Drafter, verifier: Verifier, acceptor: Acceptor, prompts: Sequence[Tokens], plan: Plan, *,
              shared: frozenset[Purpose] = frozenset()) -> dict[Tokens, Law]:  # fmt: skip
    """The exact law of one round's text after each prompt; every branch is a row of a batch. That the trees are well-formed is taken
    for granted; `check_drafter` looks.

    Args:
        plan: nodes, depth and width of the round's budget.
        shared: purposes whose noise drafter and acceptor share, see `EnumeratingRng`.
    """
    compatible(drafter, acceptor, acceptor.greedy)
    facts = verifier.facts

    @torch.no_grad()
    def run(rng: EnumeratingRng) -> list[Tokens]:
        at = stand(drafter, verifier, rng.roots, greedy=acceptor.greedy)
        source = rng.round(range(len(rng.roots)), at.positions, facts.device)
        tree = drafter.propose(at.drafter, at.pending, Budget.of(*plan, batch=len(rng.roots)), source).to(facts.device)
        return emitted(tree, acceptor.accept(tree, shown(verifier.verify(at.verifier, tree)), source))

    return _by_root((b.root, b.result, b.probability) for b in branches(run, prompts, shared=shared))


def endless(prompts: Sequence[Tokens], greedy: bool, room: int) -> Options:
    """Options of a call that ends at `room` new tokens and for no other reason."""
    ends = Ends(eos=frozenset(), limits=[len(prompt) + room for prompt in prompts])
    return Options(greedy, 0, Warper([], batch=len(prompts)), ends)


def several_rounds(drafter: Drafter, verifier: Verifier, acceptor: Acceptor, prompts: Sequence[Tokens], plan: Plan, rounds: int = 2, *,
                   length: int | None = None, shared: frozenset[Purpose] = frozenset()) -> dict[Tokens, Law]:  # fmt: skip
    """The exact law of the text of the first rounds of the real loop.

    A text is as long as its rounds made it; `extended` completes it. What leaks from one round into the next, through the drafter's or
    the verifier's state or by noise used twice, shows here and not in one round.

    Args:
        length: go on, for as many rounds as it takes, until the text has so many tokens, instead of `rounds`.
    """
    room = (rounds + 1) * (plan[1] + 1) if length is None else length

    def run(rng: EnumeratingRng) -> list[Tokens]:
        texts: list[Tokens] = [()] * len(rng.roots)
        calls = decode(
            verifier, [torch.tensor(prompt) for prompt in rng.roots], endless(rng.roots, acceptor.greedy, room), drafter=drafter,
            acceptor=acceptor, planner=FixedPlanner(*plan), rng=rng,
        )  # fmt: skip
        for done in calls if length is not None else islice(calls, rounds):
            for row, new in zip(done.rows, done.emitted, strict=True):
                texts[row] = (*texts[row], *new)
        return texts

    return _by_root((b.root, b.result, b.probability) for b in branches(run, prompts, shared=shared))


def _by_root(found: Iterable[tuple[Hashable, Tokens, float]]) -> dict[Any, Law]:
    parts: dict[Any, dict[Tokens, list[float]]] = {}
    for root, text, probability in found:
        parts.setdefault(root, {}).setdefault(text, []).append(probability)
    return {root: {text: math.fsum(p) for text, p in law.items()} for root, law in parts.items()}


# -------------------------------------------------------------------------------------------------------- what it has to be


@torch.no_grad()
def laws_after(verifier: Verifier, texts: Sequence[Tokens], *, greedy: bool = False) -> Float[Tensor, "R V"]:
    """What the target says after each text, by a fresh prefill and a pass without draft; a point mass if greedy."""
    at = stand(NullDrafter(), verifier, texts, greedy=greedy)
    logp = verifier.verify(at.verifier, root_only(at.pending)).logp[:, 0].cpu()
    return torch.nn.functional.one_hot(logp.argmax(-1), logp.shape[-1]).to(logp) if greedy else logp.exp()


def target_law(verifier: Verifier, prompt: Tokens, *, greedy: bool = False) -> TargetLaw:
    """The target as `hazard_defect` and its like want it."""
    return lambda continuations: laws_after(verifier, [(*prompt, *c) for c in continuations], greedy=greedy)


def tabulated(verifier: Verifier, prompts: Sequence[Tokens], depth: int, *, greedy: bool = False) -> dict[Tokens, TargetLaw]:
    """The target after each prompt, all continuations of up to `depth` tokens asked for in one batch."""
    texts = [c for n in range(depth + 1) for c in product(range(verifier.facts.vocab_size), repeat=n)]
    place = {text: i for i, text in enumerate(texts)}
    found = laws_after(verifier, [(*prompt, *c) for prompt in prompts for c in texts], greedy=greedy).unflatten(0, (len(prompts), -1))
    return {prompt: (lambda cs, table=table: table[[place[c] for c in cs]]) for prompt, table in zip(prompts, found, strict=True)}


def hazard_defect(law: Law, target: TargetLaw) -> float:
    """How far a law is from one that leaves the target's untouched; 0 for a lossless rule, whatever is drafted.

    The largest |Pr(next token = x | text begins with s and goes on) - P(x | prompt s)| over the beginnings s that occur. It is 0 for every
    prompt if and only if rounds repeated with fresh noise have the target's law at every length: the emitted text is then the target's
    own up to a stopping time, and conversely (split the text at the end of the round; induction on rounds). Unlike a comparison of the
    first L tokens it also sees the bonus token of the deepest path.
    """
    going: dict[Tokens, list[float]] = {}
    step: dict[tuple[Tokens, int], list[float]] = {}
    for text, probability in law.items():
        for n, token in enumerate(text):
            going.setdefault(text[:n], []).append(probability)
            step.setdefault((text[:n], token), []).append(probability)
    begun = list(going)
    worst = 0.0
    for s, after in zip(begun, target(begun).tolist(), strict=True):
        total = math.fsum(going[s])
        worst = max(worst, *(abs(math.fsum(step.get((s, x), ())) / total - p) for x, p in enumerate(after)))
    return worst


def expected_tokens(law: Law) -> float:
    """Mean number of tokens emitted."""
    return math.fsum(probability * len(text) for text, probability in law.items())


def extended(law: Law, target: TargetLaw, length: int) -> Law:
    """The law of the first `length` tokens when the target goes on from each text by itself."""
    done: dict[Tokens, float] = {}
    todo = dict(law)
    while todo:
        short: dict[Tokens, float] = {}
        for text, probability in todo.items():
            into = short if len(text) < length else done
            into[text[:length]] = into.get(text[:length], 0.0) + probability
        todo = {}
        for (text, probability), after in zip(short.items(), target(list(short)).tolist() if short else (), strict=True):
            todo.update({(*text, x): todo.get((*text, x), 0.0) + probability * p for x, p in enumerate(after) if p > 0})
    return done


def autoregressive(target: TargetLaw, length: int) -> Law:
    """The target's own law of `length` tokens."""
    return extended({(): 1.0}, target, length)


def total_variation(a: Law, b: Law) -> float:
    """Half the sum of absolute differences."""
    return math.fsum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in {*a, *b}) / 2
