"""What every drafter must pass, one named check each. They see the interface alone, so a reader's own drafter is checked like ours."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..acceptors import RejectionAcceptor
from ..base import Acceptor, Drafter
from ..loop import compatible, treats
from ..types import Budget, Kind, Round
from .battery import blank
from .laws import Plan, expected_tokens, hazard_defect, one_round, several_rounds, stand, tabulated, target_law
from .purity import RAISED, WatchedAcceptor, WatchedDrafter, generators_at_rest, other_seed
from .states import reachable, worst_state
from .subject import LENGTH, LOSSLESS, Subject, play, propose, propose_at, same_draws, same_story, stories, subject
from .tolerances import LAW, ROUND_LAW
from .truth import drafts, drawn, untruth

__all__ = ["certify_drafter", "drafter_checks"]


def declared_law(s: Subject) -> None:
    """The law that a draw declares is the one it was drawn from, after any history of draws."""
    slack = LAW[s.dtype]
    for plan in (*s.plans, (5, 5, 1)):
        found = drafts(s.drafter, s.verifier, s.contexts, plan, slack)
        for context in s.contexts:
            worst = untruth([branch for branch in found if branch.root == context], slack)
            assert worst.defect <= slack, f"context {context}, budget {plan}: off by {worst.defect:.2e} at {worst.where}"


def budget(s: Subject) -> None:
    """Topological, within its budget and the vocabulary, laws that sum to one; for many budgets, rows with their own."""
    rng = random.Random(0)
    for _ in range(16):
        nodes, depth, width = ([rng.randrange(7) for _ in s.contexts] for _ in range(3))
        room = torch.tensor([rng.randrange(6) for _ in s.contexts])
        propose(s, s.contexts, [rng.randrange(1 << 30) for _ in s.contexts], Budget.of(nodes, depth, width).clamp(room))


def empty_draft(s: Subject) -> None:
    """A budget of no nodes gives the root alone, beside rows that draft and for a whole text."""
    mixed = [3 * (i % 2) for i in range(len(s.contexts))]
    tree = propose(s, s.contexts, [0] * len(s.contexts), Budget.of(mixed))
    drafted = (tree.parents[:, 1:] >= 0).sum(-1).tolist()
    assert not any(n for n, allowed in zip(drafted, mixed, strict=True) if allowed == 0), f"budgets {mixed} got {drafted} nodes"
    told = stories(s, list(play(s, s.contexts, range(len(s.contexts)), nodes=0)), len(s.contexts))
    assert all(sum(len(tokens) for _, tokens in story) == LENGTH for story in told), "a text without drafts is not complete"


def short_context(s: Subject) -> None:
    """A context of one token, whose drafter has observed nothing."""
    contexts = [(token,) for token in range(s.vocab_size)]
    told = stories(s, list(play(s, contexts, range(len(contexts)))), len(contexts))
    assert all(sum(len(tokens) for _, tokens in story) == LENGTH for story in told), "a text from one token is not complete"


def interleaving(s: Subject) -> None:
    """Two batches through one object at once come out as they do apart: nothing of a call is kept on the drafter."""
    first, second = s.contexts[:2], s.contexts[-2:]
    apart = [list(play(s, group, range(len(group)))) for group in (first, second)]
    together: list[list[Round]] = [[], []]
    calls = [play(s, group, range(len(group))) for group in (first, second)]
    live = [0, 1]
    while live:
        for which in tuple(live):
            done = next(calls[which], None)
            live.remove(which) if done is None else together[which].append(done)
    for group, one, other in zip((first, second), together, apart, strict=True):
        for context, got, wanted in zip(group, stories(s, one, len(group)), stories(s, other, len(group)), strict=True):
            same_story(s, got, wanted, f"context {context} beside another batch")


def batch_invariance(s: Subject) -> None:
    """A row of a batch, wherever it stands, comes out as it does alone."""
    order = [len(s.contexts) - 1, 0, len(s.contexts) // 2]
    batch = stories(s, list(play(s, [s.contexts[i] for i in order], [100 + i for i in order])), len(order))
    for i, story in zip(order, batch, strict=True):
        (alone,) = stories(s, list(play(s, [s.contexts[i]], [100 + i])), 1)
        same_story(s, story, alone, f"context {s.contexts[i]} in a batch")


@torch.no_grad()
def select(s: Subject) -> None:
    """A state reduced to some of its rows, in another order, goes on as those rows alone do."""
    rows = [len(s.contexts) - 1, 0]
    chosen = [s.contexts[i] for i in rows]
    part, alone = stand(s.drafter, s.verifier, s.contexts), stand(s.drafter, s.verifier, chosen)
    part.drafter, part.verifier = s.drafter.select(part.drafter, rows), s.verifier.select(part.verifier, rows)
    part.pending, part.positions = part.pending[rows], [part.positions[i] for i in rows]
    for step in range(2):
        trees = [propose_at(s, at, [5, 6], Budget.of(*s.plans[0], batch=2)) for at in (part, alone)]
        for context, got, wanted in zip(chosen, *(drawn(tree, s.vocab_size) for tree in trees), strict=True):
            assert same_draws(s, got, wanted), f"context {context}, step {step} after select: drafted {got}, alone {wanted}"
        for at in (part, alone):
            commit = s.verifier.extend(at.verifier, at.pending[:, None].cpu(), torch.tensor([1, 1]))
            at.drafter = s.drafter.observe(at.drafter, commit)
            at.positions = [position + 1 for position in at.positions]


def determinism(s: Subject) -> None:
    """The same state and source give the same tree, whatever the global generators hold; they are not used."""
    seeds = range(len(s.contexts))
    with generators_at_rest():
        one = drawn(propose(s, s.contexts, seeds), s.vocab_size)
        with other_seed():
            other = drawn(propose(s, s.contexts, seeds), s.vocab_size)
    for context, got, wanted in zip(s.contexts, one, other, strict=True):
        assert same_draws(s, got, wanted), f"context {context}: drafted {got} once and {wanted} the next time"


def arguments(s: Subject) -> None:
    """Nothing that is passed in is written to."""
    list(play(s, s.contexts, range(len(s.contexts)), WatchedDrafter(s.drafter)))


def two_rounds(s: Subject) -> None:
    """The law of two rounds through the real loop: what the drafter carries over does not bias the text."""
    context = s.contexts[-1]
    nodes = 2 if s.vocab_size <= 4 else 1  # branches multiply
    law = several_rounds(s.drafter, s.verifier, RejectionAcceptor(), [context], (nodes, nodes, nodes))[context]
    _exact(s, hazard_defect(law, target_law(s.verifier, context)), f"context {context}, two rounds of {nodes} nodes")


def reachable_states(s: Subject) -> None:
    """The law of the second round is the target's given everything that happened in the first, not the text alone; and so is the law of a
    text of one token more than a round can draft."""
    nodes = 2 if s.drafter.draws <= {Kind.POINT} else 1  # branches multiply
    contexts, plan = s.contexts[-2 if s.vocab_size <= 4 else -1 :], (nodes, nodes, nodes)
    defect, state = worst_state(reachable(s.drafter, s.verifier, RejectionAcceptor(), contexts, plan), s.verifier)
    _exact(s, defect, f"{state}, the second round")
    for context, law in several_rounds(s.drafter, s.verifier, RejectionAcceptor(), contexts, plan, length=plan[1] + 1).items():
        _exact(s, hazard_defect(law, target_law(s.verifier, context)), f"context {context}, a text of {nodes + 1} tokens")


def law_with(acceptor: Acceptor) -> Callable[[Subject], None]:
    """The law of one round with this acceptor is the target's."""

    def law(s: Subject) -> None:
        for plan in s.plans:
            laws = one_round(s.drafter, s.verifier, acceptor, s.contexts, plan)
            targets = tabulated(s.verifier, s.contexts, plan[1], greedy=acceptor.greedy)
            for context in s.contexts:
                _exact(s, hazard_defect(laws[context], targets[context]), f"context {context}, budget {plan}, {type(acceptor).__name__}")

    return law


def _exact(s: Subject, defect: float, where: str) -> None:
    assert defect <= _allowed(s), f"{where}: the law of an emitted token is off by {defect:.2e}"


def _allowed(s: Subject) -> float:
    dtypes = {s.dtype, s.verifier.facts.dtype}
    return ROUND_LAW if dtypes == {torch.float64} else max(LAW[dtype] for dtype in dtypes)


_CHECKS: dict[str, Callable[[Subject], None]] = {
    "declared-law": declared_law, "budget": budget, "empty-draft": empty_draft, "short-context": short_context,
    "interleaving": interleaving, "batch-invariance": batch_invariance, "select": select, "determinism": determinism,
    "arguments": arguments, "two-rounds": two_rounds, "reachable-states": reachable_states,
}  # fmt: skip


def drafter_checks(s: Subject) -> Iterator[tuple[str, Callable[[Subject], None]]]:
    """The named checks of a drafter, end to end with every acceptor that takes its draws."""
    yield from _CHECKS.items()
    for acceptor in s.acceptors:
        if treats(acceptor, s.drafter):
            yield f"law-{type(acceptor).__name__}", law_with(acceptor)


def certify_drafter(drafter: Drafter, acceptors: Sequence[Acceptor] = LOSSLESS, **options: Any) -> Iterator[dict[str, Any]]:
    """What becomes of the output law with this drafter: one row per acceptor and budget, as `certify` gives them.

    A row fails if its law is off, or if the drafter fails any of its checks: then no row is worth anything. The `reason` names them.

    Args:
        options: the arguments of `check_drafter`, but for its acceptors.
    """
    s = subject(drafter, acceptors=acceptors, **options)
    failed = "; ".join(filter(None, (_failure(check, s, name) for name, check in _CHECKS.items())))
    proposal = ", ".join(kind.name.lower().replace("_", " ") for kind in sorted(drafter.draws)) or "none"
    for acceptor in acceptors:
        for plan in s.plans:
            yield blank(acceptor, drafter, proposal, f"budget {','.join(map(str, plan))}") | _law_of(s, acceptor, plan, failed)


def _failure(check: Callable[[Subject], None], s: Subject, name: str) -> str | None:
    try:
        check(s)
    except RAISED as error:  # the other checks may say more
        return f"{name}: {type(error).__name__}: {error}"
    return None


def _law_of(s: Subject, acceptor: Acceptor, plan: Plan, failed: str) -> dict[str, Any]:
    try:
        compatible(s.drafter, acceptor, acceptor.greedy)
    except ValueError as error:
        return {"verdict": "fail", "reason": failed} if failed else {"reason": str(error)}
    try:
        laws = one_round(s.drafter, s.verifier, WatchedAcceptor(acceptor), s.contexts, plan)
        allowed = _allowed(s)
    except RAISED as error:
        return {"verdict": "fail", "reason": failed or f"{type(error).__name__}: {error}"}
    targets = tabulated(s.verifier, s.contexts, plan[1], greedy=acceptor.greedy)
    defect, worst = max((hazard_defect(laws[context], targets[context]), context) for context in s.contexts)
    numbers = {"defect": defect, "expected_tokens": math.fsum(map(expected_tokens, laws.values())) / len(laws)}
    if failed:
        return numbers | {"verdict": "fail", "reason": failed}
    if defect <= allowed:
        return numbers | {"verdict": "pass"}
    return numbers | {"verdict": "fail" if acceptor.lossless else "lossy", "reason": f"worst after context {worst}"}
