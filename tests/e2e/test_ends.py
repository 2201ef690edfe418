"""A stop event of each kind, at every offset of an accepted run: ids, scores, text and cache end as in plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria

import specdec
from specdec import FixedPlanner, TreeVerifier
from specdec.models.tiny import TinyTarget

V = 17
TARGET = TinyTarget(vocab_size=V, seed=11)
PROMPT = [3, 1, 4, 1, 5]
SEED = 8
ALPHABET = "abcdefghijklmnopq"
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({c: i for i, c in enumerate(ALPHABET)}, [])))
TOKENIZER._tokenizer.decoder = decoders.Fuse()


class Spy(specdec.Verifier):
    """Passes everything on and keeps the last state in sight."""

    def __init__(self, inner: specdec.Verifier) -> None:
        self.inner, self.state = inner, None

    facts = property(lambda self: self.inner.facts)

    def begin(self, ctx: specdec.Context) -> Any:
        self.state = self.inner.begin(ctx)
        return self.state

    def extend(self, state: Any, tokens: torch.Tensor, count: torch.Tensor) -> specdec.Commit:
        return self.inner.extend(state, tokens, count)

    def verify(self, state: Any, tree: specdec.DraftTree) -> specdec.Verification:
        return self.inner.verify(state, tree)

    def commit(self, state: Any, path: torch.Tensor, count: torch.Tensor) -> specdec.Commit:
        return self.inner.commit(state, path, count)

    def select(self, state: Any, rows: list[int]) -> Any:
        self.state = self.inner.select(state, rows)
        return self.state


class Replay(specdec.ContextDrafter):
    """Drafts a text known beforehand, so that every run is accepted whole."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def guess(self, ids: list[torch.Tensor], budget: specdec.Budget) -> list[list[int]]:
        return [self.text[len(row) : len(row) + int(k)] for row, k in zip(ids, budget.depth, strict=True)]


class EndsAt(StoppingCriteria):
    """A criterion with memory: ends after so many calls, and remembers the lengths that it was shown."""

    def __init__(self, calls: int) -> None:
        self.left, self.seen = calls, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        self.seen.append(input_ids.shape[1])
        return torch.full((len(input_ids),), self.left <= 0)


def one_more(token: int, cache: Any) -> tuple:
    """Arguments of a pass over one more token behind what the cache holds."""
    cache.open(1)
    return torch.tensor([[token]]), torch.tensor([cache.lengths]), None, cache


SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": [SEED], "acceptor": specdec.CoupledAcceptor()}


def text_of(new: int) -> specdec.Generation:
    return specdec.generate(TARGET, [PROMPT], drafter=specdec.NullDrafter(), max_new_tokens=new, eos_token_id=[], **SAMPLING)


FULL = text_of(24)
NEW = FULL.new_tokens[0].tolist()
assert len(set(NEW)) > 8, "the text must be varied for the events to fall at different offsets"


def eos(n: int) -> tuple[dict, int, str]:
    return {"eos_token_id": [NEW[n - 1]]}, NEW.index(NEW[n - 1]) + 1, "eos"


def several_eos(n: int) -> tuple[dict, int, str]:
    ids = [NEW[n - 1], NEW[n]]
    return {"eos_token_id": ids}, min(map(NEW.index, ids)) + 1, "eos"


def stop_string(n: int) -> tuple[dict, int, str]:
    text = "".join(ALPHABET[t] for t in NEW)
    stop = text[n - 1 : n + 1]
    return {"stop_strings": [stop], "tokenizer": TOKENIZER}, text.index(stop) + 2, "stop"


def criterion(n: int) -> tuple[dict, int, str]:
    return {"stopping_criteria": [EndsAt(n)]}, n, "criteria"


def length(n: int) -> tuple[dict, int, str]:
    return {"max_new_tokens": n}, n, "length"


def total_length(n: int) -> tuple[dict, int, str]:
    return {"max_length": len(PROMPT) + n, "max_new_tokens": None}, n, "length"


def context(n: int) -> tuple[dict, int, str]:
    return {"limit": len(PROMPT) + n}, n, "context"


@pytest.mark.slow
@pytest.mark.parametrize("event", [eos, several_eos, stop_string, criterion, length, total_length, context])
@pytest.mark.parametrize("k", [3, 6])
def test_ends_where_plain_decoding_ends(event: Callable[[int], tuple[dict, int, str]], k: int) -> None:
    for n in range(1, 13):
        options, kept, reason = event(n)
        limit = options.pop("limit", None)
        target = TARGET if limit is None else TinyTarget(vocab_size=V, seed=11, max_positions=limit)
        spy = Spy(TreeVerifier(target))
        arguments = {"max_new_tokens": 20, "eos_token_id": [], **SAMPLING, **options}
        out = specdec.generate(target, [PROMPT], verifier=spy, drafter=Replay(PROMPT + NEW), planner=FixedPlanner(k), **arguments)
        assert out.new_tokens[0].tolist() == NEW[:kept]
        assert out.finish_reason == [reason]
        torch.testing.assert_close(out.logprobs[0], FULL.logprobs[0][:kept], rtol=0, atol=1e-12)
        assert out.stats.emitted == kept
        # The cache holds all tokens but the last one emitted, as after plain decoding, and they are what a fresh prefill gives.
        assert spy.state.cache.lengths == [len(PROMPT) + kept - 1]
        cached = target.forward(*one_more(NEW[kept - 1], spy.state.cache), logits=True)[0][0, 0]
        torch.testing.assert_close(cached, TARGET(torch.tensor([PROMPT + NEW[:kept]]))[0], rtol=0, atol=1e-10)
        if event is criterion:
            assert options["stopping_criteria"][0].seen == [len(PROMPT) + i for i in range(1, n + 1)]


def test_several_events_in_one_run_the_earliest_wins() -> None:
    text = "".join(ALPHABET[t] for t in NEW)
    for n in range(2, 10):
        out = specdec.generate(
            TARGET, [PROMPT], drafter=Replay(PROMPT + NEW), planner=FixedPlanner(8), max_new_tokens=n, eos_token_id=[NEW[5]],
            stop_strings=[text[3:5]], tokenizer=TOKENIZER, **SAMPLING,
        )  # fmt: skip
        first = min((NEW.index(NEW[5]) + 1, 0, "eos"), (text.index(text[3:5]) + 2, 1, "stop"), (n, 2, "length"))
        assert (len(out.new_tokens[0]), out.finish_reason[0]) == (first[0], first[2])


def test_a_criterion_with_memory_serves_every_row_of_a_batch() -> None:
    prompts = [PROMPT, [2, 7], [0]]
    out = specdec.generate(
        TARGET, prompts, drafter=specdec.NGramDrafter(), stopping_criteria=[EndsAt(6)], max_new_tokens=30, eos_token_id=[]
    )
    assert [len(t) for t in out.new_tokens] == [6, 6, 6]
    assert out.finish_reason == ["criteria"] * 3


def test_nothing_to_generate() -> None:
    out = specdec.generate(TARGET, [PROMPT], drafter=specdec.NGramDrafter(), max_new_tokens=0)
    assert out.new_tokens[0].tolist() == [] and out.finish_reason == ["length"] and out.sequences.tolist() == [PROMPT]


def test_rows_without_room_are_left_out_of_a_call() -> None:
    target = TinyTarget(vocab_size=V, seed=11, max_positions=5)
    mixed = specdec.generate(target, [PROMPT[:4], [1]], drafter=specdec.NGramDrafter(), max_length=9)
    assert [len(t) for t in mixed.new_tokens] == [1, 4] and mixed.finish_reason == ["context"] * 2
