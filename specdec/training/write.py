"""The target writes training text: many dialogues in step, one token of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ..cache import CausalTarget, FullCache
from ..types import Bool, Float, Int64
from .script import Say, Script, Speak

__all__ = ["write"]

_CHUNK = 32768
"""Tokens of all rows that one pass reads."""


class _Row:
    """Where one dialogue stands: words that are put into it, or how it speaks."""

    def __init__(self, script: Script, end: int) -> None:
        self._script, self._end = script, end
        self._next(next(script))

    def _next(self, step: Say | Speak) -> None:
        while isinstance(step, Say) and not step.words:
            step = next(self._script)
        self.forced = list(step.words) if isinstance(step, Say) else []
        self.speaks = step if isinstance(step, Speak) else None
        self._spoken: list[int] = []

    def take(self, token: int | None) -> tuple[int, bool]:
        """The next token of the dialogue, given what the target would say; and whether it is the target's own word."""
        if self.forced:
            word, own = self.forced.pop(0), False
            if not self.forced:
                self._next(next(self._script))
            return word, own
        assert self.speaks is not None and token is not None
        ends = token == self._end
        if not ends:
            self._spoken.append(token)
        if ends or len(self._spoken) == self.speaks.limit:
            self._next(self._script.send(self._spoken))
            if ends and self.forced[:1] == [token]:  # the template closes the turn with it
                self.take(None)
        return token, True


def write(target: CausalTarget, scripts: Sequence[Script], length: int, end: int, seed: int,
          show: Callable[[int], None] = lambda tokens: None) -> tuple[Int64[Tensor, "B T"], Bool[Tensor, "B T"]]:  # fmt: skip
    """Dialogues of exactly `length` tokens each. All rows are as long as each other at every moment, so no pass needs a mask or padding.

    Args:
        end: the token that ends a turn.
        seed: of the draws.
        show: told how many tokens are new.

    Returns:
        The tokens, on the CPU, and which of them the target found itself.
    """
    rows, device = [_Row(script, end) for script in scripts], target.facts.device
    noise, cache = torch.Generator(device).manual_seed(seed), target.new_cache(len(scripts))
    tokens: list[list[int]] = [[] for _ in rows]
    own: list[list[bool]] = [[] for _ in rows]

    def take(row: int, token: int | None) -> int:
        word, mine = rows[row].take(token)
        tokens[row].append(word)
        own[row].append(mine)
        return word

    given = min(length, min(len(row.forced) for row in rows))
    opening = torch.tensor([[take(row, None) for _ in range(given)] for row in range(len(rows))])
    with torch.inference_mode():
        logits = _read(target, cache, opening.to(device))
        show(len(rows) * given)
        for _ in range(given, length):
            said = _say(logits, [row.speaks for row in rows], noise)
            words = torch.tensor([take(row, token) for row, token in enumerate(said.tolist())])
            logits = _read(target, cache, words[:, None].to(device))
            show(len(rows))
    return torch.tensor(tokens), torch.tensor(own)


def _say(logits: Float[Tensor, "B V"], speaks: Sequence[Speak | None], noise: torch.Generator) -> Int64[Tensor, " B"]:
    said = logits.argmax(-1)
    drawn = [row for row, how in enumerate(speaks) if how is not None and how.temperature > 0]
    if drawn:
        heat = torch.tensor([cast(Speak, speaks[row]).temperature for row in drawn], device=logits.device)
        mass = (logits[drawn].float() / heat[:, None]).softmax(-1).cumsum(-1)
        level = torch.rand(len(drawn), 1, generator=noise, device=logits.device) * mass[:, -1:]
        said[drawn] = torch.searchsorted(mass, level, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    return said


def _read(target: CausalTarget, cache: FullCache, tokens: Int64[Tensor, "B T"]) -> Float[Tensor, "B V"]:
    """Make these tokens permanent: the logits after the last of them."""
    batch, step = len(tokens), max(1, _CHUNK // len(tokens))
    found = None
    # Logits are wanted of the last token alone: they are wide.
    for part in (*tokens[:, :-1].split(step, 1), tokens[:, -1:]):
        steps = torch.arange(part.shape[1], device=tokens.device)
        if not len(steps):
            continue
        cache.open(len(steps))
        positions = (cache.start + steps).expand(batch, -1)
        found, _ = target.forward(part, positions, None, cache, logits=len(steps) == 1)
        cache.commit(steps.cpu().expand(batch, -1), torch.full((batch,), len(steps)))
    return cast(Tensor, found)[:, -1]
