"""What drafters have in common whose head reads the target: what they are made of, and the way from scores to draws."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base import Context, Drafter
from ..cache import Lender, causal_target, output_rows
from ..heads import DraftHead, fits
from ..ragged import Ragged
from ..rng import Source
from ..tree import root_only
from ..types import Budget, Commit, DraftTree, Features, Float, Int64, Kind, Round, sent
from ..warp import Warper, WarpState
from .grow import Shape, dynamic, mixed
from .growth import Growing, drawable
from .warped import shaped, show, wide

__all__ = ["HeadDrafter", "HeadState"]

_TAIL = 64
"""Features that are kept after they were read: a session may go back so far, and a draft that nobody observed one token."""


@dataclass
class HeadState:
    """One call."""

    ctx: Context
    warper: Warper
    warp: WarpState
    """Processors with memory have seen the first `shown` tokens of each row, those of the prompt left out."""
    shown: list[int]
    limit: list[int]
    """To which length each row is drafted for: the head's positions, or 0 once a processor with memory refused a token that stays."""
    ids: Ragged
    features: list[Float[Tensor, "_ F"]]
    """Those of each row's last tokens, among them all that were not read."""


class HeadDrafter(Drafter):
    """A drafter whose head reads the target's hidden states.

    Args:
        head: any; how it is asked is up to the drafter.
        target: the model that verifies.
        limit: text of so many tokens can be drafted for.
        grow: the shape of the tree; left out, `dynamic(8, depth)` where points alone are drawn, and else `mixed(3, 1)`.
        sample, logits_processor: see the drafters.
    """

    head: DraftHead

    def __init__(self, head: DraftHead, target: Any, limit: int, grow: Shape | None, sample: bool,
                 logits_processor: Sequence[Callable[..., Any]] | None, depth: int = 5) -> None:  # fmt: skip
        if not isinstance(grow, Shape | None):
            raise TypeError(f"grow: got {grow!r}; give a shape such as specdec.grow.mixed(4, 2, 1)")
        self._grower = mixed(3, 1) if grow is None else grow
        self._chosen = dynamic(8, depth) if grow is None else grow.chosen()
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
        ids = head.ids.tolist()
        if len(set(ids)) < len(ids) or not set(ids) <= set(range(config.vocab_size)):
            raise ValueError(f"head: its ids must be different tokens of the target's vocabulary of {config.vocab_size}")
        self._processors = None if logits_processor is None else list(logits_processor)
        self._warper(1)  # refuses what can't be used
        self.head, self._model, self._lent, self._target, self._sample, self._limit = head, model, model.lend(), model.facts, sample, limit
        self._whole = ids == list(range(config.vocab_size))
        rows = output_rows(model, self._lent) if config.shared else None
        self._rows = rows if rows is None or self._whole else rows[sent(head.ids, rows.device)]
        self.needs = Features(config.layers)
        self.draws = frozenset({Kind.POINT}) | (self._grower.draws if sample else frozenset())
        self.chains = self._grower.chains and self._chosen.chains
        self.fixed_widths = True

    @abstractmethod
    def _room(self, state: Any) -> list[int]:
        """How many levels could be drafted for each row; 0 for one that has no features yet."""

    @abstractmethod
    def _root(self, state: Any, text: Ragged, active: list[bool]) -> Float[Tensor, "B 1 d"]:
        """What is said after the last token of the active rows' text: the committed tokens and the pending one behind them. Processors with
        memory have been shown all committed tokens then; where one refused, the state has a limit of 0."""

    @abstractmethod
    def _levels(self, state: Any, growth: Growing, said: Float[Tensor, "B 1 d"]) -> Iterator[Float[Tensor, "B P d"]]:
        """`said` itself, and then, every time the growth has got a level, what is said of the nodes of that."""

    @abstractmethod
    def _scores(self, said: Float[Tensor, "B P d"], level: int) -> Float[Tensor, "B P Vd"]:
        """Of what can be drafted below that."""

    @abstractmethod
    def _committed(self, state: Any, prompt: bool) -> list[int]:
        """Tokens have become permanent: how many features of each row are still to be read."""

    # ---------------------------------------------------------------------------------------------------- what a drafter does

    @torch.no_grad()
    def propose(self, state: Any, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        depth = torch.minimum(budget.chain, torch.tensor(self._room(state), device="cpu"))
        if not bool(depth.any()):
            return root_only(pending)
        text = Ragged(state.ids.ids, list(state.ids.lengths))  # the same memory: what is written behind the committed tokens is scrap
        text.extend([[token] for token in pending.tolist()])
        said = self._root(state, text, (depth > 0).tolist())
        depth = torch.where(torch.tensor(state.limit, device="cpu") > 0, depth, 0)
        points = state.ctx.greedy or not self._sample or self._grower.draws <= {Kind.POINT}
        growth = (self._chosen if points else self._grower).begin(
            sent(pending, state.ctx.target.device), Budget(torch.where(depth > 0, budget.nodes, 0), depth, budget.width)
        )
        levels, above = self._levels(state, growth, said), list[Tensor]()
        while growth.more:
            self._level(state, growth, next(levels), above, text, points, source)
        return growth.tree()

    @torch.no_grad()
    def observe(self, state: Any, commit: Commit, round: Round | None = None) -> Any:
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
        unread = self._committed(state, round is None)
        state.features = [part[-max(_TAIL, n + 1) :] for part, n in zip(state.features, unread, strict=True)]
        return state

    # ------------------------------------------------------------------------------------------------------- what all of them need

    def _warper(self, batch: int) -> Warper:
        return Warper([[processor] * batch for processor in self._processors or ()], batch=batch)

    def _begun(self, ctx: Context) -> HeadState:
        fits(self.head.config, ctx.target)
        warper, rows = ctx.warper if self._processors is None else self._warper(ctx.batch), ctx.batch
        nothing = self.head.weight.new_empty(0, 0)
        return HeadState(ctx, warper, warper.begin(), [0] * rows, [self._limit] * rows, Ragged.empty(rows), [nothing] * rows)

    def _selected(self, state: HeadState, rows: Sequence[int]) -> dict[str, Any]:
        """What becomes of the parts of a state that all have."""
        return {
            "warp": state.warper.select(state.warp, rows), "ids": state.ids.select(rows), "shown": [state.shown[row] for row in rows],
            "limit": [state.limit[row] for row in rows], "features": [state.features[row] for row in rows],
        }  # fmt: skip

    def _resumed(self, state: HeadState, ctx: Context, keep: Sequence[int]) -> HeadState:
        """What all have in common of a new call that goes on with `keep` tokens of each row; of some it may have too few features."""
        cut = zip(state.features, state.ids.lengths, keep, strict=True)
        features = [part[: max(0, len(part) - (length - n))] for part, length, n in cut]
        return replace(self._begun(ctx), shown=list(keep), ids=Ragged(state.ids.ids, list(keep)), features=features)

    def _read(self, features: Float[Tensor, "B T F"]) -> Float[Tensor, "B T F"]:
        """The target's features as the head reads them."""
        return (self._lent.norm(features) if self.head.config.normed else features).to(self.head.weight)

    def _output(self, hidden: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows Vd"]:
        """The target's output head, where it is shared, for what can be drafted."""
        hidden = hidden.to(self._target.device, self._target.dtype)
        if self._rows is None:
            return self._lent.head(hidden)[..., sent(self.head.ids, hidden.device)]
        return torch.nn.functional.linear(hidden, self._rows)

    def _show(self, state: HeadState, scores: Float[Tensor, "B V"] | None, at: list[int], active: list[bool]) -> None:
        """Show each active row's token number `at` to processors with memory, unless they have seen it or it is not settled.

        Args:
            scores: of what can be drafted; all alike where nothing is said.
        """
        rows = zip(active, state.shown, at, state.ids.lengths, state.limit, strict=True)
        new = [on and shown == n < length and limit > 0 for on, shown, n, length, limit in rows]
        if not state.warper.remembers or not any(new):
            return
        if scores is None:
            every = torch.zeros(len(new), state.ctx.target.vocab_size, device=state.ctx.target.device)
        else:
            every = self._spread(state, wide(scores, state.ctx.target)[:, None])[:, 0]
        text = Ragged(state.ids.ids, [n + 1 if on else 1 for n, on in zip(at, new, strict=True)])
        state.warp, _, refused = show(state.warper, state.warp, every, text, new)
        state.shown = [n + 1 if on else shown for n, on, shown in zip(at, new, state.shown, strict=True)]
        state.limit = [0 if no else limit for no, limit in zip(refused, state.limit, strict=True)]

    def _spread(self, state: HeadState, scores: Float[Tensor, "B P Vd"]) -> Float[Tensor, "B P V"]:
        """By the target's ids; what can't be drafted has none."""
        if self._whole:
            return scores
        nothing = scores.new_full((*scores.shape[:2], state.ctx.target.vocab_size), -torch.inf)
        return nothing.scatter_(2, sent(self.head.ids, scores.device).expand_as(scores), scores)

    def _level(self, state: HeadState, growth: Growing, said: Float[Tensor, "B P d"], above: list[Tensor], text: Ragged, points: bool,
               source: Source) -> None:  # fmt: skip
        """Grow a level from what is said of the nodes of the last one. `above` collects scores for processors that read ids."""
        scores = wide(self._scores(said, growth.height), state.ctx.target)
        if points and state.warper.idle:  # a ranking of what can be drafted will do
            growth.level(scores, source, floor=-torch.inf, ids=sent(self.head.ids, scores.device))
            return
        scores = self._spread(state, scores)
        if not state.warper.free:
            above.append(scores)
            scores = torch.cat(above, 1)
        scores, open = shaped(state.warper, state.warp, scores, DraftTree(growth.tokens, growth.parents), growth.last, text)
        growth.level(scores if points else drawable(scores), source, open, floor=-torch.inf if points else 0.0)
