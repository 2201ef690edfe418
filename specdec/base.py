"""The four parts of a round that a reader may replace. Read this file first; `loop.py` shows how they are called.

    prompt ─► prefill ─► [ plan ─► propose ─► verify ─► accept ─► cut ─► commit ─► observe ] ... ─► tokens

A part holds weights and settings only. What belongs to one call is a *state*, made by `begin` and passed to every method, so one
object serves interleaved sequences. A state is used once: after it was passed to `observe` or `select` only what came back counts,
and tensors inside may have been written in place.

Abstract or final: subclasses fill in the abstract methods and override nothing else but `resume` and `adopt`, which refuse to begin
with. Vary a part by its fields or by wrapping it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, final

from torch import Tensor

from .cache import FullCache
from .ragged import Ragged
from .rng import Source
from .tree import chain
from .types import NO_FEATURES, Acceptance, Budget, Commit, DraftTree, Features, Int64, Kind, Round, Scores, TargetFacts, Verification

if TYPE_CHECKING:
    from .warp import Warper

__all__ = ["Acceptor", "Context", "ContextDrafter", "Drafter", "Planner", "Verifier"]

State = Any
"""Whatever a part keeps per call; opaque to everyone else."""


@dataclass(frozen=True)
class Context:
    """What every part is told when a call begins."""

    batch: int
    target: TargetFacts
    warper: Warper
    """Turns logits into the law, for the target and for a drafter that wants to draw as the target does."""
    greedy: bool
    capacity: int
    """No row will become longer than this, in tokens."""
    needs: Features = NO_FEATURES
    """What the drafter asked the verifier for."""


class Drafter(ABC):
    """Guesses what the target will say. Any guess is safe; a good one saves target passes."""

    needs: Features = NO_FEATURES
    """Hidden states of the target that should come with every commit."""
    draws: frozenset[Kind] = frozenset({Kind.POINT})
    """Every kind of draw that its trees may hold. An acceptor is chosen, or refused, by this before anything is decoded."""
    chains: bool = False
    """Whether all its trees are chains, where no node has two children and no two draws land on one node."""
    fixed_widths: bool = False
    """Whether how many samples are drawn below a node is settled before the first of them is."""

    @abstractmethod
    def begin(self, ctx: Context) -> State:
        """The state for a new batch. The prompt, less its last token, follows as commits to `observe`."""

    @abstractmethod
    def propose(self, state: State, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        """A tree rooted at `pending` (on the CPU), within `budget`. All randomness comes from `source`, and what it drew stays in the tree.

        The tree may live on the CPU whatever the target's device is. Drafting nothing (`root_only(pending)`) is always right.
        """

    @abstractmethod
    def observe(self, state: State, commit: Commit, round: Round | None = None) -> State:
        """Take in what became permanent. `round` is there except for the prompt. Recognise nodes by their token paths, never by
        index: the tree that was verified may have been merged with others'."""

    @abstractmethod
    def select(self, state: State, rows: Sequence[int]) -> State:
        """The state with these rows, in this order; rows left out are gone for good."""

    @final
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses. `model.generate` passes over what it can't call, and would decode plainly without a word."""
        raise TypeError(f"{type(self).__name__} is no decoding method; wrap it: custom_generate=specdec.custom_generate(drafter=...)")

    def resume(self, state: State, ctx: Context, keep: Sequence[int]) -> State | None:
        """The state of an earlier call for one that goes on with the first `keep` committed tokens of each row, under new options.
        `None`, as here, if that can't be: a new state is begun and shown the tokens again, without features of the target."""
        return None


class ContextDrafter(Drafter):
    """A drafter that needs the tokens so far and nothing else: write `guess`, the rest is done.

    class Repeat(ContextDrafter):
        def guess(self, ids, budget):
            return [[int(row[-1])] * int(k) for row, k in zip(ids, budget.depth)]
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("begin", "propose", "observe", "select", "resume"):
            if name in cls.__dict__:
                raise TypeError(f"{cls.__name__}.{name}: a ContextDrafter defines guess alone; subclass Drafter to write {name}")

    @abstractmethod
    def guess(self, ids: list[Int64[Tensor, " _"]], budget: Budget) -> Sequence[Sequence[int]] | DraftTree:
        """One list of drafted tokens per row (cut to the budget, may be empty), or a tree of point draws.

        Args:
            ids: the tokens of each row on the CPU, the pending one last. Views: do not write to them.
            budget: per row, how much may be drafted.
        """

    @final
    def begin(self, ctx: Context) -> Ragged:
        return Ragged.empty(ctx.batch)

    @final
    def propose(self, state: Ragged, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        last = pending.tolist()
        guesses = self.guess(state.with_next(last), budget)
        if isinstance(guesses, DraftTree):
            return guesses
        if not isinstance(guesses, Sequence) or len(guesses) != len(last) or not all(isinstance(row, Sequence | Tensor) for row in guesses):
            raise ValueError(
                f"{type(self).__name__}.guess: returned {guesses!r}; give one list of token ids for each of the {len(last)} rows"
            )
        return chain([guess[:k] for guess, k in zip(guesses, budget.chain.tolist(), strict=True)], last)

    @final
    def observe(self, state: Ragged, commit: Commit, round: Round | None = None) -> Ragged:
        state.extend(commit.tokens, commit.count)
        return state

    @final
    def select(self, state: Ragged, rows: Sequence[int]) -> Ragged:
        return state.select(rows)

    @final
    def resume(self, state: Ragged, ctx: Context, keep: Sequence[int]) -> Ragged:
        return Ragged(state.ids, list(keep))


class Verifier(ABC):
    """The target model: scores a tree in one pass and keeps what was accepted. Its state is written in place."""

    @property
    @abstractmethod
    def facts(self) -> TargetFacts:
        """What a drafter may know of the target."""

    @abstractmethod
    def begin(self, ctx: Context) -> State:
        """An empty state for a batch."""

    @abstractmethod
    def extend(self, state: State, tokens: Int64[Tensor, "B T"], count: Int64[Tensor, " B"]) -> Commit:
        """Read the first `count` tokens of each row (on the CPU) and make them permanent, without scoring them: the prompt."""

    @abstractmethod
    def verify(self, state: State, tree: DraftTree) -> Scores:
        """The target's logits after every node, in one pass. Opens a transaction: not committing it is the rollback."""

    @abstractmethod
    def commit(self, state: State, path: Int64[Tensor, "B D"], count: Int64[Tensor, " B"]) -> Commit:
        """Make the first `count` nodes of each row's path (both on the CPU) permanent and drop the rest. A count of 0 keeps the
        row as it was."""

    @abstractmethod
    def select(self, state: State, rows: Sequence[int]) -> State:
        """The state with these rows, in this order."""

    def resume(self, state: State, ctx: Context, held: Sequence[int], keep: Sequence[int]) -> State:
        """The state of an earlier call for one that goes on from it. A verifier without this can't take part in a session.

        Args:
            held: how many tokens of each row the state should hold; ValueError if it holds others.
            keep: to how many of them it goes back.
        """
        raise ValueError(f"session: {type(self).__name__} can't go on from an earlier call; leave session out")

    def adopt(self, cache: FullCache) -> State:
        """A state around keys and values that were computed elsewhere."""
        raise ValueError(f"session: {type(self).__name__} can't take a cache over; leave session out")


class Acceptor(ABC):
    """Decides which drafted tokens stand, so that the output keeps the target's law. Stateless and pure."""

    lossless: ClassVar[bool]
    """Whether the output law is exactly the target's. `specdec.testing.certify` checks the claim."""
    takes: ClassVar[frozenset[Kind]]
    """Kinds of draw it treats exactly. A tree with any other is refused rather than answered with a biased text."""
    greedy: ClassVar[bool] = False
    """Whether it follows the target's argmax instead of its law."""
    chains: ClassVar[bool] = False
    """Whether it takes chains alone."""
    fixed_widths: ClassVar[bool] = False
    """Whether it takes siblings that are samples only if their number is settled before the first of them is drawn."""

    @abstractmethod
    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        """Vectorised over rows; draws only through `source`; changes none of its arguments."""


class Planner(ABC):
    """Decides how much is drafted each round."""

    @abstractmethod
    def begin(self, ctx: Context) -> State: ...

    @abstractmethod
    def plan(self, state: State, lengths: Sequence[int]) -> Budget:
        """The budget of the next round; the loop clamps it to the room left.

        Args:
            lengths: tokens of each live row so far, the pending one included.
        """

    @abstractmethod
    def observe(self, state: State, round: Round) -> State: ...

    @abstractmethod
    def select(self, state: State, rows: Sequence[int]) -> State: ...
