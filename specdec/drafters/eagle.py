"""EAGLE-1, -2 and -3: a head that drafts from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..base import Context, Drafter
from ..cache import FullCache, Lender, causal_target
from ..checkpoints import load_head, save_head
from ..heads.eagle import EagleHead, attend, fits
from ..ragged import Ragged
from ..rng import Source
from ..tree import ancestors, root_only
from ..types import Bool, Budget, Commit, DraftTree, Features, Float, Int64, Kind, Round, sent
from ..warp import Warper, WarpState
from .grow import Shape, dynamic, mixed
from .growth import drawable
from .warped import shaped, show, wide

__all__ = ["EagleDrafter"]

_CHUNK = 512
"""Pairs that one pass reads, and features that wait unread, at most."""
_TAIL = 64
"""Features that are kept after they were read: a session may go back so far, and a draft that nobody observed one token."""


@dataclass
class _State:
    """One call. The cache holds pairs of true features alone: pair t is token t + 1 and the feature of token t, at position t."""

    ctx: Context
    warper: Warper
    warp: WarpState
    """Processors with memory have seen the first `shown` tokens of each row, those of the prompt left out."""
    shown: list[int]
    limit: list[int]
    """To which length each row is drafted for: the head's positions, or 0 once a processor with memory refused a token that stays."""
    ids: Ragged
    cache: FullCache
    features: list[Float[Tensor, "_ F"]]
    """Those of each row's last tokens, among them all that no pair was read of."""


class EagleDrafter(Drafter):
    """Drafts with an EAGLE head, level by level: what the head says of a token stands for the feature that the target would have.

    It is three things: where the features come from (`head.config.layers`), how the tree grows (`grow`) and which tokens can be drafted
    (`head.ids`). EAGLE-1 is a head of version 1 with a static tree, EAGLE-2 the same with `grow.dynamic()`, EAGLE-3 a head of version 3.
    Each round the head first reads the true features of what was accepted; what it made of its own guesses is forgotten.

    Rows that outgrow the head's positions are not drafted for, nor is one whose text is a single token. Logits of NaN are no error here: a
    draft that is nonsense is rejected.

    Args:
        head: see `specdec.checkpoints.load_head`, or `from_pretrained` here.
        target: the model that verifies. Its embedding, and for version 1 its final norm and output head, are used as they are.
        grow: the shape of the tree and how its tokens are drawn, see `specdec.drafters.grow`. Left out, `dynamic(8, depth=5)` where points
            alone are drawn, as in greedy decoding, and else `mixed(3, 1)`, which accepted most of what was tried at temperature 1.
        sample: draw each token from the head's law. Without it, or when decoding greedily, as many of the most likely ones are taken.
        logits_processor: what shapes the head's law. Left out, what shapes the target's, which is best for acceptance; an empty
            list leaves the softmax as it is. One that raises behind some text ends the draft there; if one has a memory and a token that
            stays can't be shown to it, that row is drafted for no more.

    Raises:
        TypeError: it is not clear how to run the target, or it does not lend its embedding; a processor with memory can't be copied.
        ValueError: the head was made for another target; `grow` draws from two models.
    """

    def __init__(self, head: EagleHead, target: Any, *, grow: Shape | None = None, sample: bool = True,
                 logits_processor: Sequence[Callable[..., Any]] | None = None) -> None:  # fmt: skip
        if not isinstance(head, EagleHead):
            raise TypeError(
                f"head: got {type(head).__name__}; give a specdec.heads.EagleHead, or use EagleDrafter.from_pretrained(path, target)"
            )
        if not isinstance(grow, Shape | None):
            raise TypeError(f"grow: got {grow!r}; give a shape such as specdec.grow.mixed(4, 2, 1)")
        self._grower = mixed(3, 1) if grow is None else grow
        self._chosen = dynamic(8, depth=5) if grow is None else grow.chosen()
        """The same where points alone are drawn."""
        if self._grower.samplers > 1:
            raise ValueError(f"grow: {grow} draws from two models (capitals); there is one here, so use small letters alone")
        model = causal_target(target)
        if not isinstance(model, Lender):
            raise TypeError(
                f"target: {type(model).__name__} does not lend its embedding; allowed are decoder-only models of Hugging Face transformers "
                "and objects with a method lend() as in specdec.cache.Lender"
            )
        config = head.config
        fits(config, model.facts)
        if not config.own_embedding and config.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"head: hidden_size is {config.hidden_size} and own_embedding False, but the target's embedding is "
                f"{config.target_hidden_size} wide; a head of another width than its target needs an embedding of its own"
            )
        ids = head.ids.tolist()
        if len(set(ids)) < len(ids) or not set(ids) <= set(range(config.vocab_size)):
            raise ValueError(f"head: its ids must be different tokens of the target's vocabulary of {config.vocab_size}")
        self._processors = None if logits_processor is None else list(logits_processor)
        self._warper(1)  # refuses what can't be used
        self.head, self._lent, self._sample = head, model.lend(), sample
        self.needs = Features(config.layers)
        self.draws = frozenset({Kind.POINT}) | (self._grower.draws if sample else frozenset())
        self.chains = self._grower.chains and self._chosen.chains
        self.fixed_widths = True

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path, target: Any, *, grow: Shape | None = None, sample: bool = True,
                        logits_processor: Sequence[Callable[..., Any]] | None = None) -> EagleDrafter:  # fmt: skip
        """A drafter with the head of a checkpoint, see `specdec.checkpoints.load_head`; the rest is as for the class."""
        head = load_head(path_or_name, causal_target(target).facts)
        return cls(head, target, grow=grow, sample=sample, logits_processor=logits_processor)

    def save_pretrained(self, path: str | Path, layout: str = "speculators") -> None:
        """Write the head, see `specdec.checkpoints.save_head`: `layout` is "speculators" or "eagle"."""
        told = self._lent.config
        name, kind = told.get("_name_or_path") or None, told.get("architectures") or ()
        save_head(self.head, path, layout=layout, verifier_name=name, verifier_architectures=kind)

    def _warper(self, batch: int) -> Warper:
        return Warper([[processor] * batch for processor in self._processors or ()], batch=batch)

    def begin(self, ctx: Context) -> _State:
        warper, rows = ctx.warper if self._processors is None else self._warper(ctx.batch), ctx.batch
        limit, nothing = self.head.config.max_positions, self.head.fc.weight.new_empty(0, 0)
        return _State(ctx, warper, warper.begin(), [0] * rows, [limit] * rows, Ragged.empty(rows), FullCache(rows), [nothing] * rows)

    @torch.no_grad()
    def propose(self, state: _State, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        lengths = state.ids.lengths
        # A node of depth n is read at position length + n - 1, the last ones not at all.
        room = [max(0, limit - length + 1) if length and limit else 0 for length, limit in zip(lengths, state.limit, strict=True)]
        depth = torch.minimum(budget.chain, torch.tensor(room, device="cpu"))
        if not bool(depth.any()):
            return root_only(pending)
        text = Ragged(state.ids.ids, list(lengths))  # the same memory: what is written behind the committed tokens is scrap
        text.extend([[token] for token in pending.tolist()])
        # The last pair may have been read with a pending token that did not stay, or that processors with memory have not kept.
        known = state.shown if state.warper.remembers else lengths
        state.cache.rewind([min(have, max(0, n - 1)) for have, n in zip(state.cache.lengths, known, strict=True)])
        said = self._read(state, text, (depth > 0).tolist())
        depth = torch.where(torch.tensor(state.limit, device="cpu") > 0, depth, 0)
        points = state.ctx.greedy or not self._sample or self._grower.draws <= {Kind.POINT}
        growth = (self._chosen if points else self._grower).begin(
            sent(pending, state.ctx.target.device), Budget(torch.where(depth > 0, budget.nodes, 0), depth, budget.width)
        )
        given, every = said[:, :0], said  # what nodes 1, 2, ... read, and what is said of nodes 0, 1, ...
        scores: list[Tensor] = []
        while growth.more:
            if growth.height:
                above = growth.parents[:, growth.last].clamp_min(0)
                given = torch.cat([given, every.gather(1, above[..., None].expand(-1, -1, every.shape[-1]))], 1)
                every = torch.cat([said, self._look(state, growth.tokens, growth.parents, given)], 1)
            self._level(state, growth, every[:, growth.last], scores, text, points, source)
        return growth.tree()

    @torch.no_grad()
    def observe(self, state: _State, commit: Commit, round: Round | None = None) -> _State:
        if not bool(commit.count.any()):
            return state
        if commit.features is None:
            raise ValueError(
                f"commit: it has no features of layers {self.needs.layers}, which {type(self).__name__} reads; use a verifier that gives "
                "them, such as specdec.TreeVerifier"
            )
        state.ids.extend(commit.tokens, commit.count)
        rows = zip(state.features, commit.features, commit.count.tolist(), strict=True)
        state.features = [torch.cat([old if len(old) else new[:0], new[:n]]) for old, new, n in rows]
        state.shown = list(state.ids.lengths) if round is None else state.shown
        if round is None or max(self._unread(state)) > _CHUNK:
            # The last feature waits for its token, which is not settled before it is pending.
            self._read(state, state.ids, [True] * len(state.features))
        state.features = [part[-max(_TAIL, n + 1) :] for part, n in zip(state.features, self._unread(state), strict=True)]
        return state

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        return replace(
            state, warp=state.warper.select(state.warp, rows), ids=state.ids.select(rows), cache=state.cache.select(rows),
            shown=[state.shown[row] for row in rows], limit=[state.limit[row] for row in rows],
            features=[state.features[row] for row in rows],
        )  # fmt: skip

    def resume(self, state: _State, ctx: Context, keep: Sequence[int]) -> _State | None:
        """Goes on with the pairs that were read, and back no further than there are features for."""
        cut = [length - n for length, n in zip(state.ids.lengths, keep, strict=True)]
        read = [min(have, max(0, n - 1)) for have, n in zip(state.cache.lengths, keep, strict=True)]
        features = [part[: len(part) - n] for part, n in zip(state.features, cut, strict=True)]
        full = self.head.config.max_positions
        if any(len(part) < n - have and have < full for part, n, have in zip(features, keep, read, strict=True)):
            return None
        state.cache.rewind(read)
        return replace(self.begin(ctx), shown=list(keep), ids=Ragged(state.ids.ids, list(keep)), cache=state.cache, features=features)

    # ------------------------------------------------------------------------------------------------------------- the head

    def _unread(self, state: _State) -> list[int]:
        """How many features of each row wait for their pair to be read; none in a row that has come to the head's last position."""
        full = self.head.config.max_positions
        return [length - have if have < full else 0 for length, have in zip(state.ids.lengths, state.cache.lengths, strict=True)]

    def _read(self, state: _State, text: Ragged, active: list[bool]) -> Float[Tensor, "B 1 d"]:
        """Read all true pairs of the active rows whose token the text has: what is said of each row's last one."""
        weight, full = self.head.fc.weight, self.head.config.max_positions
        self._show(state, None, [0] * len(active), active)
        last = weight.new_zeros(len(active), 1, self.head.config.hidden_size)
        while True:
            begin, unread = list(state.cache.lengths), self._unread(state)
            rows = zip(text.lengths, begin, active, strict=True)
            count = [max(0, min(_CHUNK, n - 1 - have, full - have)) if on else 0 for n, have, on in rows]
            if not any(count):
                return last
            width = max(count)
            parts = zip(state.features, unread, count, strict=True)
            hidden = self._fused(pad_sequence([part[len(part) - more :][:n] for part, more, n in parts], batch_first=True))
            steps, number = torch.arange(width, device="cpu"), torch.tensor(count, device="cpu")[:, None]
            tokens = torch.where(steps < number, text.window([have + 1 for have in begin], width), 0)
            state.cache.open(width)
            positions = torch.tensor(begin, device="cpu")[:, None] + steps
            said = self._pass(state, tokens, positions, hidden, (steps <= steps[:, None]).expand(len(count), -1, -1))
            state.cache.commit(steps.expand(len(count), -1), number[:, 0])
            number = sent(number[..., None], weight.device)
            for step in range(width if state.warper.remembers else 0):
                self._show(state, said[:, step], [have + 1 + step for have in begin], [step < n for n in count])
            last = torch.where(number > 0, said.gather(1, (number - 1).clamp_min(0).expand_as(last)), last)

    def _look(self, state: _State, tokens: Int64[Tensor, "B N"], parents: Int64[Tensor, "B N"],
              given: Float[Tensor, "B n d"]) -> Float[Tensor, "B n d"]:  # fmt: skip
        """What is said of nodes 1 to N - 1, of which the cache keeps nothing."""
        seen = ancestors(parents)
        positions = sent(state.cache.lengths, seen.device)[:, None] - 2 + seen.sum(-1)[:, 1:]
        state.cache.open(given.shape[1])
        said = self._pass(state, tokens[:, 1:], positions, given, seen[:, 1:, 1:])
        state.cache.rewind(state.cache.lengths)
        return said

    def _fused(self, features: Float[Tensor, "B T F"]) -> Float[Tensor, "B T d"]:
        features = self._lent.norm(features) if self.head.config.version == 1 else features
        return self.head.fuse(features.to(self.head.fc.weight))

    def _pass(self, state: _State, tokens: Int64[Tensor, "B T"], positions: Int64[Tensor, "B T"], hidden: Float[Tensor, "B T d"],
              seen: Bool[Tensor, "B T T"]) -> Float[Tensor, "B T d"]:  # fmt: skip
        """One pass of the layer over the tokens of an open transaction."""
        head, weight = self.head, self.head.fc.weight
        ids = sent(tokens, weight.device)
        embedded = head.embed_tokens(ids) if head.config.own_embedding else self._lent.embed(ids)
        residual, query, key, value = head.project(embedded.to(weight), hidden, sent(positions, weight.device))
        keys, values = state.cache.write(0, key, value)
        return head.finish(residual, attend(query, keys, values, state.cache.mask(sent(seen, weight.device))))

    # ---------------------------------------------------------------------------------------------------- from what it said to draws

    def _scores(self, state: _State, said: Float[Tensor, "B P d"]) -> Float[Tensor, "B P W"]:
        """Of what can be drafted."""
        final = self.head.final(said)
        return wide((self._lent.head if self.head.config.version == 1 else self.head.lm_head)(final), state.ctx.target)

    def _spread(self, state: _State, scores: Float[Tensor, "B P W"]) -> Float[Tensor, "B P V"]:
        """By the target's ids; what can't be drafted has none."""
        if self.head.config.version == 1:
            return scores
        nothing = scores.new_full((*scores.shape[:2], state.ctx.target.vocab_size), -torch.inf)
        return nothing.scatter_(2, sent(self.head.ids, scores.device).expand_as(scores), scores)

    def _show(self, state: _State, said: Float[Tensor, "B d"] | None, at: list[int], active: list[bool]) -> None:
        """Show each active row's token number `at` to processors with memory, unless they have seen it or it is not settled."""
        rows = zip(active, state.shown, at, state.ids.lengths, state.limit, strict=True)
        new = [on and shown == n < length and limit > 0 for on, shown, n, length, limit in rows]
        if not state.warper.remembers or not any(new):
            return
        if said is None:  # nothing is said of a text's first token
            scores = torch.zeros(len(new), state.ctx.target.vocab_size, device=state.ctx.target.device)
        else:
            scores = self._spread(state, self._scores(state, said[:, None]))[:, 0]
        text = Ragged(state.ids.ids, [n + 1 if on else 1 for n, on in zip(at, new, strict=True)])
        state.warp, _, refused = show(state.warper, state.warp, scores, text, new)
        state.shown = [n + 1 if on else shown for n, on, shown in zip(at, new, state.shown, strict=True)]
        state.limit = [0 if no else limit for no, limit in zip(refused, state.limit, strict=True)]

    def _level(self, state: _State, growth: Any, said: Float[Tensor, "B P d"], above: list[Tensor], text: Ragged, points: bool,
               source: Source) -> None:  # fmt: skip
        """Grow a level from what is said of the nodes of the last one. `above` collects scores for processors that read ids."""
        scores = self._scores(state, said)
        if points and state.warper.idle:  # a ranking of what can be drafted will do
            growth.level(scores, source, floor=-torch.inf, ids=sent(self.head.ids, scores.device))
            return
        scores = self._spread(state, scores)
        if not state.warper.free:
            above.append(scores)
            scores = torch.cat(above, 1)
        scores, open = shaped(state.warper, state.warp, scores, DraftTree(growth.tokens, growth.parents), growth.last, text)
        growth.level(scores if points else drawable(scores), source, open, floor=-torch.inf if points else 0.0)
