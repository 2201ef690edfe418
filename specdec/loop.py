"""The loop: one round after another, for plain and speculative decoding alike. `specdec.generate` and `specdec.stream` stand on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .base import Acceptor, Context, Drafter, Planner, Verifier
from .options import Options
from .ragged import Ragged
from .rng import Rng
from .session import Session
from .tree import answer_form, check, check_answer, evidence
from .types import PAD, Acceptance, Budget, DraftTree, Float, Int64, Kind, Round, Verification, sent
from .warp import invalid

__all__ = ["compatible", "decode", "treats"]

PREFILL_CHUNK = 512
_NO_LAW = (
    "row {row}, node {node}: the target's processed logits are NaN, infinite or all -inf there; look at the model's precision and at the "
    "logits processors"
)


def decode(verifier: Verifier, prompts: Sequence[Int64[Tensor, " _"]], options: Options, *, drafter: Drafter, acceptor: Acceptor,
           planner: Planner, rng: Rng, keep_all: bool = False, session: Session | None = None, model: Any = None,
           skip: Sequence[int] | None = None) -> Iterator[Round]:  # fmt: skip
    """Decode until every row has ended. Rows that end leave the batch, or with a session wait in it.

    Args:
        prompts: one row of token ids each, on the CPU, none empty.
        rng: the randomness of the call; tests pass one that walks every branch.
        keep_all: leave the laws of all nodes in the rounds handed out, not only those of the emitted tokens.
        session: gone on with from where it stands, and advanced.
        model: to whom the session belongs.
        skip: how many tokens at the beginning of each row are padding, which processors and criteria are shown and nobody else.
    """
    compatible(drafter, acceptor, options.greedy)
    facts, ends = verifier.facts, options.ends
    ctx = Context(len(prompts), facts, options.warper, options.greedy, max(ends.limits), drafter.needs)
    parts = (verifier, drafter, planner)
    shown = Ragged.empty(len(prompts))
    shown.extend([prompt.tolist() for prompt in prompts])
    rows, skip = list(range(len(prompts))), list(skip or [0] * len(prompts))
    reasons = [ends.why_not(i, length) for i, length in enumerate(shown.lengths)]
    if None not in reasons:
        return
    call, warp, plan = object(), options.warper.begin(), planner.begin(ctx)
    if session is None:
        read, *states = [0] * len(rows), verifier.begin(ctx), drafter.begin(ctx)
    else:  # last of all, so that what is refused before leaves it as it was
        read, *states = session.resume(call, model, verifier, drafter, ctx, shown.behind(skip))
    states.append(plan)

    def keep(which: list[int]) -> None:
        nonlocal states, warp, shown, rows, skip, reasons
        states = [part.select(state, which) for part, state in zip(parts, states, strict=True)]
        warp, shown = options.warper.select(warp, which), shown.select(which)
        rows, skip, reasons = [rows[i] for i in which], [skip[i] for i in which], [reasons[i] for i in which]

    if session is None and any(reasons):
        keep(going := [i for i, reason in enumerate(reasons) if reason is None])
        read = [read[i] for i in going]
    clock = _Clock()
    with torch.no_grad():
        prefilled = _prefill(verifier, drafter, states, shown.behind(skip), read)
    clock.stop("prefill")
    while True:
        with torch.no_grad():
            if session is not None:
                session.leave(call)
            lengths = [length - n for length, n in zip(shown.lengths, skip, strict=True)]
            room = [ends.room(row, length) - 1 for row, length in zip(rows, shown.lengths, strict=True)]
            room = [0 if reason else n for n, reason in zip(room, reasons, strict=True)]
            budget = planner.plan(states[2], lengths)
            if budget.nodes.shape != (len(rows),):
                raise ValueError(
                    f"planner: {type(planner).__name__} planned for {list(budget.nodes.shape)} rows, the batch has {len(rows)}"
                )
            budget = budget.clamp(torch.tensor(room, device="cpu"))
            source = rng.round(rows, [length - 1 for length in lengths], facts.device)
            pending = shown.last()
            clock.stop("other")
            drafted = drafter.propose(states[1], pending, budget, source)
            remote = drafted.tokens.device.type != "cpu"
            if not remote:
                _fits(drafted, pending, budget, drafter, facts.vocab_size, None)
            elif drafted.tokens.shape[1] > 1 + int(budget.nodes.max()):  # the rest can be seen when it is read
                raise ValueError(
                    f"tree: it has {drafted.tokens.shape[1]} nodes, more than the budget of {budget.nodes.tolist()} and the root"
                )
            there = drafted.to(facts.device)
            clock.stop("draft")
            scores = verifier.verify(states[0], there)
            clock.stop("verify")
            processed = options.warper.scores(warp, scores.logits, _without(drafted, reasons), shown.but_last())
            best = processed.max(-1).indices if options.greedy else None  # on the CPU twice as fast as argmax
            verification = Verification(scores=processed, best=best, features=scores.features, logits=scores.logits)
            acceptance = acceptor.accept(there, verification, source)
            answer_form(there, acceptance)
            tree, told, decided, kept, known = _read(there, None if remote else drafted, verification, acceptance)
            if remote:
                _fits(tree, pending, budget, drafter, facts.vocab_size, known)
            check_answer(tree, told, facts.vocab_size)
            clock.stop("accept")
            # The cut comes before the commit, so that ids, scores, text and cache agree.
            cuts = []
            for i, (row, d) in enumerate(zip(rows, decided, strict=True)):
                cuts.append((0, reasons[i]) if reasons[i] else ends.scan(row, shown.row(i), d.tokens[: d.sound]))
                if d.sound < len(d.tokens) and cuts[i][1] is None:  # no event ended the row before its law was needed
                    raise FloatingPointError(_NO_LAW.format(row=row, node=d.path[d.sound]))
            emitted = tuple(tuple(d.tokens[:n]) for d, (n, _) in zip(decided, cuts, strict=True))
            shown.extend(emitted)
            clock.stop("other")
            count = torch.tensor([n for n, _ in cuts], device="cpu")
            path = torch.tensor([d.path for d in decided], device="cpu")
            commit = verifier.commit(states[0], path, count)
            options.warper.commit(warp, path, count)
            clock.stop("commit")
            reasons = [reason for _, reason in cuts]
            done = Round(
                rows=tuple(rows), tree=tree, verification=verification, acceptance=acceptance,
                commit=replace(commit, tokens=tree.tokens.gather(1, path.clamp_min(0))), emitted=emitted,
                logprobs=tuple(tuple(d.logprobs[: len(e)]) for d, e in zip(decided, emitted, strict=True)),
                accepted=tuple(min(len(e), d.accepted) for d, e in zip(decided, emitted, strict=True)),
                attempted=tuple(min(d.attempted, len(e)) for d, e in zip(decided, emitted, strict=True)),
                finish_reason=tuple(reasons), seconds=clock.so_far(), prefilled=prefilled, lossless=acceptor.lossless,
            )  # fmt: skip
            states[1] = drafter.observe(states[1], done.commit, done)
            clock.stop("draft")
            states[2] = planner.observe(states[2], done)
            if session is not None:
                session.save(model, drafter, shown, skip, states)
            going = [i for i, reason in enumerate(reasons) if reason is None]
            if session is None and 0 < len(going) < len(rows):
                keep(going)
            prefilled = 0
            clock.stop("other")
            done = replace(done, seconds=clock.read())
        yield done if keep_all else _slim(done, kept)
        clock.skip()
        if not going:
            return


def treats(acceptor: Acceptor, drafter: Drafter) -> bool:
    """Whether the acceptor treats all that the drafter may draw exactly."""
    return drafter.draws <= acceptor.takes and (drafter.chains or not (acceptor.chains or _asks_widths(acceptor, drafter)))


def _asks_widths(acceptor: Acceptor, drafter: Drafter) -> bool:
    return acceptor.fixed_widths and not drafter.fixed_widths and Kind.IID in drafter.draws


def compatible(drafter: Drafter, acceptor: Acceptor, greedy: bool) -> None:
    """Raise `ValueError` if this acceptor can't treat this drafter's draws, or follows another rule than the options ask for."""
    unknown = drafter.draws - acceptor.takes
    if unknown:
        raise ValueError(
            f"acceptor: {type(acceptor).__name__} treats {_names(acceptor.takes)} draws exactly, but {type(drafter).__name__} may make "
            f"{_names(unknown)} ones; choose an acceptor that takes them, or acceptor=None"
        )
    if acceptor.chains and not drafter.chains:
        raise ValueError(
            f"acceptor: {type(acceptor).__name__} verifies chains, and {type(drafter).__name__} may draft trees (its `chains` is False); "
            "choose an acceptor for trees, or acceptor=None, or set chains = True on the drafter if it drafts nothing else"
        )
    if not drafter.chains and _asks_widths(acceptor, drafter):
        raise ValueError(
            f"acceptor: {type(acceptor).__name__} needs to know how many samples are drawn below a node before the first of them is, and "
            f"{type(drafter).__name__} does not say so (its `fixed_widths` is False); choose another acceptor, or acceptor=None"
        )
    if greedy != acceptor.greedy:
        rule, wanted = ("greedy", "do_sample=False") if acceptor.greedy else ("sampling", "do_sample=True")
        raise ValueError(
            f"acceptor: {type(acceptor).__name__} is a {rule} rule and needs {wanted}; with acceptor=None the rule follows do_sample"
        )


def _names(kinds: frozenset) -> str:
    return ", ".join(kind.name.lower() for kind in sorted(kinds)) or "no"


def _prefill(verifier: Verifier, drafter: Drafter, states: list, prompts: Ragged, read: Sequence[int]) -> int:
    """All but the last prompt token become permanent, in chunks, if they are not yet; the last one is the first pending token. How
    many tokens that were."""
    begin = torch.tensor(list(read), device="cpu")
    todo = torch.tensor(prompts.lengths, device="cpu") - 1 - begin
    for start in range(0, int(todo.max()), PREFILL_CHUNK):
        count = (todo - start).clamp(0, PREFILL_CHUNK)
        tokens = prompts.window((begin + start).tolist(), int(count.max()))
        states[1] = drafter.observe(states[1], verifier.extend(states[0], tokens, count))
    return int(todo.sum())


def _fits(tree: DraftTree, pending: Int64[Tensor, " B"], budget: Budget, drafter: Drafter, vocab_size: int, known: Tensor | None) -> None:
    check(tree, pending, budget, vocab_size, sums=True, known=known, chain=drafter.chains)
    if not tree.draws.kinds <= drafter.draws:
        raise ValueError(
            f"drafter: {type(drafter).__name__}.draws declares {_names(drafter.draws)}, but its tree holds {_names(tree.draws.kinds)} draws"
        )


def _without(tree: DraftTree, reasons: Sequence[str | None]) -> DraftTree:
    """The tree without the rows that have ended: a processor must not be asked what follows."""
    if not any(reasons):
        return tree
    over = sent([reason is not None for reason in reasons], tree.parents.device)
    return DraftTree(tree.tokens, torch.where(over[:, None], PAD, tree.parents))


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


def _read(there: DraftTree, here: DraftTree | None, verification: Verification,
          acceptance: Acceptance) -> tuple[DraftTree, Acceptance, list[_Decision], Float[Tensor, "B D V"], Tensor | None]:  # fmt: skip
    """Bring the round's outcome to the host in a single transfer, which is the only wait for the device in a round.

    Args:
        there: the tree on the device.
        here: the same on the host, if that is where it was drafted; else it comes along.

    Returns:
        The tree and the answer on the host; what was decided, if the answer is one; the scores after the accepted nodes, where they are;
        and the `evidence` of the tree's laws if it was not on the host before.
    """
    count, nodes, vocab_size = acceptance.count, there.tokens.shape[1], verification.scores.shape[-1]
    # Where reading costs nothing, no law is normalised that is not needed.
    width = min(max(1, int(count.max())) if count.device.type == "cpu" else there.height + 1, acceptance.path.shape[1])
    path, following = acceptance.path[:, :width], acceptance.next_token[:, None]
    node = path.clamp(0, nodes - 1)  # what lies beyond is told of when it has been read
    after = torch.nn.functional.pad(there.tokens.gather(1, node)[:, 1:], (0, 1))
    tokens = after.scatter(1, (count[:, None] - 1).clamp(0, width - 1), following.clamp(0, vocab_size - 1))
    scores = verification.scores[torch.arange(len(node), device=node.device)[:, None], node]
    logp = scores.log_softmax(-1)
    known = evidence(there) if here is None else None
    parts = [count[:, None], path, following, tokens, invalid(logp), logp.gather(-1, tokens[..., None])[..., 0]]
    if here is None:
        draws = there.draws
        parts += [there.tokens, there.parents, draws.node, draws.kind, draws.law, *([] if known is None else [known.flatten(1)])]
    packed = torch.cat([part.double() for part in parts], 1).cpu().split([part.shape[1] for part in parts], 1)
    if here is None:
        known = None if known is None else packed[11].unflatten(1, (-1, 3))
        words, parents, at, kind, law = (part.long() for part in packed[6:11])
        here = replace(there, tokens=words, parents=parents, draws=replace(there.draws, node=at, kind=kind, law=law))
    told = acceptance if count.device.type == "cpu" else Acceptance(*(x.long() for x in (packed[1], packed[0][:, 0], packed[2][:, 0])))
    columns = (told.count.tolist(), told.path[:, :width].tolist(), packed[3].long().tolist(), packed[4].tolist(), packed[5].tolist())
    decisions = []
    for n, walked, new, bad, row, parents, drawn in zip(*columns, here.parents.tolist(), here.draws.node.tolist(), strict=True):
        going = any(0 < at < nodes and parents[at] == walked[min(n, width) - 1] for at in drawn)
        decisions.append(_Decision(walked, new[:n], row[:n], n - 1, n - 1 + going, bad.index(1) if 1 in bad[:n] else n))
    return here, told, decisions, scores, known


def _slim(done: Round, scores: Float[Tensor, "B D V"]) -> Round:
    """The round with the laws of its emitted tokens alone: row j is the law that emitted token j was drawn from."""
    rows = scores[:, : max(map(len, done.emitted))]
    return replace(
        done, verification=Verification(scores=rows), commit=replace(done.commit, features=None), tree=replace(done.tree, laws=None)
    )


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

    def so_far(self) -> dict[str, float]:
        return dict(self._seconds)

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds
