"""Ends against plain decoding: one token at a time, every criterion of transformers called after each."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specdec.stops import Ends

LETTERS = "abcdefghijkl"
WORDS = {**{c: i for i, c in enumerate(LETTERS)}, "bc": 12, "cde": 13}
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(WORDS, unk_token="a")))
TOKENIZER.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
TOKENIZER.backend_tokenizer.decoder = decoders.Fuse()
PROMPT = [0, 0, 1]


class After(StoppingCriteria):
    """Remembers what it was shown; ends after `count` tokens with the value `token`, wherever they came."""

    def __init__(self, token: int, count: int) -> None:
        self.token, self.count = token, count
        self.shown: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert input_ids.shape[0] == 1 and scores is None
        self.shown.append(input_ids[0].tolist())
        self.count -= int(input_ids[0, -1] == self.token)
        return torch.tensor([self.count <= 0])


def plain(criteria: Sequence[Any], prompt: list[int], new: Sequence[int], eos: frozenset[int], limit: int) -> int:
    """How many of these tokens plain decoding keeps."""
    everything = StoppingCriteriaList([*criteria, MaxLengthCriteria(limit)])
    if eos:
        everything.append(EosTokenCriteria(sorted(eos)))
    for kept in range(1, len(new) + 1):
        if everything(torch.tensor([[*prompt, *new[:kept]]]), None):
            return kept
    return len(new)


def ends(eos: Sequence[int] = (), limit: int = 99, context: int | None = None, criteria: Sequence[Any] = (), batch: int = 1) -> Ends:
    return Ends(eos=frozenset(eos), limits=[limit] * batch, context=context, criteria=criteria)


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("reason", ["eos", "stop", "criteria", "length", "context"])
def test_each_event_at_each_offset(reason: str, offset: int) -> None:
    new = [4, 4, 4, 4, 4]
    new[offset] = 6
    criteria: list[Any] = []
    if reason == "stop":
        criteria = [StopStringCriteria(TOKENIZER, "g")]
    if reason == "criteria":
        criteria = [lambda ids, scores: ids[:, -1] == 6]
    at = len(PROMPT) + offset + 1
    here = ends([6, 9] if reason == "eos" else [9], at if reason == "length" else 99, at if reason == "context" else 50, criteria)
    ids = torch.tensor(PROMPT)
    assert here.scan(0, ids, new) == (offset + 1, reason)
    assert here.scan(0, ids, new[:offset]) == (offset, None) and ids.tolist() == PROMPT


def test_nothing_happens_and_nothing_is_new() -> None:
    assert ends([9], context=50).scan(0, torch.tensor(PROMPT), [1, 2]) == (2, None)
    assert ends([9], context=50, criteria=[After(1, 1)]).scan(0, torch.tensor(PROMPT), []) == (0, None)


def test_the_first_of_several_reasons_on_one_token_is_named() -> None:
    stop, user = StopStringCriteria(TOKENIZER, ["zzz", "g"]), lambda ids, scores: ids[:, -1] == 6  # noqa: E731
    at = len(PROMPT) + 1
    names = ["eos", "stop", "criteria", "length", "context"]
    for first, name in enumerate(names):
        on = set(names[first:])
        here = ends(
            [6] if "eos" in on else [], at if "length" in on else 99, at,
            [c for c, n in ((user, "criteria"), (stop, "stop")) if n in on],
        )  # fmt: skip
        assert here.scan(0, torch.tensor(PROMPT), [6, 6]) == (1, name)


@pytest.mark.parametrize("split", [[9], [1, 8], [4, 5], [2, 2, 5], [1] * 9])
@pytest.mark.parametrize("stop", ["cdef", ["bcd"], ["xx", "def"], "l"])
def test_stop_strings_across_tokens_and_rounds(split: list[int], stop: str | list[str]) -> None:
    text = [1, 12, 3, 0, 1, 13, 5, 6, 11]  # b bc d a b cde f g l
    kept = plain([StopStringCriteria(TOKENIZER, stop)], PROMPT, text, frozenset(), 99)
    here, ids, reason = ends(criteria=[StopStringCriteria(TOKENIZER, stop)]), list(PROMPT), None
    for size in split:
        done = len(ids) - len(PROMPT)
        n, reason = here.scan(0, torch.tensor(ids), text[done : done + size])
        ids += text[done : done + n]
        if reason:
            break
    assert ids == [*PROMPT, *text[:kept]] and reason == "stop"


EVENTS = st.lists(st.integers(0, 13), min_size=1, max_size=12)


@given(EVENTS, EVENTS, st.sets(st.integers(0, 13), max_size=2), st.integers(4, 14), st.integers(0, 13), st.integers(1, 3))
def test_rounds_end_where_plain_decoding_ends(first: list[int], second: list[int], eos: set[int], limit: int, token: int, n: int) -> None:
    text = [*first, *second]
    mine, theirs = After(token, n), After(token, n)
    stop = StopStringCriteria(TOKENIZER, ["cd", "ab"])
    kept = plain([theirs, stop], PROMPT, text, frozenset(eos), limit)
    here = ends(sorted(eos), limit, None, [mine, stop])
    got, reason = here.scan(0, torch.tensor(PROMPT), first)
    if reason is None:
        assert got == len(first)
        more, reason = here.scan(0, torch.tensor([*PROMPT, *first]), second)
        got += more
    assert got == kept and mine.shown == theirs.shown
    assert reason is not None or (got == len(text) and got + len(PROMPT) < limit)


def test_a_criterion_may_keep_what_it_is_shown() -> None:
    kept: list[Tensor] = []

    def keep(ids: Tensor, scores: Any) -> bool:
        kept.append(ids)
        return False

    here, ids = ends(criteria=[keep]), torch.tensor([*PROMPT, 9, 9, 9])
    here.scan(0, ids[:3], [5, 6])
    ids[:] = 0
    here.scan(0, ids[:5], [7])
    assert [x.tolist() for x in kept] == [[[0, 0, 1, 5]], [[0, 0, 1, 5, 6]], [[0, 0, 0, 0, 0, 7]]]


def test_time_limit() -> None:
    assert ends(criteria=[MaxTimeCriteria(1e9)]).scan(0, torch.tensor(PROMPT), [1, 2]) == (2, None)
    assert ends(criteria=[MaxTimeCriteria(1.0, initial_timestamp=0.0)]).scan(0, torch.tensor(PROMPT), [1, 2]) == (1, "criteria")


def test_rows_of_a_batch_have_criteria_of_their_own() -> None:
    user = After(6, 2)
    here = ends(criteria=[user], batch=2)
    assert here.scan(0, torch.tensor(PROMPT), [6, 1]) == (2, None)
    assert here.scan(1, torch.tensor(PROMPT), [6, 1]) == (2, None)
    assert here.scan(1, torch.tensor([*PROMPT, 6, 1]), [6, 1]) == (1, "criteria")
    assert user.shown == [] and user.count == 2
    alone = ends(criteria=[user])
    assert alone.scan(0, torch.tensor(PROMPT), [6, 6]) == (2, "criteria")
    assert len(user.shown) == 2  # one row: the object itself, as in plain decoding


def test_what_cannot_be_copied_is_refused_in_a_batch() -> None:
    class Locked(After):
        def __deepcopy__(self, memo: dict) -> After:
            raise ValueError("there is only one of me")

    with pytest.raises(TypeError, match="stopping_criteria: Locked cannot be copied.*only one of me.*pure = True"):
        ends(criteria=[Locked(1, 1)], batch=2)
    seen: list[int] = []

    def remembers(ids: Tensor, scores: Any) -> bool:
        seen.append(1)
        return False

    with pytest.raises(TypeError, match="function.*is its own copy"):
        ends(criteria=[remembers], batch=2)
    remembers.pure = True  # type: ignore[attr-defined]
    assert ends(criteria=[remembers], batch=2).scan(1, torch.tensor(PROMPT), [1]) == (1, None)
    assert ends(criteria=[lambda ids, scores: True], batch=2).scan(1, torch.tensor(PROMPT), [1]) == (1, "criteria")


def test_room() -> None:
    here = Ends(eos=frozenset(), limits=[5, 20, 10], context=10)
    assert [here.room(0, 3), here.room(0, 5), here.room(0, 8), here.room(1, 3), here.room(1, 10), here.room(2, 9)] == [2, 0, 0, 7, 0, 1]
    assert [here.why_not(0, 4), here.why_not(0, 5), here.why_not(1, 10), here.why_not(2, 10)] == [None, "length", "context", "length"]
    assert here.limits == [5, 10, 10]
    for row, reason in ((0, "length"), (1, "context"), (2, "length")):
        assert here.scan(row, torch.zeros(here.limits[row] - 2, dtype=torch.int64), [1, 2, 3, 4]) == (2, reason)


def test_transformers_own_criteria_take_the_place_of_the_options() -> None:
    given_ = [EosTokenCriteria([4, 6]), After(9, 1), MaxLengthCriteria(8), MaxLengthCriteria(7)]
    here = Ends.of(given_, lengths=[3, 9], limits=[20, 20], eos=frozenset({1}), context=15)
    assert here.eos == {4, 6} and here.limits == [7, 10]
    assert here.scan(0, torch.tensor(PROMPT), [1, 1, 4]) == (3, "eos")
    assert here.scan(0, torch.tensor(PROMPT), [1] * 9) == (4, "length")
    assert here.scan(0, torch.tensor(PROMPT), [9] * 9) == (1, "criteria")
    bare = Ends.of([], lengths=[3], limits=[20], eos=frozenset({1}), context=15)
    assert bare.eos == {1} and bare.limits == [15]


def test_the_common_path_does_not_touch_the_context() -> None:
    class Untouchable:
        def __len__(self) -> int:
            return 1000

    scan = inspect.unwrap(Ends.scan)  # without the shapes' checks
    assert scan(ends([9], 5000, 6000), 0, Untouchable(), [1, 9, 2]) == (2, "eos")  # type: ignore[arg-type]


def test_rows_that_begin_with_padding_have_a_context_of_their_own() -> None:
    here = Ends(eos=frozenset(), limits=[20, 20, 11], context=[10, 13, 13])
    assert [here.room(row, 9) for row in range(3)] == [1, 4, 2]
    assert [here.scan(row, torch.zeros(9, dtype=torch.int64), [1] * 6) for row in range(3)] == [
        (1, "context"), (4, "context"), (2, "length")]  # fmt: skip
