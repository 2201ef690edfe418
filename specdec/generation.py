"""What users call: `generate` for a finished text, `stream` for one round after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from .acceptors import BlockAcceptor, GreedyAcceptor, MatchAcceptor, TraversalAcceptor
from .base import Acceptor, Drafter, Planner, Verifier
from .loop import compatible, decode
from .options import resolve
from .planning import FixedPlanner
from .ragged import pad_rows, unpad_rows
from .rng import CounterRng, derive_seeds
from .session import Session
from .stats import Stats
from .types import Int64, Kind, Round
from .verifiers.factory import make_verifier

__all__ = ["Generation", "Streamer", "check_parts", "default_acceptor", "generate", "stream"]


@runtime_checkable
class Streamer(Protocol):
    """What transformers' streamers do."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Generation:
    """A finished call."""

    sequences: Int64[Tensor, "B L"]
    """Prompt and new tokens without the prompt's padding, padded on the right with the pad token."""
    lengths: Int64[Tensor, " B"]
    """Real tokens in each row of `sequences`."""
    new_tokens: list[Int64[Tensor, " _"]]
    logprobs: list[Tensor]
    """For each new token its log-probability under the target's processed law."""
    finish_reason: list[str]
    """"eos", "stop" (a stop string), "criteria" (a stopping criterion of the caller), "length" or "context" (the target's limit)."""
    stats: Stats
    session: Session | None
    """The target's cache, the drafter's state and all tokens, to be passed to the next turn. It keeps the cache alive: `session.close()`
    lets go of it. `None` for a batch of several rows to which none was passed: of those, rows that end leave their cache."""
    seeds: list[int]
    """The seeds used, one per row: passed as `seed` they give the same text again."""
    rounds: list[Round] | None = None


def default_acceptor(drafter: Drafter, greedy: bool) -> Acceptor:
    """The lossless rule that accepts most of what this drafter draws, as a rule: surely of chains, and of points."""
    if greedy:
        return GreedyAcceptor()
    if drafter.draws <= {Kind.POINT}:
        return MatchAcceptor()
    return BlockAcceptor() if drafter.chains else TraversalAcceptor()


def check_parts(drafter: Any, acceptor: Any, verifier: Any, planner: Any) -> None:
    """Raise `TypeError` for what is no part of its kind; all but the drafter may be `None`. Warn of a rule that is not lossless."""
    for name, part, kind in (("drafter", drafter, Drafter), ("acceptor", acceptor, Acceptor), ("verifier", verifier, Verifier),
                             ("planner", planner, Planner)):  # fmt: skip
        if not isinstance(part, kind) and (part is not None or kind is Drafter):
            given = part.__name__ if isinstance(part, type) else repr(part)
            raise TypeError(f"{name}: got {given}; give an instance of a subclass of specdec.{kind.__name__}")
    if acceptor is not None and not acceptor.lossless:
        warnings.warn(f"acceptor: {acceptor!r} is lossy: the law of the text will not be the target's", stacklevel=4)


def stream(model: Any, input_ids: Any, *, drafter: Any, **arguments: Any) -> Iterator[Round]:
    """Like `generate`, but hands out every round as it is done. Everything is checked before the first round.

    Yields:
        `Round`: `emitted[i]` are the new tokens of row `rows[i]`; rows that have ended are missing from later rounds.
    """
    return _Call(model, input_ids, drafter=drafter, **arguments).run()


def generate(model: Any, input_ids: Any, *, drafter: Any, streamer: Streamer | None = None,
             return_rounds: bool | str = False, **arguments: Any) -> Generation:  # fmt: skip
    """Decode with drafts that the target checks; the law of the text is exactly the target's.

    Args:
        model: a Hugging Face decoder-only model, or anything that `specdec.verifiers.make_verifier` takes.
        input_ids: `[B, L]` int64 with `attention_mask` where it is padded (on either side), or a list of rows.
        drafter: what guesses; `NullDrafter()` is plain decoding.
        acceptor: the rule; left out, a lossless one that suits the drafter's draws: see `default_acceptor`.
        verifier: how the target is run; left out, one tree pass a round.
        planner: how much is drafted; left out, 10 tokens a round.
        attention_mask: `[B, L]`, 0 at padding.
        generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, tokenizer: as in `model.generate`.
        streamer: as in transformers, for a batch of one: `put(prompt)`, then the tokens of each round, then `end()`.
        session: of the turn before (`Generation.session`), with the whole conversation in `input_ids`: what it shares with the
            session's text is not read again. The call consumes and advances it. A cache of transformers that holds the beginning of
            `input_ids` is copied.
        seed: one integer per row, or one for all to derive the rows' from; fresh if left out.
        return_rounds: keep every `Round`; "all" keeps the laws of rejected nodes too.
        **generation_kwargs: what `GenerationConfig` knows. What can't be honoured is refused.
    """
    if return_rounds not in (False, True, "all"):
        raise ValueError(f"return_rounds: got {return_rounds!r}, allowed are False, True and 'all'")
    call = _Call(model, input_ids, drafter=drafter, keep_all=return_rounds == "all", **arguments)
    if streamer is not None:
        if len(call.prompts) != 1:
            raise ValueError(f"streamer: it shows one text, but the batch has {len(call.prompts)} rows; use specdec.stream")
        streamer.put(call.prompts[0][None])
    new: list[list[int]] = [[] for _ in call.prompts]
    logprobs: list[list[float]] = [[] for _ in call.prompts]
    reasons = [call.options.ends.why_not(row, len(prompt)) or "" for row, prompt in enumerate(call.prompts)]  # the rest: their last round
    stats, rounds = Stats(), []
    for done in call.run():
        stats = stats + Stats.of(done)
        if return_rounds:
            rounds.append(done)
        for row, tokens, scores, reason in zip(done.rows, done.emitted, done.logprobs, done.finish_reason, strict=True):
            new[row] += tokens
            logprobs[row] += scores
            reasons[row] = reason or reasons[row]
            if streamer is not None:
                streamer.put(torch.tensor(tokens, device="cpu"))
    if streamer is not None:
        streamer.end()
    device = call.verifier.facts.device
    sequences, lengths = pad_rows([[*p.tolist(), *n] for p, n in zip(call.prompts, new, strict=True)], call.options.pad)
    texts = [torch.tensor(n, dtype=torch.int64, device=device) for n in new]
    scores = [torch.tensor(s, dtype=torch.float64, device="cpu") for s in logprobs]
    kept = rounds if return_rounds else None
    session = call.session if call.session is not None and call.session.begun else None
    return Generation(sequences.to(device), lengths.to(device), texts, scores, reasons, stats, session, call.seeds, kept)


class _Call:
    """One call, its arguments resolved and checked."""

    def __init__(self, model: Any, input_ids: Any, *, drafter: Any, acceptor: Any = None, verifier: Any = None,
                 planner: Any = None, attention_mask: Any = None,
                 generation_config: GenerationConfig | None = None, logits_processor: Sequence[Any] | None = None,
                 stopping_criteria: Sequence[Any] | None = None, tokenizer: PreTrainedTokenizerBase | None = None,
                 prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
                 session: Any = None, seed: Any = None, keep_all: bool = False, **generation_kwargs: Any) -> None:  # fmt: skip
        check_parts(drafter, acceptor, verifier, planner)
        self.verifier, defaults = make_verifier(model, verifier)
        self.prompts = unpad_rows(input_ids, attention_mask)
        self.options = resolve(
            self.prompts, facts=self.verifier.facts, defaults=defaults, generation_config=generation_config,
            logits_processor=logits_processor, stopping_criteria=stopping_criteria, tokenizer=tokenizer,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn, **generation_kwargs,
        )  # fmt: skip
        self.drafter = drafter
        self.acceptor = default_acceptor(drafter, self.options.greedy) if acceptor is None else acceptor
        compatible(drafter, self.acceptor, self.options.greedy)
        self.planner = FixedPlanner(10) if planner is None else planner
        self.seeds = derive_seeds(seed, len(self.prompts))
        self.model = model if verifier is None else verifier
        if session is not None and not isinstance(session, Session):
            mask = None if attention_mask is None else torch.atleast_2d(torch.as_tensor(attention_mask)) == 1
            session = Session.around(session, mask, self.prompts, model=self.model, verifier=self.verifier)
        # Of a single row no more than what is there anyway is kept.
        self.session = Session() if session is None and len(self.prompts) == 1 else session
        self.keep_all = keep_all

    def run(self) -> Iterator[Round]:
        return decode(
            self.verifier, self.prompts, self.options, drafter=self.drafter, acceptor=self.acceptor, planner=self.planner,
            rng=CounterRng(self.seeds), keep_all=self.keep_all, session=self.session, model=self.model,
        )  # fmt: skip
