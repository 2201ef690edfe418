"""Text on a terminal while it is being decoded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Painter", "TextFlow"]

_BROKEN = "\ufffd"


class TextFlow:
    """Token ids in, readable text out: a character whose bytes lie in several tokens comes out once it is whole.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=...)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._done = 0  # a window: the text before `_begin` is settled, that before `_done` is out
        self.text = ""
        """All that came out so far."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that became certain by these tokens; empty while a character is incomplete."""
        self._ids += tokens
        new = self._new()
        return "" if new.endswith(_BROKEN) else self._out(new)

    def flush(self) -> str:
        """What is left at the end, complete or not."""
        return self._out(self._new())

    def _new(self) -> str:
        # What stands before decides how a token is written (a leading blank, say), so the window keeps the last piece as context.
        before = self._decode(self._ids[self._begin : self._done])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _out(self, new: str) -> str:
        if new:
            self._begin, self._done = self._done, len(self._ids)
            self.text += new
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Painter:
    """Writes text with the accepted runs marked: green and underlined on a terminal, between ⟦ and ⟧ elsewhere."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._marks = ("\x1b[32;4m", "\x1b[0m") if colour else ("⟦", "⟧")
        self._inside = False

    def __call__(self, text: str, drafted: bool) -> None:
        if not text:
            return
        if drafted != self._inside:
            self._write(self._marks[self._inside])
            self._inside = drafted
        self._write(text)

    def end(self) -> None:
        if self._inside:
            self._write(self._marks[1])
            self._inside = False
