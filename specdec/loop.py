"""The loop: one round after another, for plain and speculative decoding alike. `specdec.generate` and `specdec.stream` stand on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from .base import Acceptor, Context, Drafter, Planner, Verifier
from .options import Options
from .ragged import Ragged
from .rng import Rng
from .tree import acceptable, check
from .types import Acceptance, Budget, DraftTree, Int64, Round, Verification
from .warp import invalid

__all__ = ["decode"]

PREFILL_CHUNK = 512
_NO_LAW = (
    "row {row}, node {node}: the target's processed logits are NaN, infinite or all -inf there; look at the model's precision and at the "
    "logits processors"
)


def decode(verifier: Verifier, prompts: Sequence[Int64[Tensor, " _"]], options: Options, *, drafter: Drafter, acceptor: Acceptor,
           planner: Planner, rng: Rng, keep_all: bool = False) -> Iterator[Round]:  # fmt: skip
    """Decode until every row has ended. Rows that end leave the batch.

    Args:
        prompts: one row of token ids each, on the CPU, none empty.
        rng: the randomness of the call; tests pass one that walks every branch.
        keep_all: leave the laws of all nodes in the rounds handed out, not only those of the emitted tokens.
    """
    compatible(drafter, acceptor, options.greedy)
    facts, ends = verifier.facts, options.ends
    ctx = Context(len(prompts), facts, options.warper, options.greedy, max(ends.limits), drafter.needs)
    parts = (verifier, drafter, planner)
    states, warp = [part.begin(ctx) for part in parts], options.warper.begin()
    history = Ragged.empty(len(prompts))
    history.extend([prompt.tolist() for prompt in prompts])
    rows = list(range(len(prompts)))

    def keep(which: list[int]) -> None:
        nonlocal states, warp, history, rows
        states = [part.select(state, which) for part, state in zip(parts, states, strict=True)]
        warp, history, rows = options.warper.select(warp, which), history.select(which), [rows[i] for i in which]

    begun = [i for i, length in enumerate(history.lengths) if ends.room(i, length) > 0]
    if not begun:
        return
    if len(begun) < len(rows):
        keep(begun)
    clock = _Clock()
    with torch.no_grad():
        _prefill(verifier, drafter, states, history)
    clock.stop("prefill")
    while True:
        with torch.no_grad():
            room = [ends.room(row, length) - 1 for row, length in zip(rows, history.lengths, strict=True)]
            budget = planner.plan(states[2], history.lengths)
            if budget.nodes.shape != (len(rows),):
                raise ValueError(
                    f"planner: {type(planner).__name__} planned for {list(budget.nodes.shape)} rows, the batch has {len(rows)}"
                )
            budget = budget.clamp(torch.tensor(room, device="cpu"))
            source = rng.round(rows, [length - 1 for length in history.lengths], facts.device)
            pending = history.last()
            clock.stop("other")
            drafted = drafter.propose(states[1], pending, budget, source)
            _fits(drafted, pending, budget, drafter, facts.vocab_size)
            clock.stop("draft")
            scores = verifier.verify(states[0], drafted)
            clock.stop("verify")
            processed = options.warper.scores(warp, scores.logits, drafted, history.but_last())
            best = processed.argmax(-1) if options.greedy else None
            verification = Verification(processed.log_softmax(-1), best, scores.features)
            tree = drafted.to(facts.device)
            acceptance = acceptor.accept(tree, verification, source)
            decided = _read(tree, verification, acceptance)
            clock.stop("accept")
            # The cut comes before the commit, so that ids, scores, text and cache agree.
            cuts = []
            for i, (row, d) in enumerate(zip(rows, decided, strict=True)):
                cuts.append(ends.scan(row, history.row(i), d.tokens[: d.sound]))
                if d.sound < len(d.tokens) and cuts[i][1] is None:  # no event ended the row before its law was needed
                    raise FloatingPointError(_NO_LAW.format(row=row, node=d.path[d.sound]))
            emitted = tuple(tuple(d.tokens[:n]) for d, (n, _) in zip(decided, cuts, strict=True))
            history.extend(emitted)
            clock.stop("other")
            count = torch.tensor([n for n, _ in cuts], device="cpu")
            path = torch.tensor([d.path for d in decided], device="cpu")
            commit = verifier.commit(states[0], path, count)
            options.warper.commit(warp, path, count)
            clock.stop("commit")
            done = Round(
                rows=tuple(rows), tree=tree, verification=verification, acceptance=acceptance, commit=commit, emitted=emitted,
                logprobs=tuple(tuple(d.logprobs[: len(e)]) for d, e in zip(decided, emitted, strict=True)),
                accepted=tuple(min(len(e), d.accepted) for d, e in zip(decided, emitted, strict=True)),
                attempted=tuple(min(d.attempted, len(e)) for d, e in zip(decided, emitted, strict=True)),
                finish_reason=tuple(reason for _, reason in cuts), seconds=clock.read(),
            )  # fmt: skip
            states[1] = drafter.observe(states[1], commit, done)
            clock.stop("draft")
            states[2] = planner.observe(states[2], done)
            going = [i for i, reason in enumerate(done.finish_reason) if reason is None]
            if 0 < len(going) < len(rows):
                keep(going)
            clock.stop("other")
        yield done if keep_all else _slim(done)
        clock.skip()
        if not going:
            return


def compatible(drafter: Drafter, acceptor: Acceptor, greedy: bool) -> None:
    """Raise `ValueError` if this acceptor can't treat this drafter's draws, or follows another rule than the options ask for."""
    unknown = drafter.draws - acceptor.takes
    if unknown:
        raise ValueError(
            f"acceptor: {type(acceptor).__name__} treats {_names(acceptor.takes)} draws exactly, but {type(drafter).__name__} may make "
            f"{_names(unknown)} ones; choose an acceptor that takes them, or acceptor=None"
        )
    if greedy != acceptor.greedy:
        rule, wanted = ("greedy", "do_sample=False") if acceptor.greedy else ("sampling", "do_sample=True")
        raise ValueError(
            f"acceptor: {type(acceptor).__name__} is a {rule} rule and needs {wanted}; with acceptor=None the rule follows do_sample"
        )


def _names(kinds: frozenset) -> str:
    return ", ".join(kind.name.lower() for kind in sorted(kinds)) or "no"


def _prefill(verifier: Verifier, drafter: Drafter, states: list, prompts: Ragged) -> None:
    """All but the last prompt token become permanent, in chunks; the last one is the first pending token."""
    lengths = torch.tensor(prompts.lengths, device="cpu") - 1
    for start in range(0, int(lengths.max()), PREFILL_CHUNK):
        count = (lengths - start).clamp(0, PREFILL_CHUNK)
        tokens = prompts.ids[:, start : start + int(count.max())]
        states[1] = drafter.observe(states[1], verifier.extend(states[0], tokens, count))


def _fits(tree: DraftTree, pending: Int64[Tensor, " B"], budget: Budget, drafter: Drafter, vocab_size: int) -> None:
    check(tree, pending, budget, vocab_size, sums=True)
    if not tree.draws.kinds <= drafter.draws:
        raise ValueError(
            f"drafter: {type(drafter).__name__}.draws declares {_names(drafter.draws)}, but its tree holds {_names(tree.draws.kinds)} draws"
        )


@dataclass(frozen=True)
class _Decision:
    """What the host knows of one row's acceptance."""

    path: list[int]
    tokens: list[int]
    logprobs: list[float]
    accepted: int
    attempted: int
    sound: int
    """How many of the tokens, from the first on, came from a law that is one."""


def _read(tree: DraftTree, verification: Verification, acceptance: Acceptance) -> list[_Decision]:
    """Bring the round's outcome to the host in a single transfer, which is the only wait for the device in a round."""
    path, count = acceptance.path[:, : tree.height + 1], acceptance.count
    node, width = path.clamp_min(0), path.shape[1]
    last = count[:, None] - 1
    after = torch.nn.functional.pad(tree.tokens.gather(1, node)[:, 1:], (0, 1))
    tokens = after.scatter(1, last, acceptance.next_token[:, None])
    batch = torch.arange(len(node), device=node.device)[:, None]
    logprobs = verification.logp[batch, node, tokens]
    bad = invalid(verification.logp).gather(1, node)
    more = ((tree.parents == node.gather(1, last)) & acceptable(tree)).any(-1, keepdim=True)
    packed = torch.cat([x.double() for x in (count[:, None], more, path, tokens, bad, logprobs)], 1).tolist()
    decisions = []
    for n, going, *rest in packed:
        n = int(n)
        nodes, new, broken, scores = (rest[i * width : i * width + (width if i == 0 else n)] for i in range(4))
        sound = broken.index(1) if any(broken) else n
        decisions.append(_Decision([int(x) for x in nodes], [int(x) for x in new], scores, n - 1, n - 1 + int(going), sound))
    return decisions


def _slim(done: Round) -> Round:
    """The round with the laws of its emitted tokens alone: row j is the law that emitted token j was drawn from."""
    longest = max(map(len, done.emitted))
    node = done.acceptance.path[:, :longest].clamp_min(0)
    logp = done.verification.logp
    rows = logp.gather(1, node[..., None].expand(-1, -1, logp.shape[-1]))
    return replace(done, verification=Verification(rows), commit=replace(done.commit, features=None), tree=replace(done.tree, laws=None))


class _Clock:
    """Seconds by phase since the last reading."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = perf_counter()

    def stop(self, phase: str) -> None:
        now = perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Forget what passed since the last stop: the caller's own time."""
        self._last = perf_counter()

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds
