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
    whole conversation: what its text shares with that, from the beginning on, is not read again. The call consumes and advances it.

    An empty one, `Session()`, begins a chat; that is needed for a batch of several rows, of which those that end early then wait for
    the others. For one row every `Generation` has one.
    """

    def __init__(self) -> None:
        self._shown: Ragged | None = None
        self._skip: Sequence[int] = ()
        self._model: Any = None
        self._drafter: Drafter | None = None
        self._states: tuple[Any, Any] = (None, None)
        self._call: object = None
        """Whose session it is: the latest call's, for no two may write into one cache."""
        self._whole = True

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
        shown = Ragged.empty(len(prompts))
        # As after a round: the last token is not read yet.
        shown.extend([prompt[: n + 1].tolist() for n, prompt in zip(copied.lengths, prompts, strict=True)])
        self._model, self._shown, self._skip, self._states = model, shown, [0] * len(prompts), (verifier.adopt(copied), None)
        return self

    @property
    def ids(self) -> list[Int64[Tensor, " _"]]:
        """The tokens of each row; the target has read all but the last."""
        if self._shown is None:
            return []
        return [self._shown.row(row)[skip:].clone() for row, skip in enumerate(self._skip)]

    @property
    def begun(self) -> bool:
        """Whether there is anything in it."""
        return self._shown is not None

    def close(self) -> None:
        """Let go of the target's cache and the drafter's state; the session is then as good as new."""
        vars(self).update(vars(Session()))

    def resume(
        self, call: object, model: Any, verifier: Verifier, drafter: Drafter, ctx: Context, rows: Ragged
    ) -> tuple[list[int], Any, Any]:
        """Begin a call in which the rows of text are `rows`. From here on the session is this call's.

        Returns:
            How many tokens of each row the target has read already, and the states of verifier and drafter.

        Raises:
            ValueError: the session belongs to another model or batch, its text is another, or it was left inside a round.
        """
        if self._shown is None:
            self._call = call
            return [0] * ctx.batch, verifier.begin(ctx), drafter.begin(ctx)
        if not self._whole:
            raise ValueError("session: a call with it was broken off inside a round; begin a new one with specdec.Session()")
        if model is not self._model:
            raise ValueError(f"session: it belongs to another model, a {type(self._model).__name__}; leave it out")
        if ctx.batch != len(self._skip):
            raise ValueError(f"session: it holds {len(self._skip)} rows, input_ids have {ctx.batch}; give the same rows, in the same order")
        history = self._shown.behind(self._skip)
        held = [length - 1 for length in history.lengths]
        keep = [_common(row, history.row(row)[:n], rows.row(row)) for row, n in enumerate(held)]
        state, old = self._states
        mine = drafter.resume(old, ctx, keep) if drafter is self._drafter else None
        if mine is None and drafter.needs and any(keep):
            raise ValueError(
                f"drafter: {type(drafter).__name__} reads features of the target, and of the session's first {max(keep)} tokens there are "
                "none for it; leave the session out, or use the drafter from the first turn on"
            )
        state = verifier.resume(state, ctx, held, keep)
        self._call, self._whole = call, False  # until the first round is done, in case it never is
        return keep, state, _replay(drafter, ctx, rows, keep) if mine is None else mine

    def leave(self, call: object) -> None:
        """A round begins: left inside it, the session can't be used any more. ValueError if it is another call's by now."""
        if call is not self._call:
            raise ValueError("session: another call has gone on with it; a session follows one text, so give each call its own")
        self._whole = False

    def save(self, model: Any, drafter: Drafter, shown: Ragged, skip: Sequence[int], states: Sequence[Any]) -> None:
        """What stands after a round: `shown` less `skip` tokens of padding in each row."""
        self._model, self._drafter, self._shown, self._skip = model, drafter, shown, skip
        self._states, self._whole = (states[0], states[1]), True


def _common(row: int, old: Int64[Tensor, " K"], new: Int64[Tensor, " L"]) -> int:
    """How many tokens both begin with; the last one of the new text is read in the first round."""
    size = min(len(old), len(new) - 1)
    unlike = (old[:size] != new[:size]).nonzero()
    common = int(unlike[0]) if len(unlike) else size
    if size and not common:
        raise ValueError(
            f"session: row {row} of input_ids has nothing in common with the session's text; give the whole conversation, or leave the "
            "session out"
        )
    return common


def _replay(drafter: Drafter, ctx: Context, rows: Ragged, lengths: Sequence[int]) -> Any:
    """A drafter's state for tokens that the target has read in another call."""
    state, todo = drafter.begin(ctx), torch.tensor(list(lengths), device="cpu")
    for start in range(0, int(todo.max()), REPLAY_CHUNK):
        count = (todo - start).clamp(0, REPLAY_CHUNK)
        state = drafter.observe(state, Commit(rows.ids[:, start : start + int(count.max())], count))
    return state
