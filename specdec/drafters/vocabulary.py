"""Do the draft model's ids mean what the target's mean?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

__all__ = ["Vocabulary", "same_tokens"]


@runtime_checkable
class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    def get_vocab(self) -> Mapping[str, int]:
        """The id of each token."""
        ...


def same_tokens(tokenizer: Vocabulary | None, target_tokenizer: Vocabulary | None) -> None:
    """Raise `ValueError` if an id that both know means one token to the draft model and another to the target, or if one of the two was
    given without the other. Ids that one of them lacks are padding; if neither was given there is nothing to compare."""
    if tokenizer is None or target_tokenizer is None:
        if tokenizer is not target_tokenizer:
            given, missing = ("tokenizer", "target_tokenizer") if target_tokenizer is None else ("target_tokenizer", "tokenizer")
            raise ValueError(f"{missing}: got {given} alone; give both, to have them compared, or neither")
        return
    ours, theirs = _by_id(tokenizer.get_vocab()), _by_id(target_tokenizer.get_vocab())
    wrong = min((i for i in ours.keys() & theirs.keys() if ours[i].isdisjoint(theirs[i])), default=None)
    if wrong is not None:
        mine, yours = min(ours[wrong]), min(theirs[wrong])
        raise ValueError(
            f"tokenizer: id {wrong} is {mine!r} to the draft model and {yours!r} to the target; a draft model has to share the target's "
            "tokens. Choose one of the same family"
        )


def _by_id(vocabulary: Mapping[str, int]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for token, number in vocabulary.items():
        found.setdefault(number, set()).add(token)
    return found
