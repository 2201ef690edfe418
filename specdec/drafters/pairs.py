"""Drafters whose head reads pairs: a token and the target's hidden states at the token before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..base import Context
from ..cache import FullCache
from ..heads import PairHead
from ..ragged import Ragged
from ..tree import ancestors
from ..types import Bool, Float, Int64, sent
from .grow import Shape
from .growth import Growing
from .heads import HeadDrafter, HeadState

__all__ = ["PairDrafter"]

_CHUNK = 512
"""Pairs that one pass reads, and features that wait unread, at most."""


@dataclass
class _State(HeadState):
    cache: FullCache
    """Pairs of true features alone: pair t is token t + 1 and the feature of token t, at position t."""


class PairDrafter(HeadDrafter):
    """Drafts with any `PairHead`, level by level: what the head says of a token stands for the feature that the target would have.

    Each round the head first reads the true features of what was accepted; what it made of its own guesses is forgotten. Rows that outgrow
    the head's positions are not drafted for, nor is one whose text is a single token. Logits of NaN are no error here: a draft that is
    nonsense is rejected.

    Args:
        head: see `specdec.heads.PairHead`.
        target: the model that verifies. Its embedding, final norm and output head are used as they are, as far as the head needs them.
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

    head: PairHead

    def __init__(self, head: PairHead, target: Any, *, grow: Shape | None = None, sample: bool = True,
                 logits_processor: Sequence[Callable[..., Any]] | None = None) -> None:  # fmt: skip
        if not isinstance(head, PairHead):
            raise TypeError(
                f"head: got {type(head).__name__}; give a specdec.heads.PairHead, or a path to {type(self).__name__}.from_pretrained"
            )
        super().__init__(head, target, head.config.max_positions, grow, sample, logits_processor)
        config = head.config
        if not config.own_embedding and config.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"head: hidden_size is {config.hidden_size} and own_embedding False, but the target's embedding is "
                f"{config.target_hidden_size} wide; a head of another width than its target needs an embedding of its own"
            )

    def begin(self, ctx: Context) -> _State:
        return _State(**vars(self._begun(ctx)), cache=FullCache(ctx.batch))

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        return replace(state, **self._selected(state, rows), cache=state.cache.select(rows))

    def resume(self, state: _State, ctx: Context, keep: Sequence[int]) -> _State | None:
        """Goes on with the pairs that were read, and back no further than there are features for."""
        read = [min(have, max(0, n - 1)) for have, n in zip(state.cache.lengths, keep, strict=True)]
        begun, full = self._resumed(state, ctx, keep), self._limit
        if any(len(part) < n - have and have < full for part, n, have in zip(begun.features, keep, read, strict=True)):
            return None
        state.cache.rewind(read)
        return _State(**vars(begun), cache=state.cache)

    # ------------------------------------------------------------------------------------------------------------- the head

    def _room(self, state: _State) -> list[int]:
        """A node of depth n is read at position length + n - 1, the last ones not at all."""
        rows = zip(state.ids.lengths, state.limit, strict=True)
        return [max(0, limit - length + 1) if length and limit else 0 for length, limit in rows]

    def _root(self, state: _State, text: Ragged, active: list[bool]) -> Float[Tensor, "B 1 d"]:
        # The last pair may have been read with a pending token that did not stay, or that processors with memory have not kept.
        known = state.shown if state.warper.remembers else state.ids.lengths
        state.cache.rewind([min(have, max(0, n - 1)) for have, n in zip(state.cache.lengths, known, strict=True)])
        return self._read_pairs(state, text, active)

    def _levels(self, state: _State, growth: Growing, said: Float[Tensor, "B 1 d"]) -> Iterator[Float[Tensor, "B P d"]]:
        yield said
        given, every = said[:, :0], said  # what nodes 1, 2, ... read, and what is said of nodes 0, 1, ...
        while True:
            above = growth.parents[:, growth.last].clamp_min(0)
            given = torch.cat([given, every.gather(1, above[..., None].expand(-1, -1, every.shape[-1]))], 1)
            every = torch.cat([said, self._look(state, growth.tokens, growth.parents, given)], 1)
            yield every[:, growth.last]

    def _scores(self, said: Float[Tensor, "B P d"], level: int) -> Float[Tensor, "B P Vd"]:
        return self.head.rank(said, self._output)

    def _committed(self, state: _State, prompt: bool) -> list[int]:
        if prompt or max(self._unread(state)) > _CHUNK:
            # The last feature waits for its token, which is not settled before it is pending.
            self._read_pairs(state, state.ids, [True] * len(state.features))
        return self._unread(state)

    def _unread(self, state: _State) -> list[int]:
        """How many features of each row wait for their pair to be read; none in a row that has come to the head's last position."""
        rows = zip(state.ids.lengths, state.cache.lengths, strict=True)
        return [length - have if have < self._limit else 0 for length, have in rows]

    def _read_pairs(self, state: _State, text: Ragged, active: list[bool]) -> Float[Tensor, "B 1 d"]:
        """Read all true pairs of the active rows whose token the text has: what is said of each row's last one."""
        weight, full = self.head.weight, self._limit
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
            features = pad_sequence([part[len(part) - more :][:n] for part, more, n in parts], batch_first=True)
            hidden = self.head.fuse(self._read(features))
            steps, number = torch.arange(width, device="cpu"), torch.tensor(count, device="cpu")[:, None]
            tokens = torch.where(steps < number, text.window([have + 1 for have in begin], width), 0)
            state.cache.open(width)
            positions = torch.tensor(begin, device="cpu")[:, None] + steps
            said = self._pass(state, tokens, positions, hidden, (steps <= steps[:, None]).expand(len(count), -1, -1))
            state.cache.commit(steps.expand(len(count), -1), number[:, 0])
            number = sent(number[..., None], weight.device)
            for step in range(width if state.warper.remembers else 0):
                scores = self.head.rank(said[:, step], self._output)
                self._show(state, scores, [have + 1 + step for have in begin], [step < n for n in count])
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

    def _pass(self, state: _State, tokens: Int64[Tensor, "B T"], positions: Int64[Tensor, "B T"], hidden: Float[Tensor, "B T d"],
              seen: Bool[Tensor, "B T T"]) -> Float[Tensor, "B T d"]:  # fmt: skip
        """One pass of the layer over the tokens of an open transaction."""
        head, weight = self.head, self.head.weight
        ids = sent(tokens, weight.device)
        embedded = cast(Any, head).embed_tokens(ids) if head.config.own_embedding else self._lent.embed(ids)
        mask = state.cache.mask(sent(seen, weight.device))
        return head(embedded.to(weight), hidden, sent(positions, weight.device), mask, state.cache.write)
