"""A smaller model guesses: the draft model of Leviathan et al. 2023 and Chen et al. 2023."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ..base import Context, Drafter
from ..cache import FullCache, causal_target
from ..ragged import Ragged
from ..rng import Purpose, Source
from ..tree import root_only
from ..types import PAD, ROOT, Bool, Budget, Commit, DraftTree, Draws, Float, Int64, Kind, Round, sent
from ..warp import Warper, WarpState

__all__ = ["ModelDrafter"]

_CHUNK = 512
_FEW = 16
"""Tokens that a pass may read for which logits are wanted: they are as wide as the vocabulary."""


@runtime_checkable
class _Tokenizer(Protocol):
    def get_vocab(self) -> Mapping[str, int]: ...


@dataclass
class _State:
    """One call. The cache holds a prefix of the committed tokens, and between `propose` and `observe` what was drafted behind them."""

    ctx: Context
    warper: Warper
    batch_warp: WarpState
    """Of all rows, for a warper that remembers nothing."""
    warp: list[WarpState]
    """Of each row, for any other: it has seen every token whose keys and values the cache holds, those of the prompt left out."""
    ids: Ragged
    cache: FullCache
    prompt: list[int]
    """How many tokens of each row were prompt, after which no processor is called."""
    pending: list[int] = field(default_factory=list)
    fed: list[Int64[Tensor, " B"]] = field(default_factory=list)
    """Drafted tokens that the draft model read, left on their device. How many of them count in a row, the cache knows."""
    trail: list[list[WarpState]] = field(default_factory=list)
    """Where each row's processors stood after the pending token and after each of `fed`."""


class ModelDrafter(Drafter):
    """Drafts a chain, one token after another, with a causal language model of its own.

    The model reads each committed token once, in a cache of its own; a round's first pass reads what the last one left over. It may be
    on another device and of another dtype than the target. Where its vocabulary is larger the surplus is never drafted; where it is
    smaller, committed tokens that it does not know are read as its token 0, which makes for a worse guess there and for nothing else.
    Rows that outgrow its context are no longer drafted for. Logits of NaN are no error here: a draft that is nonsense is rejected (it
    goes on with token 0, as a draw that was sure to come out so).

    Args:
        model: a decoder-only model of Hugging Face transformers, or a `CausalTarget`. Its ids must mean what the target's mean.
        tokenizer, target_tokenizer: give both and that is checked, token by token.
        sample: draw each token from the model's law. Without it, or when decoding greedily, the most likely one is taken.
        logits_processor: what shapes the draft model's law. Left out, what shapes the target's, which is best for acceptance; an empty
            list leaves the softmax as it is. One that raises behind a drafted token ends that row's draft.

    Raises:
        TypeError: it is not clear how to run the model, or a processor with memory can't be copied.
        ValueError: the model can't be used; one tokenizer was given without the other; the two give different tokens one id.
    """

    def __init__(self, model: Any, *, tokenizer: _Tokenizer | None = None, target_tokenizer: _Tokenizer | None = None, sample: bool = True,
                 logits_processor: Sequence[Callable[..., Any]] | None = None) -> None:  # fmt: skip
        if (tokenizer is None) != (target_tokenizer is None):
            given, missing = ("tokenizer", "target_tokenizer") if target_tokenizer is None else ("target_tokenizer", "tokenizer")
            raise ValueError(f"{missing}: got {given} alone; give both, to have them compared, or neither")
        if tokenizer is not None and target_tokenizer is not None:
            _check_tokens(tokenizer.get_vocab(), target_tokenizer.get_vocab())
        self._model = causal_target(model)
        self._sample = sample
        self._processors = None if logits_processor is None else list(logits_processor)
        self._warper(1)  # refuses what can't be used
        self.draws = frozenset({Kind.POINT, Kind.IID} if sample else {Kind.POINT})

    def _warper(self, batch: int) -> Warper:
        return Warper([[processor] * batch for processor in self._processors or ()], batch=batch)

    def begin(self, ctx: Context) -> _State:
        warper = ctx.warper if self._processors is None else self._warper(ctx.batch)
        warp = warper.begin()
        rows = [warper.select(warp, [row]) for row in range(ctx.batch)]
        return _State(ctx, warper, warp, rows, Ragged.empty(ctx.batch), self._model.new_cache(ctx.batch), [0] * ctx.batch)

    def propose(self, state: _State, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        _forget_draft(state)
        state.pending, state.fed, state.trail = pending.tolist(), [], [[] for _ in pending]
        # The last drafted token is not read, so it may lie one behind the draft model's last position.
        wanted = [min(n, self._room(length)) for n, length in zip(budget.chain.tolist(), state.ids.lengths, strict=True)]
        if max(wanted) <= 0:
            return root_only(pending)
        text = Ragged(state.ids.ids, list(state.ids.lengths))  # the same memory: what is written behind the committed tokens is scrap
        text.extend([[token] for token in state.pending])
        logits = self._catch_up(state, text, wanted)
        tokens, laws = [], []
        while True:
            step = len(tokens)
            scores = self._scores(state, text, logits, wanted, step)
            if step >= max(wanted):  # the processors ended every draft
                break
            active = sent([n > step for n in wanted], scores.device)
            token, law = self._draw(state, scores, source, step, active)
            tokens.append(token)
            laws += [] if law is None else [law]
            if step + 1 >= max(wanted):
                break
            if not state.warper.free:
                text.extend([[t] if n > step else [] for t, n in zip(token.tolist(), wanted, strict=True)])
            state.fed.append(token)
            logits = cast(Tensor, self._feed(state.cache, token[:, None], [int(n > step + 1) for n in wanted], logits=True))[:, 0]
        return _chain(pending, tokens, laws, wanted)

    def observe(self, state: _State, commit: Commit, round: Round | None = None) -> _State:
        fed = torch.stack(state.fed, 1).tolist() if state.fed else [[]] * len(state.warp)
        keep = []
        for row, (tokens, count) in enumerate(zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)):
            known, had = state.cache.lengths[row], state.ids.lengths[row]
            drafted = [*state.pending[row : row + 1], *fed[row]][: max(0, known - had)]
            same = _agree(drafted, tokens[:count])
            if not state.warper.free and drafted:
                same = min(same, len(state.trail[row]))  # where a processor refused to go on it will be asked again
                state.warp[row] = state.trail[row][same - 1] if same else state.warp[row]
            keep.append(min(known, had + same))
        state.cache.rewind(keep)
        state.ids.extend(commit.tokens, commit.count)
        state.pending, state.fed, state.trail = [], [], []
        if round is None:
            state.prompt = list(state.ids.lengths)
            self._read_prompt(state)
        return state

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        _forget_draft(state)
        return _State(
            state.ctx, state.warper, state.warper.select(state.batch_warp, rows), [state.warp[row] for row in rows],
            state.ids.select(rows), state.cache.select(rows), [state.prompt[row] for row in rows],
        )  # fmt: skip

    def resume(self, state: _State, ctx: Context) -> _State:
        _forget_draft(state)  # what is read stays read; processors begin anew, as they do for the target
        return replace(self.begin(ctx), ids=state.ids, cache=state.cache, prompt=list(state.ids.lengths))

    # -------------------------------------------------------------------------------------------------------- the draft model

    def _room(self, length: int) -> int:
        limit = self._model.facts.max_positions
        return 1 << 62 if limit is None else limit - length

    def _feed(self, cache: FullCache, tokens: Int64[Tensor, "B T"], count: Sequence[int], *, logits: bool) -> Tensor | None:
        """One pass over the first `count` of each row's tokens, which are kept."""
        facts, (batch, width) = self._model.facts, tokens.shape
        steps, counts = torch.arange(width, device="cpu"), torch.tensor(count, device="cpu")
        # Whatever stands behind a row's last token repeats its position: one more could lie beyond the model's last.
        positions = torch.tensor(cache.lengths, device="cpu")[:, None] + torch.minimum(steps, (counts[:, None] - 1).clamp_min(0))
        if facts.max_positions is not None:
            positions = positions.clamp_max(facts.max_positions - 1)
        tokens = torch.where(tokens < facts.vocab_size, tokens, 0)
        cache.open(width)
        mask = None if cache.aligned else cache.mask(sent((steps <= steps[:, None]).expand(batch, -1, -1), facts.device))
        found, _ = self._model.forward(sent(tokens, facts.device), sent(positions, facts.device), mask, cache, logits=logits)
        cache.commit(steps.expand(batch, -1), counts)
        return found

    def _read_prompt(self, state: _State) -> None:
        while any(count := [min(_CHUNK, n, self._room(have)) for n, have in _missing(state.cache, state.ids)]):
            self._feed(state.cache, _window(state.ids, state.cache.lengths, count), count, logits=False)

    def _catch_up(self, state: _State, text: Ragged, wanted: Sequence[int]) -> Float[Tensor, "B W"]:
        """Read what is missing of the rows that are drafted for; the logits after their last token."""
        walks = state.warper.walks
        while True:
            missing = [n if want > 0 else 0 for (n, _), want in zip(_missing(state.cache, text), wanted, strict=True)]
            far = max(missing) > _FEW  # all but the last token first; of them logits are wanted only to be shown to processors
            count = [max(0, min(_FEW if walks else _CHUNK, n - 1)) for n in missing] if far else missing
            begin = list(state.cache.lengths)
            logits = self._feed(state.cache, _window(text, begin, count), count, logits=walks or not far)
            if logits is None:
                continue
            if walks:
                for row, (start, n) in enumerate(zip(begin, count, strict=True)):
                    for i in range(max(0, state.prompt[row] - start), n if far else n - 1):
                        fitted = self._fit(state, logits[row, i])
                        _, state.warp[row] = self._show(state, state.warp[row], text, row, start + i, fitted)
            if not far:
                last = sent(count, logits.device)[:, None, None] - 1
                return logits.gather(1, last.clamp_min(0).expand(-1, -1, logits.shape[-1]))[:, 0]

    # ------------------------------------------------------------------------------------------------------ from logits to draws

    def _fit(self, state: _State, logits: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows V"]:
        """Over the target's vocabulary and on its device, in float32 or float64; in the latter if the target is, so that the declared
        laws are as exact as the target's."""
        facts = state.ctx.target
        wide = torch.float64 in (facts.dtype, logits.dtype)
        logits = logits[..., : facts.vocab_size].to(facts.device, torch.float64 if wide else torch.float32)
        return torch.nn.functional.pad(logits, (0, facts.vocab_size - logits.shape[-1]), value=-torch.inf)

    def _scores(self, state: _State, text: Ragged, logits: Float[Tensor, "B W"], wanted: list[int], step: int) -> Float[Tensor, "B V"]:
        """The processed scores of the token to be drawn. `wanted` is lowered to `step` where a processor refuses to go on."""
        fitted = self._fit(state, logits)
        if state.warper.free:
            tree = root_only(torch.zeros(len(wanted), dtype=torch.int64, device="cpu"))  # at which nobody looks
            return state.warper.scores(state.batch_warp, fitted[:, None], tree, state.ids)[:, 0]
        scores = list(fitted)
        for row in (row for row, n in enumerate(wanted) if n > step):
            before = state.trail[row][-1] if step else state.warp[row]
            try:
                scores[row], after = self._show(state, before, text, row, text.lengths[row] - 1, fitted[row])
                state.trail[row].append(after)
            except Exception:
                if step == 0:  # behind the pending token, which is really there: plain decoding raises too
                    raise
                wanted[row] = step
        return torch.stack(scores)

    def _show(self, state: _State, warp: WarpState, text: Ragged, row: int, at: int,
              fitted: Float[Tensor, " V"]) -> tuple[Float[Tensor, " V"], WarpState]:  # fmt: skip
        """Have a row's processors see the token at this place: the scores after it, and where the processors stand then."""
        after = state.warper.fork(warp)
        tree, history = root_only(text.ids[row, at : at + 1]), Ragged(text.ids[row : row + 1], [at])
        scores = state.warper.scores(after, fitted[None, None], tree, history)[0, 0]
        state.warper.commit(after, torch.zeros(1, 1, dtype=torch.int64, device="cpu"), torch.ones(1, dtype=torch.int64, device="cpu"))
        return scores, after

    def _draw(self, state: _State, scores: Float[Tensor, "B V"], source: Source, step: int,
              active: Bool[Tensor, " B"]) -> tuple[Int64[Tensor, " B"], Float[Tensor, "B V"] | None]:  # fmt: skip
        if state.ctx.greedy or not self._sample:
            return torch.where(active, scores.max(-1).indices, 0), None
        law = scores.softmax(-1)
        # What is no law is NaN throughout. Another one is as exact, and to look whether it is needed would be to wait for the device.
        sure = torch.nn.functional.pad(torch.ones_like(law[:1, :1]), (0, law.shape[1] - 1))
        law = torch.where(law[:, :1].isnan(), sure, law)
        return source.categorical(law, Purpose.DRAFT, step, active), law


def _forget_draft(state: _State) -> None:
    """Drop what was read of a draft that nobody observed."""
    state.cache.rewind([min(pair) for pair in zip(state.cache.lengths, state.ids.lengths, strict=True)])
    state.pending, state.fed, state.trail = [], [], []


def _missing(cache: FullCache, text: Ragged) -> list[tuple[int, int]]:
    """Of each row, how many tokens the cache lacks and how many it has."""
    return [(n - have, have) for n, have in zip(text.lengths, cache.lengths, strict=True)]


def _window(text: Ragged, begin: Sequence[int], count: Sequence[int]) -> Int64[Tensor, "B T"]:
    """These many tokens of each row from there on, with 0 behind them."""
    tokens = torch.zeros(len(count), max(count), dtype=torch.int64, device="cpu")
    for row, (start, n) in enumerate(zip(begin, count, strict=True)):
        tokens[row, :n] = text.ids[row, start : start + n]
    return tokens


def _agree(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _chain(pending: Int64[Tensor, " B"], tokens: Sequence[Int64[Tensor, " B"]], laws: Sequence[Float[Tensor, "B V"]],
           lengths: Sequence[int]) -> DraftTree:  # fmt: skip
    """`specdec.tree.chain` for tokens that lie on a device and stay there."""
    device, step = tokens[0].device, torch.arange(len(tokens), device="cpu")
    real = step < torch.tensor(lengths, device="cpu")[:, None]
    parents = sent(torch.nn.functional.pad(torch.where(real, step, PAD), (1, 0), value=ROOT), device)
    drafted = torch.stack([sent(pending, device), *tokens], 1)
    if not laws:
        return DraftTree(drafted, parents)
    law = sent(torch.where(real, step, -1), device)
    draws = Draws(torch.where(law < 0, -1, law + 1), torch.full_like(law, Kind.IID), law, frozenset({Kind.IID}))
    return DraftTree(drafted, parents, draws, torch.stack(list(laws), 1))


def _check_tokens(draft: Mapping[str, int], target: Mapping[str, int]) -> None:
    """Raise `ValueError` if an id that both have means one token here and another there. Ids that one of them lacks are padding."""
    ours, theirs = _by_id(draft), _by_id(target)
    wrong = min((i for i in ours.keys() & theirs.keys() if ours[i].isdisjoint(theirs[i])), default=None)
    if wrong is not None:
        mine, yours = min(ours[wrong]), min(theirs[wrong])
        raise ValueError(
            f"tokenizer: id {wrong} is {mine!r} to the draft model and {yours!r} to the target; a draft model has to share the target's "
            "tokens. Choose one of the same family"
        )


def _by_id(vocabulary: Mapping[str, int]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for token, number in vocabulary.items():
        found.setdefault(number, set()).add(token)
    return found
