"""Two tokenizers are compared by what their ids mean."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.drafters import ModelDrafter
from specdec.models.tiny import TinyTarget

DRAFT = TinyTarget(11, hidden_size=16, num_layers=1, seed=4)


class Words:
    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens) if token}


def test_tokenizers_are_compared_by_what_is_in_them(byte_tokenizer, letter_tokenizer):
    def build(draft: Any, target: Any) -> ModelDrafter:
        return ModelDrafter(DRAFT, tokenizer=draft, target_tokenizer=target)

    build(byte_tokenizer, byte_tokenizer)
    words = Words("a", "b", "c")
    for same in (Words("a", "b", "c"), Words("a", "b", "c", "d"), Words("a", "b"), Words("a", "", "c")):
        build(words, same), build(same, words)
    with pytest.raises(ValueError, match=r"id 1 is 'b' to the draft model and 'c' to the target"):
        build(words, Words("a", "c", "b"))
    with pytest.raises(ValueError, match=r"id 2 is 'c' .* 'x'"):
        build(words, Words("a", "b", "x", "c"))
    with pytest.raises(ValueError, match="id 0 is"):
        build(letter_tokenizer, byte_tokenizer)
    with pytest.raises(ValueError, match="target_tokenizer: got tokenizer alone"):
        build(words, None)
    with pytest.raises(ValueError, match="tokenizer: got target_tokenizer alone"):
        build(None, words)
