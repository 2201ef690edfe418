"""What every drafter must pass, one named check each. They see the interface alone, so a reader's own drafter is checked like ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..acceptors import CoupledAcceptor, GreedyAcceptor, MatchAcceptor, RejectionAcceptor
from ..base import Acceptor, Drafter, Verifier
from ..loop import decode
from ..models.table import TableModel
from ..planning import FixedPlanner
from ..rng import CounterRng
from ..tree import check
from ..types import Budget, DraftTree, Round
from .laws import Plan, Standing, Tokens, endless, hazard_defect, one_round, several_rounds, stand, tabulated, target_law
from .purity import WatchedDrafter, generators_at_rest, other_seed
from .tables import TableVerifier
from .tolerances import LAW, ROUND_LAW
from .truth import Drawn, drafts, drawn, untruth

__all__ = ["LOSSLESS", "Subject", "drafter_checks", "subject"]

LOSSLESS: tuple[Acceptor, ...] = (GreedyAcceptor(), MatchAcceptor(), CoupledAcceptor(), RejectionAcceptor())
"""The rules under which a drafter's law is computed end to end."""

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


# --------------------------------------------------------------------------------------------------------------- running


def propose(s: Subject, contexts: Sequence[Tokens], seeds: Sequence[int], budget: Budget | None = None) -> DraftTree:
    """The first draft of fresh rows with these seeds."""
    at = stand(s.drafter, s.verifier, contexts)
    return _propose(s, at, seeds, Budget.of(*s.plans[0], batch=len(contexts)) if budget is None else budget)


@torch.no_grad()
def _propose(s: Subject, at: Standing, seeds: Sequence[int], budget: Budget) -> DraftTree:
    source = CounterRng(seeds).round(range(len(seeds)), at.positions, s.verifier.facts.device)
    tree = s.drafter.propose(at.drafter, at.pending, budget, source)
    check(tree, at.pending, budget, s.vocab_size, sums=True)
    if not tree.draws.kinds <= s.drafter.draws:
        raise AssertionError(f"draws: declared are {sorted(s.drafter.draws)}, the tree holds {tree.draws.kinds}")
    return tree


LENGTH = 6


def play(s: Subject, contexts: Sequence[Tokens], seeds: Sequence[int], drafter: Drafter | None = None, nodes: int = 3) -> Iterator[Round]:
    """`LENGTH` tokens for each context through the real loop."""
    return decode(
        s.verifier, [torch.tensor(context) for context in contexts], endless(contexts, False, LENGTH), drafter=drafter or s.drafter,
        acceptor=MatchAcceptor(), planner=FixedPlanner(nodes), rng=CounterRng(seeds), keep_all=True,
    )  # fmt: skip


def stories(s: Subject, rounds: Sequence[Round], batch: int) -> list[Story]:
    told: list[Story] = [[] for _ in range(batch)]
    for done in rounds:
        for row, draws, tokens in zip(done.rows, drawn(done.tree, s.vocab_size), done.emitted, strict=True):
            told[row].append((draws, tokens))
    return told


def same_draws(s: Subject, a: tuple[Drawn, ...], b: tuple[Drawn, ...]) -> bool:
    slack = LAW[s.dtype]
    return len(a) == len(b) and all(x.fits(y, slack) and x.token == y.token for x, y in zip(a, b, strict=True))


def _same_story(s: Subject, got: Story, wanted: Story, what: str) -> None:
    for number, ((draws, tokens), (draws_too, tokens_too)) in enumerate(zip(got, wanted, strict=False)):
        if tokens != tokens_too or not same_draws(s, draws, draws_too):
            raise AssertionError(
                f"{what}: in round {number} it drafted {[d.path for d in draws]} and emitted {tokens}, but alone "
                f"{[d.path for d in draws_too]} and {tokens_too}"
            )
    assert len(got) == len(wanted), f"{what}: {len(got)} rounds instead of {len(wanted)}"


# ---------------------------------------------------------------------------------------------------------------- checks


def declared_law(s: Subject) -> None:
    """The law that a draw declares is the one it was drawn from, after any history of draws."""
    slack = LAW[s.dtype]
    for plan in s.plans:
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
            _same_story(s, got, wanted, f"context {context} beside another batch")


def batch_invariance(s: Subject) -> None:
    """A row of a batch, wherever it stands, comes out as it does alone."""
    order = [len(s.contexts) - 1, 0, len(s.contexts) // 2]
    batch = stories(s, list(play(s, [s.contexts[i] for i in order], [100 + i for i in order])), len(order))
    for i, story in zip(order, batch, strict=True):
        (alone,) = stories(s, list(play(s, [s.contexts[i]], [100 + i])), 1)
        _same_story(s, story, alone, f"context {s.contexts[i]} in a batch")


@torch.no_grad()
def select(s: Subject) -> None:
    """A state reduced to some of its rows, in another order, goes on as those rows alone do."""
    rows = [len(s.contexts) - 1, 0]
    chosen = [s.contexts[i] for i in rows]
    part, alone = stand(s.drafter, s.verifier, s.contexts), stand(s.drafter, s.verifier, chosen)
    part.drafter, part.verifier = s.drafter.select(part.drafter, rows), s.verifier.select(part.verifier, rows)
    part.pending, part.positions = part.pending[rows], [part.positions[i] for i in rows]
    for step in range(2):
        trees = [_propose(s, at, [5, 6], Budget.of(*s.plans[0], batch=2)) for at in (part, alone)]
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
    allowed = ROUND_LAW if s.dtype == torch.float64 else LAW[s.dtype]
    assert defect <= allowed, f"{where}: the law of an emitted token is off by {defect:.2e}"


_CHECKS: dict[str, Callable[[Subject], None]] = {
    "declared-law": declared_law, "budget": budget, "empty-draft": empty_draft, "short-context": short_context,
    "interleaving": interleaving, "batch-invariance": batch_invariance, "select": select, "determinism": determinism,
    "arguments": arguments, "two-rounds": two_rounds,
}  # fmt: skip


def drafter_checks(s: Subject) -> Iterator[tuple[str, Callable[[Subject], None]]]:
    """The named checks of a drafter, end to end with every acceptor that takes its draws."""
    yield from _CHECKS.items()
    for acceptor in s.acceptors:
        if s.drafter.draws <= acceptor.takes:
            yield f"law-{type(acceptor).__name__}", law_with(acceptor)
