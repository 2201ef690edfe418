"""A smaller model guesses: the draft model of Leviathan et al. 2023 and Chen et al. 2023."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base import Context, Drafter
from ..cache import FullCache, causal_target, look, read
from ..ragged import Ragged
from ..rng import Purpose, Source
from ..tree import padded_chain, root_only
from ..types import PAD, Bool, Budget, Commit, DraftTree, Float, Int64, Kind, Round, sent
from ..warp import Warper, WarpState
from .grow import Shape, chain
from .growth import drawable
from .vocabulary import Vocabulary, same_tokens
from .warped import shaped, show, wide

__all__ = ["ModelDrafter"]

_CHUNK = 512
_FEW = 16
"""Tokens that a pass may read for which logits are wanted: they are as wide as the vocabulary."""


@dataclass
class _Draft:
    """What `observe` compares with what became permanent."""

    tokens: Int64[Tensor, "B N"]
    """The pending token and those drafted behind it, left on their device."""
    shown: list[int]
    """How many of them, in each row, the draft model has read and the processors have gone on from; the last one is neither."""
    trail: list[WarpState]
    """Where the processors stood after so many."""


@dataclass
class _State:
    """One call. The cache holds a prefix of the committed tokens, and between `propose` and `observe` what was drafted behind them."""

    ctx: Context
    warper: Warper
    warp: WarpState
    """Processors with memory have seen every committed token whose keys and values the cache holds, those of the prompt left out."""
    ids: Ragged
    cache: FullCache
    prompt: list[int]
    """How many tokens of each row were prompt, after which no processor is called."""
    limit: list[int]
    """To which length each row is read: all positions of the model, or 0 once a processor with memory refused a token that stays."""
    draft: _Draft | None = None


class ModelDrafter(Drafter):
    """Drafts with a causal language model of its own: a chain, one token after another, or a tree, level by level.

    The model reads each committed token once, in a cache of its own; a round's first pass reads what the last one left over. It may be
    on another device and of another dtype than the target. Where its vocabulary is larger the surplus is never drafted; where it is
    smaller, committed tokens that it does not know are read as its token 0, which makes for a worse guess there and for nothing else.
    Rows that outgrow its context are no longer drafted for. Logits of NaN are no error here: a draft that is nonsense is rejected (it
    goes on with token 0, as a draw that was sure to come out so).

    For a level of a tree the model reads all nodes above it in one pass, each of which sees its own ancestors. Nothing of that is kept: the
    next round's first pass reads what was accepted.

    The device is waited for once a round, when `observe` reads what was drafted; processors that look at the text add one per level.

    Args:
        model: a decoder-only model of Hugging Face transformers, or a `CausalTarget`. Its ids must mean what the target's mean.
        grow: the shape of the tree and how its tokens are drawn, see `specdec.drafters.grow`: `chain()` if left out.
        tokenizer, target_tokenizer: give both and that is checked, token by token.
        sample: draw each token from the model's law. Without it, or when decoding greedily, as many of the most likely ones are taken.
        logits_processor: what shapes the draft model's law. Left out, what shapes the target's, which is best for acceptance; an empty
            list leaves the softmax as it is. One that raises behind some text ends the draft there and is no error here,
            where all text is a guess; if one has a memory and a token that stays can't be shown to it, that row is drafted for no more.

    Raises:
        TypeError: it is not clear how to run the model, or a processor with memory can't be copied.
        ValueError: the model can't be used; `grow` draws from two models; one tokenizer was given without the other; the two give different
            tokens one id.
    """

    def __init__(self, model: Any, *, grow: Shape | None = None, tokenizer: Vocabulary | None = None,
                 target_tokenizer: Vocabulary | None = None, sample: bool = True,
                 logits_processor: Sequence[Callable[..., Any]] | None = None) -> None:  # fmt: skip
        same_tokens(tokenizer, target_tokenizer)
        if not isinstance(grow, Shape | None):
            raise TypeError(f"grow: got {grow!r}; give a shape such as specdec.grow.mixed(4, 2, 1)")
        self._grower = chain() if grow is None else grow
        if self._grower.samplers > 1:
            raise ValueError(f"grow: {self._grower} draws from two models (capitals); there is one here, so use small letters alone")
        self._model = causal_target(model)
        self._sample = sample
        self._processors = None if logits_processor is None else list(logits_processor)
        self._warper(1)  # refuses what can't be used
        self.draws = frozenset({Kind.POINT}) | (self._grower.draws if sample else frozenset())
        self.chains = self._grower.chains
        self.fixed_widths = True

    def _warper(self, batch: int) -> Warper:
        return Warper([[processor] * batch for processor in self._processors or ()], batch=batch)

    def begin(self, ctx: Context) -> _State:
        warper = ctx.warper if self._processors is None else self._warper(ctx.batch)
        limit, cache = self._model.facts.max_positions or 1 << 62, self._model.new_cache(ctx.batch)
        return _State(ctx, warper, warper.begin(), Ragged.empty(ctx.batch), cache, [0] * ctx.batch, [limit] * ctx.batch)

    def propose(self, state: _State, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        state.draft = None  # one that nobody observed is forgotten
        state.cache.rewind(list(map(min, state.cache.lengths, state.ids.lengths)))
        # The last drafted token is not read, so it may lie one behind the draft model's last position.
        room = [limit - length for limit, length in zip(state.limit, state.ids.lengths, strict=True)]
        wanted = [max(0, min(pair)) for pair in zip(budget.chain.tolist(), room, strict=True)]
        text = Ragged(state.ids.ids, list(state.ids.lengths))  # the same memory: what is written behind the committed tokens is scrap
        text.extend([[token] for token in pending.tolist()])
        logits = self._catch_up(state, text, wanted)
        if logits is None:
            return root_only(pending)
        root = sent(pending, state.ctx.target.device)
        if self._grower == chain():
            return self._chain(state, root, text, logits, wanted, source)
        return self._tree(state, root, text, logits, wanted, budget, source)

    def _chain(self, state: _State, pending: Int64[Tensor, " B"], text: Ragged, logits: Float[Tensor, "B W"], wanted: list[int],
               source: Source) -> DraftTree:  # fmt: skip
        """Draw one token after another, each of which stays in the cache until it is known what became of it."""
        tokens, laws, trail = [pending], [], [state.warp]
        for step in range(max(wanted)):
            active = [n > step for n in wanted]
            if step:
                if not state.warper.free:
                    text.extend([[token] if on else [] for token, on in zip(tokens[-1].tolist(), active, strict=True)])
                logits = self._read(state.cache, tokens[-1][:, None], list(map(int, active)), logits=True)[:, 0]
            after, scores, refused = show(state.warper, trail[-1], self._known(state, logits), text, active)
            wanted = [step if no else n for n, no in zip(wanted, refused, strict=True)]
            if step >= max(wanted):
                break
            token, law = self._draw(state, scores, source, step, sent([n > step for n in wanted], scores.device))
            tokens.append(token)
            laws += [] if law is None else [law]
            trail.append(after)
        tree = padded_chain(torch.stack(tokens, 1), wanted, torch.stack(laws, 1) if laws else None)
        state.draft = _Draft(tree.tokens, wanted, trail)
        return tree

    def _tree(self, state: _State, pending: Int64[Tensor, " B"], text: Ragged, logits: Float[Tensor, "B W"], wanted: list[int],
              budget: Budget, source: Source) -> DraftTree:  # fmt: skip
        """Draw level by level, each from one pass over all that was drafted. Of that the cache keeps nothing: which of the branches will
        be needed is not known, and the next round's first pass reads what was."""
        points = state.ctx.greedy or not self._sample
        after, scores, refused = show(state.warper, state.warp, self._known(state, logits), text, [n > 0 for n in wanted])
        wanted = [0 if no else n for n, no in zip(wanted, refused, strict=True)]
        state.draft = _Draft(pending[:, None], [int(n > 0) for n in wanted], [state.warp, after])
        depth = torch.tensor(wanted, device="cpu")
        budget = Budget(torch.where(depth > 0, budget.nodes, 0), depth, budget.width)
        growth = (self._grower.chosen() if points else self._grower).begin(pending, budget)
        level, open = scores[:, None], None
        while growth.more:
            if growth.height:
                level, open = self._last_level(state, growth, text, logits, sent([n > 0 for n in wanted], pending.device))
            growth.level(level if points else drawable(level), source, open, floor=-torch.inf if points else 0.0)
        return growth.tree()

    def _last_level(self, state: _State, growth: Any, text: Ragged, root: Float[Tensor, "B W"],
                    active: Bool[Tensor, " B"]) -> tuple[Float[Tensor, "B P V"], Bool[Tensor, "B P"] | None]:  # fmt: skip
        """The scores after each node of the last level, and where no processor raised, if one did."""
        tree = DraftTree(growth.tokens, torch.where(active[:, None], growth.parents, PAD))
        found = look(self._model, state.cache, tree)
        # A warper that is free does not ask what lies above.
        rows = found[:, growth.last.start - 1 :] if state.warper.free else torch.cat([root[:, None], found], 1)
        return shaped(state.warper, state.warp, self._known(state, rows), tree, growth.last, text)

    def observe(self, state: _State, commit: Commit, round: Round | None = None) -> _State:
        new = [row[:n] for row, n in zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)]
        held = state.ids.lengths
        if state.draft is not None:
            same = [_agree(row[:n], kept) for row, n, kept in zip(state.draft.tokens.tolist(), state.draft.shown, new, strict=True)]
            held = [length + n for length, n in zip(held, same, strict=True)]
            state.warp, state.draft = WarpState([state.draft.trail[n].each[row] for row, n in enumerate(same)]), None
        state.cache.rewind(list(map(min, state.cache.lengths, held)))
        state.ids.extend(new)
        if round is None:
            state.prompt = list(state.ids.lengths)
            ends = list(map(min, state.ids.lengths, state.limit))
            while any(count := [max(0, min(_CHUNK, end - have)) for end, have in zip(ends, state.cache.lengths, strict=True)]):
                self._read(state.cache, state.ids.window(state.cache.lengths, max(count)), count, logits=False)
        return state

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        return replace(
            state, warp=state.warper.select(state.warp, rows), ids=state.ids.select(rows), cache=state.cache.select(rows),
            prompt=[state.prompt[row] for row in rows], limit=[state.limit[row] for row in rows], draft=None,
        )  # fmt: skip

    def resume(self, state: _State, ctx: Context, keep: Sequence[int]) -> _State:
        """What was read of these tokens stays read; processors begin anew, as they do for the target."""
        state.cache.rewind(list(map(min, state.cache.lengths, keep)))
        return replace(self.begin(ctx), ids=Ragged(state.ids.ids, list(keep)), cache=state.cache, prompt=list(keep))

    # -------------------------------------------------------------------------------------------------------- the draft model

    def _read(self, cache: FullCache, tokens: Int64[Tensor, "B T"], count: Sequence[int], *, logits: bool) -> Any:
        return read(self._model, cache, tokens, torch.tensor(count, device="cpu"), logits=logits)[0]

    def _catch_up(self, state: _State, text: Ragged, wanted: list[int]) -> Float[Tensor, "B W"] | None:
        """Read what is missing of the rows that are drafted for: the logits after their last token, `None` if there is no such row.
        Where a processor refuses a token that it has to remember, `wanted` becomes 0."""
        shows = state.warper.remembers
        while any(wanted):
            begin = state.cache.lengths
            missing = [end - start if want else 0 for end, start, want in zip(text.lengths, begin, wanted, strict=True)]
            far = max(missing) > _FEW  # all but the last token first; of them logits are wanted only to be shown to processors
            count = [max(0, min(_FEW if shows else _CHUNK, n - 1)) for n in missing] if far else missing
            logits = self._read(state.cache, text.window(begin, max(count)), count, logits=shows or not far)
            for i in range(max(count)) if shows else ():
                seen = Ragged(text.ids, [min(start + i + 1, end) for start, end in zip(begin, text.lengths, strict=True)])
                # neither a token of the prompt nor the pending one, which is shown when the first draw's law is wanted
                rows = zip(seen.lengths, state.prompt, text.lengths, count, wanted, strict=True)
                active = [want > 0 and i < n and had < upto < end for upto, had, end, n, want in rows]
                state.warp, _, refused = show(state.warper, state.warp, self._known(state, logits[:, i]), seen, active)
                state.limit = [0 if no else limit for limit, no in zip(state.limit, refused, strict=True)]
                wanted[:] = [0 if no else want for want, no in zip(wanted, refused, strict=True)]
            if not far and any(wanted):
                last = sent([max(0, n - 1) for n in count], logits.device)
                return logits[torch.arange(len(last), device=logits.device), last]
        return None

    # ------------------------------------------------------------------------------------------------------ from logits to draws

    def _known(self, state: _State, logits: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows V"]:
        """Of the target's tokens; those that the draft model does not know have no probability."""
        facts = state.ctx.target
        logits = wide(logits[..., : facts.vocab_size], facts)
        return torch.nn.functional.pad(logits, (0, facts.vocab_size - logits.shape[-1]), value=-torch.inf)

    def _draw(self, state: _State, scores: Float[Tensor, "B V"], source: Source, step: int,
              active: Bool[Tensor, " B"]) -> tuple[Int64[Tensor, " B"], Float[Tensor, "B V"] | None]:  # fmt: skip
        if state.ctx.greedy or not self._sample:
            return torch.where(active, scores.max(-1).indices, 0), None
        law = drawable(scores)
        return source.categorical(law, Purpose.DRAFT, step, active), law


def _agree(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
