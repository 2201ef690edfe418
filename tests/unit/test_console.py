"""Text on a terminal: no character is shown before it is whole, and the marks stand around what was accepted."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cli.console import Painter, TextFlow


@given(st.text(min_size=1, max_size=12), st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_pieces_are_whole_and_make_up_the_text(byte_tokenizer, text: str, cuts: list[int]) -> None:
    ids = byte_tokenizer(text)["input_ids"]
    flow, pieces, at = TextFlow(byte_tokenizer), [], 0
    while at < len(ids):
        step = cuts[len(pieces) % len(cuts)]
        pieces.append(flow.push(ids[at : at + step]))
        at += step
    assert text.startswith("".join(pieces))  # every piece is whole characters of the text
    pieces.append(flow.flush())
    assert "".join(pieces) == flow.text == byte_tokenizer.decode(ids) == text


def test_a_character_waits_for_its_last_byte(byte_tokenizer) -> None:
    flow = TextFlow(byte_tokenizer)
    assert [flow.push([token]) for token in byte_tokenizer("a🎉b")["input_ids"]] == ["a", "", "", "", "🎉", "b"]
    assert flow.flush() == ""


def test_a_character_cut_off_for_good_is_shown_at_the_end(byte_tokenizer) -> None:
    flow = TextFlow(byte_tokenizer)
    assert flow.push(byte_tokenizer("a🎉")["input_ids"][:-1]) == ""
    assert flow.flush() == "a\ufffd" == flow.text


def test_special_tokens_are_silent(byte_tokenizer) -> None:
    flow = TextFlow(byte_tokenizer)
    assert [flow.push([token]) for token in [*byte_tokenizer("ab")["input_ids"], 256]] == ["a", "b", ""]
    assert flow.flush() == ""


def test_long_texts_cost_no_more_per_token(byte_tokenizer) -> None:
    decoded = []

    class Counting:
        def decode(self, ids, skip_special_tokens):
            decoded.append(len(ids))
            return byte_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    flow = TextFlow(Counting())
    for token in byte_tokenizer("abc" * 50)["input_ids"]:
        flow.push([token])
    assert flow.text == "abc" * 50 and max(decoded) <= 2


@pytest.mark.real
def test_the_real_tokenizer(smollm2) -> None:
    _, tokenizer = smollm2
    text = "naïve 日本語 🎉 don't\n\n  x = 1 ü"
    flow = TextFlow(tokenizer)
    pieces = [flow.push([token]) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text and "" in pieces


def paint(*pieces: tuple[str, bool]) -> str:
    out: list[str] = []
    painter = Painter(out.append)
    for text, drafted in pieces:
        painter(text, drafted)
    painter.end()
    return "".join(out)


def test_marks_stand_around_accepted_runs(monkeypatch) -> None:
    pieces = [("a", False), ("b", True), ("", False), ("c", True), ("d", False), ("e", True)]
    assert paint(*pieces) == "a⟦bc⟧d⟦e⟧"
    assert paint(("a", False)) == "a" and paint() == ""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert paint(*pieces) == "a\x1b[32;4mbc\x1b[0md\x1b[32;4me\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint(*pieces) == "a⟦bc⟧d⟦e⟧"
