"""Chats: a later turn says what a fresh call on the whole conversation says, and reads the new tokens alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import specdec
from specdec import (
    Acceptor,
    ContextDrafter,
    Drafter,
    EarlyExitDrafter,
    FixedPlanner,
    ModelDrafter,
    NGramDrafter,
    NullDrafter,
    Session,
)
from specdec.models.tiny import TinyTarget
from specdec.types import Features, Kind

pytestmark = pytest.mark.slow

V = 17
TARGET = TinyTarget(V, seed=3)
LESSER = TinyTarget(V, seed=4, hidden_size=16)
TURN = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]
SAID = [[7, 7, 8], [9], [3, 1, 2, 0, 1]]


class Repeat(ContextDrafter):
    def guess(self, ids: list[Tensor], budget: specdec.Budget) -> list[list[int]]:
        return [[int(row[-1])] * int(k) for row, k in zip(ids, budget.depth, strict=True)]


DRAFTERS: dict[str, Drafter] = {
    "null": NullDrafter(), "ngram": NGramDrafter(), "repeat": Repeat(), "model": ModelDrafter(LESSER), "itself": ModelDrafter(TARGET),
    "early": EarlyExitDrafter(TARGET, 1),
}  # fmt: skip


NAMES = ["ngram", "model", *(pytest.param(name, marks=pytest.mark.slow) for name in ("null", "repeat", "itself", "early"))]


def ask(prompts: Sequence[Sequence[int]], drafter: Drafter, **options: Any) -> specdec.Generation:
    options = {"max_new_tokens": 12, "eos_token_id": [], "planner": FixedPlanner(3)} | options
    return specdec.generate(TARGET, [list(row) for row in prompts], drafter=drafter, **options)


def texts(out: specdec.Generation) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(out.sequences, out.lengths, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_turn_through_a_session_is_a_fresh_call_on_the_whole(name: str, sampled: bool) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_k": 5, "seed": 4} if sampled else {}
    drafter, session, text = DRAFTERS[name], None, TURN[0]
    for turn in range(3):
        out = ask([text], drafter, session=session, **options)
        fresh = ask([text], drafter, **options)
        assert texts(out) == texts(fresh) and out.finish_reason == fresh.finish_reason
        torch.testing.assert_close(out.logprobs, fresh.logprobs, rtol=0, atol=1e-10)
        assert fresh.stats.prefilled == len(text) - 1
        if turn:  # the last token of the old text is read now, the last of the new one in the first round
            assert out.stats.prefilled == len(SAID[turn])
        session = out.session
        assert session is not None and session.ids[0].tolist() == texts(out)[0]
        text = texts(out)[0] + SAID[(turn + 1) % 3]


def early_end() -> int:
    """A token at which the rows of `TURN` end at different lengths, not all at the limit."""
    new = [row.tolist() for row in ask(TURN, NullDrafter()).new_tokens]
    return max(range(V), key=lambda end: len({row.index(end) if end in row else len(row) for row in new}))


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_end_early_wait_for_the_others(name: str) -> None:
    drafter, session = DRAFTERS[name], Session()
    ends = early_end()
    first = ask(TURN, drafter, session=session, eos_token_id=ends)
    alone = ask(TURN, drafter, eos_token_id=ends)
    assert texts(first) == texts(alone) and len(set(map(len, first.new_tokens))) > 1
    assert first.session is session and alone.session is None
    assert (first.stats.rounds, first.stats.emitted, first.stats.accepted) == (
        alone.stats.rounds, alone.stats.emitted, alone.stats.accepted)  # fmt: skip
    assert first.stats.truncated == alone.stats.truncated and first.stats.drafted == alone.stats.drafted
    talk = [text + more for text, more in zip(texts(first), SAID, strict=True)]
    second = ask(talk, drafter, session=session)
    assert texts(second) == texts(ask(talk, drafter))
    assert second.stats.prefilled == sum(map(len, SAID))


def test_nobody_asks_the_processors_of_a_row_that_waits() -> None:
    class Upright:
        """A grammar: it must not be asked what follows the end."""

        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            self.seen += 1
            if bool((ids[:, -1] == end).all()):
                raise RuntimeError("asked behind the end")
            return scores

    end = early_end()
    out = ask(TURN, NGramDrafter(), session=Session(), eos_token_id=end, logits_processor=[Upright()])
    assert "eos" in out.finish_reason and len(set(map(len, out.new_tokens))) > 1


def test_another_drafter_and_other_options_may_go_on() -> None:
    first = ask([TURN[0]], NGramDrafter())
    text = texts(first)[0] + SAID[0]
    for drafter, options in [(ModelDrafter(LESSER), {"do_sample": True, "seed": 1}), (NGramDrafter(), {}), (NGramDrafter(2), {})]:
        out = ask([text], drafter, session=first.session, **options)
        assert texts(out) == texts(ask([text], drafter, **options))
        assert out.stats.prefilled == len(SAID[0])
        text = texts(out)[0] + SAID[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_is_mended_or_asked_again_goes_back(name: str) -> None:
    drafter = DRAFTERS[name]
    first = ask([TURN[0]], drafter)
    mended = [*texts(first)[0][:-4], 0, 0, *SAID[0]]
    for text, read in [(mended, 2 + len(SAID[0]) - 1), (TURN[0], 0), (TURN[0] + SAID[0], len(SAID[0]))]:
        out = ask([text], drafter, session=first.session)
        assert texts(out) == texts(ask([text], drafter))
        if name != "null" or text is mended:
            assert out.stats.prefilled <= read


def test_a_stream_advances_its_session_round_by_round() -> None:
    session = Session()
    for done in specdec.stream(TARGET, [TURN[0]], drafter=NGramDrafter(), session=session, max_new_tokens=12, eos_token_id=[]):
        assert session.ids[0].tolist()[-len(done.emitted[0]) :] == list(done.emitted[0])
        if len(session.ids[0]) > len(TURN[0]) + 4:
            break  # left between rounds: what was emitted stands
    text = [*session.ids[0].tolist(), *SAID[0]]
    assert texts(ask([text], NGramDrafter(), session=session)) == texts(ask([text], NGramDrafter()))


class Needy(NullDrafter):
    needs = Features((0,))


class Breaks(Acceptor):
    lossless, takes, greedy = True, frozenset(Kind), True

    def accept(self, tree: Any, verification: Any, source: Any) -> Any:
        raise RuntimeError("broken")


def test_what_does_not_fit_a_session_is_refused_by_name() -> None:
    first = ask([TURN[0]], NGramDrafter())
    text, session = texts(first)[0] + SAID[0], first.session
    with pytest.raises(ValueError, match="another model"):
        specdec.generate(LESSER, [text], drafter=NGramDrafter(), session=session)
    with pytest.raises(ValueError, match="holds 1 rows, input_ids have 2"):
        ask([text, text], NGramDrafter(), session=session)
    with pytest.raises(ValueError, match="nothing in common with the session's text"):
        ask([SAID[0]], NGramDrafter(), session=session)
    with pytest.raises(ValueError, match="Needy reads features of the target"):
        ask([text], Needy(), session=session)
    with pytest.raises(TypeError, match="allowed are a specdec.Session and a cache"):
        ask([text], NGramDrafter(), session={"cache": None})


def test_refusals_leave_the_session_usable() -> None:
    first = ask([TURN[0]], NGramDrafter())
    text = texts(first)[0] + SAID[0]

    class Stuck:
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores

        def __deepcopy__(self, memo: Any) -> None:
            raise RuntimeError("not this one")

    ngram = NGramDrafter()
    for bad in ({"drafter": Needy()}, {"drafter": ngram, "repetition_penalty": -1.0}, {"drafter": ngram, "logits_processor": [Stuck()]}):
        with pytest.raises((ValueError, TypeError)):
            ask([text], **bad, session=first.session)
    assert texts(ask([text], NGramDrafter(), session=first.session)) == texts(ask([text], NGramDrafter()))


def test_a_session_that_was_left_inside_a_round_or_changed_outside_is_refused() -> None:
    first = ask([TURN[0]], NGramDrafter())
    text, session = texts(first)[0] + SAID[0], first.session
    with pytest.raises(RuntimeError, match="broken"):
        specdec.generate(TARGET, [text], drafter=NullDrafter(), acceptor=Breaks(), session=session)
    with pytest.raises(ValueError, match="broken off inside a round"):
        ask([text], NGramDrafter(), session=session)
    other = ask([TURN[0]], NGramDrafter()).session
    other._states[0].cache.rewind([3])
    with pytest.raises(ValueError, match="changed outside"):
        ask([text], NGramDrafter(), session=other)


def test_two_calls_do_not_share_a_session() -> None:
    """The second takes it over; the first, were it to go on, would read the second's keys and values."""
    first = ask([TURN[0]], NGramDrafter())
    text, options = texts(first)[0] + SAID[0], {"drafter": NGramDrafter(), "max_new_tokens": 9, "eos_token_id": []}
    rounds = specdec.stream(TARGET, [text], session=first.session, **options)
    next(rounds)
    second = specdec.generate(TARGET, [text + SAID[1]], session=first.session, **options)
    assert texts(second) == texts(specdec.generate(TARGET, [text + SAID[1]], **options))
    with pytest.raises(ValueError, match="another call has gone on with it"):
        next(rounds)
    longer = texts(second)[0] + SAID[1]
    assert texts(specdec.generate(TARGET, [longer], session=first.session, **options)) == texts(
        specdec.generate(TARGET, [longer], **options)
    )


def test_a_verifier_without_a_cache_takes_part() -> None:
    verifier = specdec.SequentialVerifier(TARGET, vocab_size=V, dtype=torch.float64)
    first = ask([TURN[0]], NGramDrafter(), verifier=verifier)
    text = texts(first)[0] + SAID[0]
    out = ask([text], NGramDrafter(), verifier=verifier, session=first.session)
    assert texts(out) == texts(ask([text], NGramDrafter())) and out.stats.prefilled == len(SAID[0])
    out.session._states[0].history.lengths[0] -= 2
    with pytest.raises(ValueError, match="begin a new session"):
        ask([texts(out)[0] + SAID[0]], NGramDrafter(), verifier=verifier, session=out.session)


def test_a_closed_session_is_a_new_one() -> None:
    session = ask([TURN[0]], NGramDrafter()).session
    session.close()
    assert not session.begun and session.ids == []
    out = ask([SAID[0]], NGramDrafter(), session=session)
    assert texts(out) == texts(ask([SAID[0]], NGramDrafter())) and out.session is session


# ------------------------------------------------------------------------------------------------- a cache of transformers


@pytest.fixture(scope="module")
def llama() -> tf.PreTrainedModel:
    torch.manual_seed(1)
    config = tf.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    model = tf.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


def prefill(model: tf.PreTrainedModel, ids: Tensor, mask: Tensor | None = None, kind: type = tf.DynamicCache) -> Any:
    cache = kind(config=model.config)
    with torch.no_grad():
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
        model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return cache


@pytest.mark.parametrize("drafter", [NGramDrafter(), NullDrafter(), Repeat()])
def test_a_bare_cache_is_copied(llama: tf.PreTrainedModel, drafter: Drafter) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 4, 5]])
    cache = prefill(llama, ids[:, :6])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    options = {"drafter": drafter, "max_new_tokens": 15, "eos_token_id": []}
    out = specdec.generate(llama, ids, session=cache, **options)
    assert out.sequences.tolist() == specdec.generate(llama, ids, **options).sequences.tolist()
    assert out.stats.prefilled == 3 and cache.get_seq_length() == 6
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    flat = specdec.generate(llama, ids[0], attention_mask=torch.ones(10), session=cache, **options)
    assert flat.sequences.tolist() == out.sequences.tolist()
    longer = torch.cat([out.sequences, torch.tensor([[3, 3]])], 1)
    assert specdec.generate(llama, longer, session=out.session, **options).sequences.tolist() == \
        specdec.generate(llama, longer, **options).sequences.tolist()  # fmt: skip


def test_a_bare_cache_of_padded_rows(llama: tf.PreTrainedModel) -> None:
    ids = torch.tensor([[0, 0, 0, 8, 5, 6, 7, 9], [5, 6, 7, 8, 5, 6, 7, 5], [0, 4, 4, 8, 8, 6, 6, 5]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0] + [1] * 7])
    cache = prefill(llama, ids[:, :5], mask[:, :5])
    options = {"drafter": NGramDrafter(), "max_new_tokens": 12, "eos_token_id": [7], "attention_mask": mask}
    out = specdec.generate(llama, ids, session=cache, **options)
    assert out.sequences.tolist() == specdec.generate(llama, ids, **options).sequences.tolist()
    assert out.stats.prefilled == 3 * 2


def test_caches_that_do_not_fit_are_refused(llama: tf.PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 4, 5]])

    def refused(cache: Any, match: str, ids: Tensor = ids) -> None:
        with pytest.raises(ValueError, match=match):
            specdec.generate(llama, ids, drafter=NGramDrafter(), session=cache, max_new_tokens=4)

    refused(tf.DynamicCache(), "is empty")
    refused(prefill(llama, ids), "holds 10 tokens of row 0, input_ids only 10")
    refused(prefill(llama, ids[:, :5]), "holds 1 rows, input_ids have 2", ids.repeat(2, 1))
    for change, match in [
        ({"num_hidden_layers": 3}, "3 layers"),
        ({"num_key_value_heads": 4}, "another model's"),
        ({"head_dim": 16}, "another"),
    ]:
        config = copy.deepcopy(llama.config)
        config.update(change)
        torch.manual_seed(0)
        refused(prefill(tf.LlamaForCausalLM(config).eval(), ids[:, :5]), match)
    static = tf.StaticCache(config=llama.config, max_cache_len=32)
    with torch.no_grad():
        llama(input_ids=ids[:, :5], past_key_values=static)
    refused(static, "StaticLayer")
    with pytest.raises(ValueError, match="Needy reads features"):
        specdec.generate(llama, ids, drafter=Needy(), session=prefill(llama, ids[:, :5]), max_new_tokens=4)
