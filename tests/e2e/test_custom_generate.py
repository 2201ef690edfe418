"""`custom_generate` against plain `generate` of transformers, from which it must not be told apart, and against `specdec.generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import specdec
from specdec import CoupledAcceptor, FixedPlanner, GreedyAcceptor, NGramDrafter, NullDrafter, SequentialVerifier
from specdec.custom import custom_generate

V = 27
PAD = 0
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 26}  # fmt: skip
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 8, 7, 8, 7], [20]]
RAGGED = {"one": ROWS[:1], "padded one": ROWS[1:2], "three": ROWS}
DRAFTERS = {"null": NullDrafter(), "ngram": NGramDrafter()}
RULES = {"null": {}, "ngram": {}, "coupled": {"drafter": NGramDrafter(), "acceptor": CoupledAcceptor()}}
METHODS = {name: {"drafter": DRAFTERS.get(name), **parts} for name, parts in RULES.items()}


def _slow(*case: str, fast: bool) -> Any:
    return pytest.param(*case, marks=() if fast else pytest.mark.slow)


GRID = [_slow(rows, name, fast=rows == "three" and name == "ngram") for rows in RAGGED for name in DRAFTERS]


def _model(**changes: Any) -> tf.PreTrainedModel:
    torch.manual_seed(5)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, **changes}))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)  # the usual 0.02 makes every law uniform
    return model.double().eval()


MODEL = _model()


def padded(rows: list[list[int]], width: int = 8) -> dict[str, Tensor]:
    ids = torch.tensor([[*[PAD] * (width - len(row)), *row] for row in rows])
    mask = torch.tensor([[*[0] * (width - len(row)), *[1] * len(row)] for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def plain(inputs: dict[str, Any], **options: Any) -> Any:
    return MODEL.generate(**{"do_sample": False, "max_new_tokens": 14, "pad_token_id": PAD, **inputs, **options})


def ours(inputs: dict[str, Any], drafter: Any = DRAFTERS["ngram"], parts: dict[str, Any] | None = None, **options: Any) -> Any:
    return plain(inputs, custom_generate=custom_generate(drafter=drafter, **parts or {}), **options)


class NthCall(tf.StoppingCriteria):
    """Remembers how often it was asked."""

    def __init__(self, n: int) -> None:
        self.n, self.calls = n, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= self.n)


class Holds(tf.StoppingCriteria):
    """Ends a row that has this many tokens, padding included, and an even one last."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] % 2 == 0) & (input_ids.shape[1] > 11)


class Ban(tf.LogitsProcessor):
    """Bans one token after another, so that it matters how often it was called, and the first token of the row, padding or not."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.index_fill(1, torch.tensor([self.calls * 5 % V]), -torch.inf)
        return scores.scatter(1, input_ids[:, :1], -torch.inf)


EOS = {"eos_token_id": [4, 13, 17, 22]}
OPTIONS: dict[str, Any] = {
    "nothing": dict,
    "eos": lambda: EOS,
    "no pad token": lambda: {**EOS, "pad_token_id": None},
    "min_new_tokens": lambda: {**EOS, "min_new_tokens": 6},
    "min_length": lambda: {**EOS, "min_length": 13},
    "max_length": lambda: {"max_new_tokens": None, "max_length": 17},
    "max_time": lambda: {"max_time": 0.0},
    "repetition_penalty": lambda: {**EOS, "repetition_penalty": 1.7},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 2},
    "bad words, bias": lambda: {"bad_words_ids": [[5], [7, 8]], "sequence_bias": {(3,): -4.0, (9, 2): 5.0}},
    "of the prompt": lambda: {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "forced": lambda: {"forced_eos_token_id": 11, "begin_suppress_tokens": [8, 20], "exponential_decay_length_penalty": (3, 1.3), **EOS},
    "prefix": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(V) if t % 3 != (row + len(ids)) % 3]},
    "processor with memory": lambda: {"logits_processor": tf.LogitsProcessorList([Ban()])},
    "criterion": lambda: {**EOS, "stopping_criteria": tf.StoppingCriteriaList([Holds()])},
    "criterion with memory": lambda: {**EOS, "stopping_criteria": tf.StoppingCriteriaList([NthCall(5)])},
    "limit of the user": lambda: {"stopping_criteria": tf.StoppingCriteriaList([tf.MaxLengthCriteria(12)])},
}


@pytest.mark.parametrize(("rows", "drafter"), GRID)
@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_ids_are_those_of_plain_generate(name: str, rows: str, drafter: str) -> None:
    inputs = padded(RAGGED[rows])
    expected = plain(inputs, **OPTIONS[name]())
    assert torch.equal(ours(inputs, DRAFTERS[drafter], **OPTIONS[name]()), expected)


def test_the_options_change_the_text_and_end_rows_at_different_tokens() -> None:
    """Else the test above would not say much."""
    texts = {name: plain(padded(ROWS), **make()) for name, make in OPTIONS.items()}
    assert [name for name, text in texts.items() if torch.equal(text, texts["nothing"])] == ["nothing"]
    for name in ("eos", "criterion", "repetition_penalty"):
        assert len({int((row[8:] == PAD).sum()) for row in texts[name]}) > 1


@pytest.mark.parametrize("rows", RAGGED)
def test_stop_strings_come_as_a_criterion(rows: str, letter_tokenizer: Any) -> None:
    inputs = padded(RAGGED[rows])
    new = plain(inputs, eos_token_id=None)[0, 8:].tolist()
    text = "".join(chr(97 + token) for token in new[4:7])
    eos = next(token for token in range(1, V) if token not in new)  # so that the ended row is padded
    assert 26 not in new[4:7]

    def stop() -> dict[str, Any]:
        return {"stopping_criteria": tf.StoppingCriteriaList([tf.StopStringCriteria(letter_tokenizer, [text])])}

    expected = plain(inputs, **stop(), eos_token_id=eos)
    assert expected[0, 8:].tolist() != new
    assert torch.equal(ours(inputs, **stop(), eos_token_id=eos), expected)


def test_where_no_eos_is_set_an_ended_row_is_padded_all_the_same() -> None:
    inputs, own = padded(ROWS), {"eos_token_id": None, "stopping_criteria": tf.StoppingCriteriaList([Holds()])}
    expected, got = plain(inputs, **own), ours(inputs, **own)
    assert expected.shape == got.shape and not torch.equal(expected, got)
    for row, text in enumerate(expected):
        end = next((i for i in range(11, len(text)) if text[i] % 2 == 0), len(text))
        assert torch.equal(got[row, : end + 1], text[: end + 1]) and (got[row, end + 1 :] == PAD).all()


def test_a_method_serves_many_calls_and_leaves_what_it_was_given() -> None:
    method, inputs = custom_generate(drafter=NGramDrafter(), seed=[3, 4, 5]), padded(ROWS)
    before = copy.deepcopy(inputs)
    config = tf.GenerationConfig(max_new_tokens=9, eos_token_id=13, pad_token_id=PAD, do_sample=True)
    processors, criteria = tf.LogitsProcessorList([Ban()]), tf.StoppingCriteriaList([NthCall(5)])
    settings, defaults = config.to_dict(), MODEL.generation_config.to_dict()
    own = {"generation_config": config, "logits_processor": processors, "stopping_criteria": criteria}
    assert torch.equal(*(MODEL.generate(**inputs, **own, custom_generate=method) for _ in range(2)))
    assert torch.equal(plain(inputs, custom_generate=method), plain(inputs))
    assert all(torch.equal(inputs[key], before[key]) for key in inputs)
    assert config.to_dict() == settings and MODEL.generation_config.to_dict() == defaults
    assert len(processors) == len(criteria) == 1 and processors[0].calls == criteria[0].calls == 0


def test_any_verifier_and_planner() -> None:
    slow = SequentialVerifier(lambda ids: MODEL(ids).logits[:, -1], vocab_size=V)
    parts = {"verifier": slow, "planner": FixedPlanner(3), "acceptor": GreedyAcceptor()}
    positions = (padded(ROWS)["attention_mask"].cumsum(1) - 1).clamp_min(0)
    assert torch.equal(ours(padded(ROWS), parts=parts, position_ids=positions), plain(padded(ROWS)))
    away = SequentialVerifier(lambda ids: MODEL(ids).logits[:, -1], vocab_size=V, device="meta")
    with pytest.raises(ValueError, match="input_ids: they are on cpu, .* move them to meta"):
        ours(padded(ROWS), parts={"verifier": away}, repetition_penalty=1.2)


class Seen:
    """Notes down every row of ids it is shown, and answers as a processor or a criterion that changes nothing."""

    pure = True

    def __init__(self, processor: bool) -> None:
        self.processor, self.ids = processor, set()

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        self.ids |= {tuple(row) for row in input_ids.tolist()}
        return scores if self.processor else torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_processors_and_criteria_are_shown_the_padding(drafter: str) -> None:
    seen = []
    for parts in ({}, {"custom_generate": custom_generate(drafter=DRAFTERS[drafter])}):
        processor, criterion = Seen(True), Seen(False)
        plain(padded(ROWS), eos_token_id=None, logits_processor=[processor], stopping_criteria=[criterion], **parts)
        seen.append((processor.ids, criterion.ids))
    assert seen[1][1] == seen[0][1] and len(seen[0][1]) == 3 * 14
    assert seen[1][0] >= seen[0][0] and len(seen[0][0]) == 3 * 14
    if drafter == "null":
        assert seen[1][0] == seen[0][0]


ASKED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("rows", RAGGED)
def test_scores_and_logits_are_those_of_plain_generate(rows: str) -> None:
    inputs = padded(RAGGED[rows])
    options = {**ASKED, **EOS, "repetition_penalty": 1.4, "min_new_tokens": 2}
    expected, got = plain(inputs, **options), ours(inputs, **options)
    assert type(got) is type(expected) and torch.equal(got.sequences, expected.sequences)
    assert got.attentions is None and got.hidden_states is None
    assert ours(inputs, **{**options, "output_logits": False}).logits is None
    assert torch.equal(ours(inputs, **{**options, "return_dict_in_generate": False}), got.sequences)
    ends = [next((i + 1 for i, t in enumerate(row[8:].tolist()) if t in EOS["eos_token_id"]), 14) for row in got.sequences]
    for name in ("scores", "logits"):
        steps, wanted = getattr(got, name), getattr(expected, name)
        assert isinstance(steps, tuple) and len(steps) == len(wanted) == got.sequences.shape[1] - 8
        for at, (step, want) in enumerate(zip(steps, wanted, strict=True)):
            assert step.shape == want.shape and step.dtype == want.dtype
            live = torch.tensor([at < end for end in ends])
            torch.testing.assert_close(step[live], want[live], rtol=0, atol=1e-5)
            assert (step[~live, PAD] == 0).all() and step[~live, PAD + 1 :].isneginf().all()


def test_transition_scores_add_up_to_the_logprobs_of_generate() -> None:
    options = {**EOS, "do_sample": True, "top_k": 9, "max_new_tokens": 12}
    got = ours(padded(ROWS), parts={"seed": 7}, **ASKED, **options)
    known = specdec.generate(MODEL, ROWS, drafter=NGramDrafter(), seed=7, pad_token_id=PAD, **options)
    assert len({len(new) for new in known.new_tokens}) > 1
    total = MODEL.compute_transition_scores(got.sequences, got.scores, normalize_logits=True).sum(1)
    torch.testing.assert_close(total.double(), torch.stack([scores.sum() for scores in known.logprobs]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", [[5, 6, 7], pytest.param(11, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [_slow(rows, fast=rows != "padded one") for rows in RAGGED])
@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_text_and_scores_of_specdec_generate(method: str, rows: str, seed: Any) -> None:
    seed = seed[: len(RAGGED[rows])] if isinstance(seed, list) else seed
    options = {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "max_new_tokens": 14, "pad_token_id": PAD, **EOS}
    known = specdec.generate(MODEL, RAGGED[rows], **METHODS[method], seed=seed, return_rounds=True, **options)
    got = MODEL.generate(**padded(RAGGED[rows]), custom_generate=custom_generate(**METHODS[method], seed=seed), **options, **ASKED)
    scores: list[list[Tensor]] = [[] for _ in RAGGED[rows]]
    for done in known.rounds:
        for at, (row, tokens) in enumerate(zip(done.rows, done.emitted, strict=True)):
            scores[row] += list(done.verification.scores[at, : len(tokens)])
    for row, new in enumerate(known.new_tokens):
        text = got.sequences[row, 8:]
        assert text[: len(new)].tolist() == new.tolist() and (text[len(new) :] == PAD).all()
        mine = torch.stack([step[row] for step in got.scores[: len(new)]])
        torch.testing.assert_close(mine, torch.stack(scores[row]).float(), rtol=0, atol=1e-5)


def test_without_a_seed_each_call_is_fresh() -> None:
    method = custom_generate(drafter=NullDrafter())
    options = {"do_sample": True, "top_k": 0, "temperature": 9.0, "eos_token_id": None}  # 14 tokens, each close to uniform
    first, second = (plain(padded(ROWS[:1]), custom_generate=method, **options) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("rows", RAGGED)
def test_rows_end_where_the_target_can_read_no_more_real_tokens(rows: str) -> None:
    model = _model(max_position_embeddings=20)
    known = specdec.generate(model, RAGGED[rows], drafter=NGramDrafter(), max_new_tokens=30, eos_token_id=[])
    assert set(known.finish_reason) == {"context"}
    own = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": PAD, "custom_generate": custom_generate(drafter=NGramDrafter())}
    got = model.generate(**padded(RAGGED[rows]), **own)
    for row, new in enumerate(known.new_tokens):
        assert len(RAGGED[rows][row]) + len(new) == 20
        assert got[row, 8 : 8 + len(new)].tolist() == new.tolist() and (got[row, 8 + len(new) :] == PAD).all()
    with pytest.raises(ValueError, match="input_ids: row 0 has 20 tokens, all that the target reads"):
        model.generate(torch.ones(1, 20).long(), **own)


@pytest.mark.parametrize("rows", [[[3, 1, 4, 1, 5, 9, 2, 6]], [[7, 8, 7, 8, 7]], [[3, 1, 4, 1, 5, 9, 2, 6], [7, 8, 7, 8, 7]]])
def test_a_chat_goes_on_with_the_cache_of_plain_generate(rows: list[list[int]]) -> None:
    inputs, cache = padded(rows), tf.DynamicCache(config=MODEL.config)
    said = plain(inputs, past_key_values=cache, eos_token_id=None, max_new_tokens=6)
    for layer in cache.layers:
        layer.values.neg_()  # so that the text shows whether the cache was used
    more = torch.tensor([[11, 12, 13]] * len(rows))
    ids = torch.cat([said, more], 1)
    turn = {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(len(rows), 9).long()], 1)}
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    expected = plain(turn, past_key_values=copy.deepcopy(cache), eos_token_id=[4, 13])
    assert not torch.equal(expected, plain(turn, eos_token_id=[4, 13]))
    for drafter in DRAFTERS.values():
        got = ours(turn, drafter, past_key_values=cache, eos_token_id=[4, 13], **ASKED)
        assert torch.equal(got.sequences, expected) and len(got.scores) == expected.shape[1] - ids.shape[1]
        after = [(layer.keys, layer.values) for layer in cache.layers]
        assert all(torch.equal(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))


def test_an_empty_cache_is_none_and_stays_empty() -> None:
    cache = tf.DynamicCache(config=MODEL.config)
    assert torch.equal(ours(padded(ROWS), past_key_values=cache), plain(padded(ROWS)))
    assert cache.get_seq_length() == 0


def test_caches_that_do_not_fit_are_refused() -> None:
    cache = tf.DynamicCache(config=MODEL.config)
    said = plain(padded(ROWS[:1]), past_key_values=cache, eos_token_id=None)
    with pytest.raises(ValueError, match="holds 21 tokens.*input_ids only 8; give the whole text"):
        ours(padded(ROWS[:1]), past_key_values=cache)
    new = torch.tensor([[5, 6]])
    for mask in (torch.ones(1, 24).long(), torch.tensor([[0, *[1] * 23]])):
        with pytest.raises(ValueError, match="give the whole text"):
            ours({"input_ids": new, "attention_mask": mask}, past_key_values=cache)
    static = tf.StaticCache(config=MODEL.config, max_cache_len=40)
    with pytest.raises(ValueError, match="got StaticCache; allowed is a DynamicCache"):
        ours(padded(ROWS[:1]), past_key_values=static)
    whole = torch.cat([said, new], 1)
    with pytest.raises(ValueError, match="holds .*1 rows"):
        ours({"input_ids": whole.repeat(2, 1), "attention_mask": torch.ones(2, 24).long()}, past_key_values=cache)


class Recorder:
    def __init__(self) -> None:
        self.put_: list[list[Any]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not self.ended
        self.put_.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_the_streamer_gets_the_prompt_then_each_rounds_tokens(letter_tokenizer: Any, capsys: Any) -> None:
    inputs, shown = padded(ROWS[1:2]), Recorder()
    text = ours(inputs, parts={"streamer": shown})
    assert shown.put_[0] == inputs["input_ids"].tolist() and shown.ended == 1
    assert [token for tokens in shown.put_[1:] for token in tokens] == text[0, 8:].tolist()
    assert 1 < len(shown.put_) < 15  # several tokens in some round
    streamer = tf.TextStreamer(letter_tokenizer, skip_prompt=True)
    ours(inputs, parts={"streamer": streamer})
    assert capsys.readouterr().out.strip() == letter_tokenizer.decode(text[0, 8:])
    with pytest.raises(ValueError, match="streamer: it shows one text, but the batch has 3 rows"):
        ours(padded(ROWS), parts={"streamer": shown})


LONG = padded(ROWS)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=2 is not supported"),
    "several": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2 is not supported"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True .* run the model on the result"),
    "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
    "right": ({"attention_mask": LONG["attention_mask"].flip(1)}, "attention_mask: row 1 .* pad on the left only"),
    "middle": ({"attention_mask": torch.tensor([[1] * 8, [1, 0, *[1] * 6], [1] * 8])}, "attention_mask: row 1"),
    "nothing": ({"attention_mask": torch.tensor([[1] * 8, [1] * 8, [0] * 8])}, "attention_mask: row 2"),
    "cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "offloaded": ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 .* drafter="),
    "drafting": ({"num_assistant_tokens": 3}, "num_assistant_tokens=3"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    "values": ({"attention_mask": torch.full((3, 8), 2)}, "attention_mask: allowed are 1 at real tokens"),
    "positions": ({"position_ids": torch.arange(8).repeat(3, 1)}, "position_ids: they are not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        ours({**LONG, **REFUSED[name][0]})


def test_inputs_besides_the_text_are_refused() -> None:
    gpt = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=32)).eval()
    method, ids = custom_generate(drafter=NullDrafter()), torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="token_type_ids: the model would be run without it"):
        gpt.generate(ids, token_type_ids=ids * 0, max_new_tokens=3, custom_generate=method)
    with pytest.raises(ValueError, match="inputs_embeds: the model would be run without it"):
        MODEL.generate(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64), max_new_tokens=3, custom_generate=method)
    config = tf.T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="has an encoder"):
        tf.T5ForConditionalGeneration(config).eval().generate(ids, max_new_tokens=3, custom_generate=method)
    arguments = {"logits_processor": [], "stopping_criteria": [], "generation_config": tf.GenerationConfig(max_length=9)}
    with pytest.raises(ValueError, match="synced_gpus=True"):
        method(MODEL, ids, **arguments, synced_gpus=True)
    with pytest.raises(ValueError, match="pixel_values: the model would be run without it"):
        method(MODEL, ids, **arguments, pixel_values=torch.zeros(1, 3, 8, 8))


def test_parts_of_the_wrong_kind_are_refused_at_once() -> None:
    others = [{"drafter": NullDrafter(), name: 3} for name in ("acceptor", "planner", "verifier")]
    for parts in ({"drafter": NGramDrafter}, {"drafter": None}, *others):
        with pytest.raises(TypeError, match=f"{list(parts)[-1]}: got .*; give an instance"):
            custom_generate(**parts)
    with pytest.raises(ValueError, match="GreedyAcceptor is a greedy rule and needs do_sample=False"):
        ours(padded(ROWS), parts={"acceptor": GreedyAcceptor()}, do_sample=True)
    with pytest.raises(ValueError, match="seed: 2 seeds for a batch of 3"):
        ours(padded(ROWS), parts={"seed": [1, 2]})
    with pytest.raises(ValueError, match="row 0, position 1 holds id 40"):
        ours({"input_ids": torch.tensor([[1, 40]])})
