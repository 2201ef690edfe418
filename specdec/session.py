"""What one call leaves for the next: a chat goes on without reading its first turns again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Context, Drafter, Verifier
from .cache import copy_cache
from .ragged import Ragged
from .types import Bool, Commit, Int64

__all__ = ["Session"]

REPLAY_CHUNK = 512


class Session:
    """The target's cache, the drafter's state and the tokens so far, of a batch of rows. Pass it to the next call together with the
    whole conversation: what the session's text shares with it is not read again. The call consumes and advances it.

    An empty one, `Session()`, begins a chat; that is needed for a batch of several rows, of which those that end early then wait for
    the others. For one row every `Generation` has one.
    """

    def __init__(self) -> None:
        self._history: Ragged | None = None
        self._model: Any = None
        self._drafter: Drafter | None = None
        self._states: tuple[Any, Any] = (None, None)
        self._prompts: list[int] = []
        self._whole = True

    @property
    def ids(self) -> list[Int64[Tensor, " _"]]:
        """The tokens of each row; the target has read all but the last."""
        return [] if self._history is None else [self._history.row(i).clone() for i in range(len(self._history.lengths))]

    @classmethod
    def around(cls, cache: Any, mask: Bool[Tensor, "B L"] | None, prompts: Sequence[Int64[Tensor, " _"]], *, model: Any,
               verifier: Verifier, name: str = "session") -> Session:  # fmt: skip
        """A session that begins with a copy of what another kind of cache holds.

        Args:
            cache: see `specdec.cache.copy_cache`. It holds a beginning of every prompt.
            mask: which tokens of the padded batch are real, if it was padded.
            name: what the user calls the cache.
        """
        copied, self = copy_cache(cache, mask, name), cls()
        if len(copied.lengths) != len(prompts):
            raise ValueError(f"{name}: the cache holds {len(copied.lengths)} rows, input_ids have {len(prompts)}")
        for row, (held, prompt) in enumerate(zip(copied.lengths, prompts, strict=True)):
            if held >= len(prompt):
                raise ValueError(
                    f"{name}: the cache holds {held} tokens of row {row}, input_ids only {len(prompt)}; give the whole text, of which the "
                    "cache holds a beginning"
                )
        self._history = Ragged.empty(len(prompts))
        self._history.extend(
            [prompt[: n + 1].tolist() for n, prompt in zip(copied.lengths, prompts, strict=True)]
        )  # the last is not read yet
        self._model, self._states, self._prompts = model, (verifier.adopt(copied), None), copied.lengths
        return self

    def resume(self, model: Any, verifier: Verifier, drafter: Drafter, ctx: Context, rows: Ragged) -> tuple[list[int], Any, Any]:
        """Begin a call in which the rows of text are `rows`.

        Returns:
            How many tokens of each row the target has read already, and the states of verifier and drafter.

        Raises:
            ValueError: the session belongs to another model or batch, its text is another, or it was left inside a round.
        """
        if self._history is None:
            return [0] * ctx.batch, verifier.begin(ctx), drafter.begin(ctx)
        self._agree(model, ctx.batch)
        held = [length - 1 for length in self._history.lengths]
        keep = [self._common(row, held[row], rows) for row in range(ctx.batch)]
        state, old = self._states
        known = drafter is self._drafter and keep == held
        mine = drafter.resume(old, ctx) if known else None
        if mine is None and drafter.needs and any(keep):
            raise ValueError(
                f"drafter: {type(drafter).__name__} reads features of the target, and of the session's first {max(keep)} tokens there are "
                "none for it; leave the session out, or use the drafter from the first turn on"
            )
        state = verifier.resume(state, ctx, held, keep)
        self._whole = False  # until the first round is done, in case it never is
        return keep, state, _replay(drafter, ctx, rows, keep) if mine is None else mine

    def save(self, model: Any, drafter: Drafter, prompts: Sequence[int], history: Ragged, states: Sequence[Any]) -> None:
        """What stands after a round. The first call's prompts are remembered."""
        self._model, self._drafter, self._history, self._prompts = model, drafter, history, self._prompts or list(prompts)
        self._states, self._whole = (states[0], states[1]), True

    def leave(self) -> None:
        """A round has begun; a session that is left inside it can't be used any more."""
        self._whole = False

    def _agree(self, model: Any, batch: int) -> None:
        if not self._whole:
            raise ValueError("session: a call with it was broken off inside a round; begin a new one with specdec.Session()")
        if model is not self._model:
            raise ValueError(f"session: it belongs to another model ({_name(self._model)}, not this {_name(model)}); leave it out")
        if batch != len(self._prompts):
            raise ValueError(f"session: it holds {len(self._prompts)} rows, input_ids have {batch}; give the same rows, in the same order")

    def _common(self, row: int, held: int, rows: Ragged) -> int:
        old, new = self._history.row(row)[:held], rows.row(row)
        size = min(held, len(new) - 1)  # the last token is read in the first round
        unlike = (old[:size] != new[:size]).nonzero()
        common = int(unlike[0]) if len(unlike) else size
        if common < min(self._prompts[row] - 1, held):
            raise ValueError(
                f"session: row {row} of input_ids parts from the session's text at token {common}, inside the prompt it began with "
                f"({self._prompts[row]} tokens); give the whole conversation, or leave the session out"
            )
        return common


def _replay(drafter: Drafter, ctx: Context, rows: Ragged, lengths: Sequence[int]) -> Any:
    """A drafter's state for tokens that the target has read in another call."""
    state, todo = drafter.begin(ctx), torch.tensor(list(lengths), device="cpu")
    for start in range(0, int(todo.max()), REPLAY_CHUNK):
        count = (todo - start).clamp(0, REPLAY_CHUNK)
        state = drafter.observe(state, Commit(rows.ids[:, start : start + int(count.max())], count))
    return state


def _name(model: Any) -> str:
    return type(model).__name__
