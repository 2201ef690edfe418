"""What a training dialogue is made of: words that are put into the target's mouth, and words that it finds itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

__all__ = ["Say", "Script", "Speak", "Template", "Words", "dialogue"]

Words = Sequence[int]


@dataclass(frozen=True)
class Say:
    """These tokens come next."""

    words: Words


@dataclass(frozen=True)
class Speak:
    """The target goes on until it ends its turn, or for `limit` tokens.

    Args:
        temperature: 0 for the most likely token.
    """

    temperature: float
    limit: int


Script = Generator[Say | Speak, list[int], None]
"""What follows in one dialogue; it is sent what the target spoke, without the token that ended the turn."""


@dataclass(frozen=True)
class Template:
    """A chat template, cut where the turns are."""

    opening: Words
    """Up to the first words of the user."""
    answer: Words
    """From the end of the user's words up to the answer's."""
    again: Words
    """From the end of the answer's words up to the user's next ones."""
    encode: Callable[[str], list[int]]

    @property
    def end(self) -> int:
        """The token that ends a turn."""
        return self.answer[0]

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        """Read off the tokenizer's chat template.

        Raises:
            ValueError: it has none, or one in which the two roles do not end their turns with one and the same token.
        """
        marks = ["first words", "an answer", "more words", "the end"]
        turns = [{"role": role, "content": mark} for role, mark in zip(["user", "assistant"] * 2, marks, strict=True)]
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "tokenizer: it has no chat template, by which dialogues are written; give dialogues that were written elsewhere"
            )
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except TemplateError as error:
            raise ValueError(f"tokenizer: its chat template refuses a user and a model in turn, as in {turns}: {error}") from error
        parts = []
        for mark in marks:
            part, found, text = text.partition(mark)
            if not found:
                raise ValueError(
                    f"tokenizer: its chat template does not show {mark!r} of {turns}; give dialogues that were written elsewhere"
                )
            parts.append(part)

        def encode(words: str) -> list[int]:
            return tokenizer(words, add_special_tokens=False)["input_ids"]

        opening, answer, again = map(encode, parts[:3])
        if not answer or not again or answer[0] != again[0] or parts[1][:1].isspace():
            raise ValueError(
                f"tokenizer: turns end with {parts[1]!r} and {parts[2]!r} in its chat template; both should begin with one token that "
                "ends a turn and does nothing else. Give dialogues that were written elsewhere"
            )
        return cls(opening, answer, again, encode)


def dialogue(template: Template, turns: Sequence[Words], opening: Words, *, temperature: float, answer: int, question: int) -> Script:
    """Turns of the user that are given, one that the target finishes, and then what it asks itself, without end.

    Args:
        turns: those that are given whole; none is fine.
        opening: how the next one begins.
        temperature: of the answers. Questions are drawn at 1.
        answer, question: at most so many tokens of each.
    """
    between = template.opening
    for turn in turns:
        yield Say([*between, *turn, *template.answer])
        yield Speak(temperature, answer)
        between = template.again
    while True:
        yield Say([*between, *opening])
        yield Speak(1.0, question)
        yield Say(template.answer)
        yield Speak(temperature, answer)
        between, opening = template.again, ()
