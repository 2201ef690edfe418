"""Options against `model.generate` itself: what it scored every token with, and where it ended."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from specdec.options import HONOURED, IRRELEVANT, REFUSED, UNREAD, Options, resolve
from specdec.ragged import Ragged
from specdec.tree import chain
from specdec.types import TargetFacts

pytestmark = pytest.mark.slow

V, POSITIONS = 16, 40
FACTS = TargetFacts(vocab_size=V, max_positions=POSITIONS)
PROMPT = [3, 1, 4, 1, 5]
WORDS = {c: i for i, c in enumerate("abcdefghijklmnop")}
TOKENIZER = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(WORDS, unk_token="a")))
TOKENIZER.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
TOKENIZER.backend_tokenizer.decoder = decoders.Fuse()


def make_model() -> Any:
    torch.manual_seed(1)
    config = hf.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=POSITIONS,
        initializer_range=0.6, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval()


MODEL = make_model()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # generate warns of default lengths
        yield


def get(**kwargs: Any) -> Options:
    return resolve([torch.tensor(PROMPT)], facts=FACTS, **kwargs)


def generate(prompt: Sequence[int], seed: int = 0, **kwargs: Any) -> tuple[list[int], Tensor, Tensor]:
    """New tokens, what they were drawn from as log-probabilities, and the raw logits."""
    torch.manual_seed(seed)
    out = MODEL.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), return_dict_in_generate=True,
        output_scores=True, output_logits=True, **kwargs,
    )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.scores).log_softmax(-1), torch.cat(out.logits)


def same_as_generate(prompts: Sequence[list[int]], seed: int = 0, **kwargs: Any) -> list[list[int]]:
    """Every law along the text that `generate` writes for each prompt alone, and the token at which it ends."""
    options = resolve([torch.tensor(p) for p in prompts], facts=FACTS, defaults=MODEL.generation_config, **copy.deepcopy(kwargs))
    written = [generate(prompt, seed + row, **kwargs) for row, prompt in enumerate(prompts)]
    history = Ragged.empty(len(prompts))
    history.extend([p[:-1] for p in prompts])
    tree = chain([[p[-1], *new[:-1]] for p, (new, _, _) in zip(prompts, written, strict=True)])
    logits = torch.zeros(*tree.tokens.shape, V)
    for row, (new, _, raw) in enumerate(written):
        logits[row, : len(new)] = raw
    got = options.warper(options.warper.begin(), logits, tree, history)
    for row, (prompt, (new, law, _)) in enumerate(zip(prompts, written, strict=True)):
        torch.testing.assert_close(got[row, : len(new)], law, rtol=1e-5, atol=1e-5, equal_nan=True)
        kept, reason = options.ends.scan(row, torch.tensor(prompt), [*new, *[0] * 50])
        assert kept == len(new) and reason is not None
        assert options.greedy != bool(kwargs.get("do_sample"))
    return [new for new, _, _ in written]


OPTIONS: list[dict[str, Any]] = [
    {}, {"do_sample": True}, {"do_sample": True, "top_k": 0}, {"do_sample": True, "top_k": None}, {"do_sample": True, "top_k": 3},
    {"do_sample": True, "top_p": 0.6}, {"do_sample": True, "min_p": 0.2}, {"do_sample": True, "top_h": 0.4},
    {"do_sample": True, "typical_p": 0.5}, {"do_sample": True, "epsilon_cutoff": 0.08}, {"do_sample": True, "eta_cutoff": 0.3},
    {"do_sample": True, "temperature": 0.5, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9, "renormalize_logits": True},
    {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[6], [1, 2], [8]], "eos_token_id": 8},
    {"do_sample": True, "repetition_penalty": 1.7, "temperature": 0.5, "top_k": 6, "top_p": 0.8},
    {"sequence_bias": {(6,): 3.0, (5, 6): -4.0}}, {"sequence_bias": [[[6], 3.0], [[5, 6], -4.0]]},
    {"do_sample": True, "eos_token_id": [2, 7], "max_new_tokens": 25}, {"do_sample": True, "eos_token_id": 9, "min_length": 12},
    {"do_sample": True, "eos_token_id": [2, 7, 9], "min_new_tokens": 6, "max_new_tokens": 30},
    {"do_sample": True, "eos_token_id": [2, 7, 9], "min_new_tokens": 3, "min_length": 20},
    {"eos_token_id": 2, "min_new_tokens": 0, "min_length": 20}, {"min_length": 10, "min_new_tokens": 4},
    {"forced_bos_token_id": 4}, {"forced_eos_token_id": [2, 3], "max_new_tokens": 6}, {"forced_eos_token_id": 2, "max_length": 11},
    {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": 9, "max_new_tokens": 30}, {"suppress_tokens": [1, 2, 3]},
    {"begin_suppress_tokens": [0, 1, 2, 3, 4, 5, 6]}, {"begin_suppress_tokens": list(range(10)), "forced_bos_token_id": 4},
    {"remove_invalid_values": True}, {"renormalize_logits": True}, {"max_new_tokens": 1}, {"max_length": 9},
    {"max_length": 9, "max_new_tokens": 2},
    {"do_sample": True, "watermarking_config": {"bias": 2.5, "greenlist_ratio": 0.4}},
    {"do_sample": True, "watermarking_config": hf.WatermarkingConfig(bias=2.5, context_width=2), "top_k": 4},
    {"do_sample": True, "watermarking_config": hf.SynthIDTextWatermarkingConfig(3, [11, 5, 7], context_history_size=8)},
    {"do_sample": True, "stop_strings": ["ab", "h", "jk"], "tokenizer": TOKENIZER, "max_new_tokens": 30},
    {"max_time": 1e9}, {"do_sample": False, "temperature": 0.3, "top_k": 4, "top_p": 0.3, "min_p": 0.5, "typical_p": 0.3},
    {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1]) ^ 1, 6, (3 * len(ids)) % V], "do_sample": True},
    {"num_beams": 1, "use_cache": True, "early_stopping": False, "max_time": None},
]  # fmt: skip


@pytest.mark.parametrize("kwargs", OPTIONS, ids=lambda kwargs: "-".join(kwargs) or "none")
def test_each_option_means_what_generate_means(kwargs: dict[str, Any]) -> None:
    """For every row of a ragged batch what it means for that row alone: lengths count a row's own tokens."""
    same_as_generate([[3], [2, 7, 1, 8, 2, 8, 1]], **kwargs)


FREE_CHOICE: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0.3, 2), "top_k": st.sampled_from([0, None, 2, 7, 50]), "top_p": st.floats(0.2, 1), "min_p": st.floats(0, 0.3),
    "typical_p": st.floats(0.2, 1), "repetition_penalty": st.floats(0.8, 1.5), "no_repeat_ngram_size": st.integers(0, 3),
    "eos_token_id": st.sampled_from([2, [3, 9]]), "min_new_tokens": st.integers(0, 5), "min_length": st.integers(0, 12),
    "suppress_tokens": st.lists(st.integers(0, 5), max_size=3), "begin_suppress_tokens": st.lists(st.integers(6, 11), max_size=3),
    "max_new_tokens": st.integers(1, 8), "sequence_bias": st.just({(6,): 1.0, (1, 6): -3.0}), "renormalize_logits": st.booleans(),
    "forced_eos_token_id": st.just(13), "epsilon_cutoff": st.floats(0, 0.1),
}  # fmt: skip


@settings(max_examples=10)
@given(st.fixed_dictionaries({"do_sample": st.booleans()}, optional=FREE_CHOICE), st.integers(0, 1000))
def test_options_together(kwargs: dict[str, Any], seed: int) -> None:
    same_as_generate([PROMPT, [2, 6]], seed, **kwargs)


def test_without_a_length_20_tokens_follow_within_what_the_target_reads() -> None:
    long = [1] * (POSITIONS - 7)
    assert [len(new) for new in same_as_generate([PROMPT, long])] == [20, 7]
    assert [new[-1] for new in same_as_generate([PROMPT, long], forced_eos_token_id=9)] == [9, 9]


# ------------------------------------------------------------------------------------------------------------- where values come from


def test_keywords_win_over_the_config_which_wins_over_the_models_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = hf.GenerationConfig(do_sample=True, top_k=3, temperature=0.7, eos_token_id=[9, 2], max_new_tokens=9, repetition_penalty=1.3)
    monkeypatch.setattr(MODEL, "generation_config", defaults)
    config = hf.GenerationConfig(top_k=5, top_p=0.8)
    for kwargs in (
        {}, {"generation_config": config}, {"top_k": 2}, {"generation_config": config, "top_p": 0.5}, {"do_sample": False},
        {"eos_token_id": None, "max_new_tokens": 30}, {"top_k": None, "temperature": 1.3}, {"max_new_tokens": None, "max_length": 8},
    ):  # fmt: skip
        options = resolve([torch.tensor(PROMPT)], facts=FACTS, defaults=defaults, **kwargs)
        assert options.greedy == (kwargs.get("do_sample") is False)
        same_as_generate([PROMPT], **{"do_sample": True, **kwargs})
    assert get(defaults=defaults).pad == 9 and get(defaults=defaults, pad_token_id=4).pad == 4 and get().pad == 0
    assert get(defaults=defaults).ends.eos == {9, 2} and get(defaults=defaults, eos_token_id=None).ends.eos == frozenset()


def test_our_defaults_are_those_of_transformers() -> None:
    theirs = hf.GenerationConfig._get_default_generation_params()
    for name, rule in HONOURED.items():
        if name != "max_length":  # "20" means 20 new tokens there, see above
            assert rule.default == theirs.get(name), name
    for name, (neutral, _) in {**REFUSED, **UNREAD}.items():
        assert theirs.get(name) in (None, *neutral), name


def test_every_attribute_of_a_generation_config_stands_in_exactly_one_table() -> None:
    tables = [set(HONOURED), set(REFUSED), set(UNREAD), set(IRRELEVANT)]
    for name in vars(hf.GenerationConfig()):
        assert name.startswith("_") or sum(name in table for table in tables) == 1, name
    assert sum(map(len, tables)) == len(set().union(*tables))


# ------------------------------------------------------------------------------------------------------------------- the user's objects


class Favour(hf.LogitsProcessor):
    """Counts its calls and favours that token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, self.calls % V] += 2.0
        return scores


@pytest.mark.parametrize(
    "processors",
    [
        [Favour()], [hf.RepetitionPenaltyLogitsProcessor(3.0)], [Favour(), hf.NoRepeatNGramLogitsProcessor(1), Favour()],
        [hf.TemperatureLogitsWarper(0.5)], [hf.RepetitionPenaltyLogitsProcessor(3.0), hf.RepetitionPenaltyLogitsProcessor(0.5)],
        hf.LogitsProcessorList([hf.MinLengthLogitsProcessor(30, torch.tensor([2]))]),
        [hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [1, 2, 6], 1)],
    ],
)  # fmt: skip
def test_processors_join_in_the_order_of_transformers(processors: list[Any]) -> None:
    kwargs: dict[str, Any] = {"do_sample": True, "repetition_penalty": 1.4, "top_k": 6, "eos_token_id": 2, "min_length": 10}
    allowed = lambda row, ids: [*range(2, 12)]  # noqa: E731
    same_as_generate([PROMPT], **kwargs, logits_processor=copy.deepcopy(processors), prefix_allowed_tokens_fn=allowed)


@pytest.mark.parametrize(
    "criteria",
    [
        [hf.MaxLengthCriteria(8)], [hf.MaxLengthCriteria(4)], [hf.EosTokenCriteria([1, 6])], [hf.MaxLengthCriteria(30)],
        [lambda ids, scores: ids[:, -1] % 5 == 0], [hf.StopStringCriteria(TOKENIZER, ["b", "g"])],
        [hf.MaxTimeCriteria(1e-9, initial_timestamp=0.0), hf.MaxLengthCriteria(30), hf.MaxLengthCriteria(20)],
    ],
)  # fmt: skip
def test_criteria_join_as_in_transformers(criteria: list[Any]) -> None:
    for seed in range(3):
        same_as_generate(
            [PROMPT], seed, do_sample=True, eos_token_id=[2, 3], max_new_tokens=12, stopping_criteria=hf.StoppingCriteriaList(criteria),
            stop_strings=["c", "de"], tokenizer=TOKENIZER,
        )  # fmt: skip


def test_reasons() -> None:
    stop = get(stop_strings="ab", tokenizer=TOKENIZER, max_new_tokens=9)
    assert stop.ends.scan(0, torch.tensor(PROMPT), [0, 1, 2]) == (2, "stop")
    assert get(max_time=0).ends.scan(0, torch.tensor(PROMPT), [0, 1, 2]) == (1, "criteria")
    assert get(max_new_tokens=2).ends.scan(0, torch.tensor(PROMPT), [0, 1, 2]) == (2, "length")
    assert get(max_new_tokens=99).ends.scan(0, torch.tensor(PROMPT), [0] * 60) == (POSITIONS - len(PROMPT), "context")


def test_nothing_that_was_passed_in_changes() -> None:
    config = hf.GenerationConfig(do_sample=True, top_k=4, eos_token_id=[2, 3], sequence_bias=[[[1], 2.0]], bad_words_ids=[[4]])
    defaults = hf.GenerationConfig(max_new_tokens=4, pad_token_id=1)
    favour, bias, end = Favour(), hf.SequenceBiasLogitsProcessor({(2,): 1.0}), hf.EosTokenCriteria([5])
    processors, criteria, prompt = hf.LogitsProcessorList([favour, bias]), hf.StoppingCriteriaList([end]), torch.tensor(PROMPT)
    before = copy.deepcopy([vars(config), vars(defaults), vars(bias)])
    parts = {"generation_config": config, "logits_processor": processors, "stopping_criteria": criteria}
    options = resolve([prompt], facts=FACTS, defaults=defaults, **parts)
    history = Ragged.empty(1)
    history.extend([PROMPT[:-1]])
    options.warper(options.warper.begin(), torch.zeros(1, 3, V), chain([[5, 6, 7]]), history)
    options.ends.scan(0, prompt, [1, 2])
    assert [vars(config), vars(defaults), vars(bias)] == before
    assert favour.calls == 0 and list(processors) == [favour, bias] and list(criteria) == [end] and prompt.tolist() == PROMPT


# --------------------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 2}, {"num_return_sequences": 3}, {"num_beam_groups": 2}, {"diversity_penalty": 0.5}, {"constraints": [1]},
        {"force_words_ids": [[1]]}, {"guidance_scale": 1.5}, {"penalty_alpha": 0.6}, {"dola_layers": "high"}, {"token_healing": True},
        {"encoder_repetition_penalty": 1.2}, {"encoder_no_repeat_ngram_size": 2}, {"use_cache": False}, {"cache_implementation": "static"},
        {"output_attentions": True}, {"output_hidden_states": True}, {"output_scores": True}, {"output_logits": True},
        {"num_assistant_tokens": 5}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}, {"use_mtp": True},
        {"assistant_ensemble_weight": 0.5}, {"length_penalty": 2.0}, {"early_stopping": True},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(kwargs: dict[str, Any]) -> None:
    (name, value), *_ = kwargs.items()
    with pytest.raises(ValueError, match=rf"{name}={value!r}".replace("[", r"\[").replace("]", r"\]") + ".*allowed: .*None"):
        get(**kwargs)
    config = hf.GenerationConfig()
    setattr(config, name, value)
    with pytest.raises(ValueError, match=name):
        get(generation_config=config)
    if name in REFUSED:
        with pytest.raises(ValueError, match=name):
            get(defaults=config)
        get(defaults=config, **{name: None})
    else:
        get(defaults=config, generation_config=config)  # a copy of the model's own


def test_every_refused_option_takes_its_neutral_values() -> None:
    for name, (neutral, _) in {**REFUSED, **UNREAD}.items():
        for value in (*neutral, None):
            get(**{name: value})
    get(**dict.fromkeys(IRRELEVANT))
    get(defaults=hf.GenerationConfig(cache_implementation="hybrid"))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [-1, 2.5, "3", True]), ("max_length", [0, -4]), ("min_length", [-1]), ("min_new_tokens", [1.5]),
        ("top_k", [-1, 2.0]),
        ("top_p", [-0.1, 1.2, "x"]), ("min_p", [2]), ("top_h", [0, 1.5]), ("typical_p", [0, 1.2]), ("epsilon_cutoff", [-1, 1.0]),
        ("eta_cutoff", [1]), ("temperature", [0, 0.0, -1, float("nan"), float("inf")]), ("repetition_penalty", [0, -1.0]),
        ("no_repeat_ngram_size", [-2]), ("eos_token_id", [-1, [1, -2], "x", 1.5, True]), ("pad_token_id", [-1]), ("max_time", [-1]),
        ("stop_strings", [[""], [3]]), ("do_sample", ["yes"]), ("suppress_tokens", [[-1]]),
        ("exponential_decay_length_penalty", [3, (1,), "ab"]),
        ("forced_eos_token_id", [V]), ("forced_bos_token_id", [V]), ("bad_words_ids", [[], [3]]), ("sequence_bias", [[], {3: 1.0}]),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            get(**{"do_sample": True, name: value})


def test_temperature_0_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="temperature=0.*do_sample=False"):
        get(do_sample=True, temperature=0)
    assert get(do_sample=False, temperature=0).greedy


def test_whole_numbers_do_for_real_ones() -> None:
    assert not get(do_sample=True, temperature=2, top_p=1, repetition_penalty=2).greedy


def test_sampling_options_without_sampling_draw_a_warning_if_the_user_set_them() -> None:
    defaults = hf.GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get(defaults=defaults, do_sample=False)
        get(do_sample=False, temperature=1.0, top_k=50)
    with pytest.warns(UserWarning, match=r"temperature=0\.5, top_p=0\.3: no effect without do_sample=True"):
        get(defaults=defaults, do_sample=False, temperature=0.5, generation_config=hf.GenerationConfig(top_p=0.3))


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match="temperatur: .*did you mean temperature"):
        get(temperatur=0.5)
    with pytest.raises(TypeError, match="logit_processor: .*did you mean logits_processor"):
        get(logit_processor=[])
    config = hf.GenerationConfig(top_kk=3)
    with pytest.raises(ValueError, match="generation_config.top_kk: .*did you mean top_k"):
        get(generation_config=config)
    get(defaults=config)
    get(defaults=config, generation_config=copy.deepcopy(config))


def test_wrong_kinds_of_objects() -> None:
    for kwargs in ({"generation_config": {"top_k": 3}}, {"defaults": 3}):
        with pytest.raises(Exception, match=next(iter(kwargs))):
            get(**kwargs)
    with pytest.raises(Exception, match="logits_processor"):
        get(logits_processor=Favour())
    with pytest.raises(Exception, match="stopping_criteria"):
        get(stopping_criteria=hf.MaxTimeCriteria(1.0))


def test_stop_strings_need_the_tokenizer_and_decay_needs_eos() -> None:
    with pytest.raises(ValueError, match="stop_strings=.*pass tokenizer="):
        get(stop_strings="ab")
    with pytest.raises(ValueError, match="exponential_decay_length_penalty.*eos_token_id"):
        get(exponential_decay_length_penalty=(1, 1.5))


# ---------------------------------------------------------------------------------------------------------------------- prompts


def prompts(*rows: list[int], **kwargs: Any) -> Options:
    return resolve([torch.tensor(row, dtype=torch.int64) for row in rows], facts=FACTS, **kwargs)


def test_prompts_are_checked() -> None:
    with pytest.raises(ValueError, match="the batch is empty"):
        prompts()
    with pytest.raises(ValueError, match="row 1 is empty"):
        prompts([1], [])
    with pytest.raises(ValueError, match=f"row 1, position 2 holds id {V}; the target knows 0 to {V - 1}"):
        prompts([1], [1, 2, V])
    with pytest.raises(ValueError, match="row 0, position 1 holds id -1"):
        prompts([1, -1])
    with pytest.raises(ValueError, match=f"row 1 has {POSITIONS + 1} tokens, the target reads at most {POSITIONS}"):
        prompts([1], [1] * (POSITIONS + 1), max_new_tokens=0)
    with pytest.raises(ValueError, match=f"row 0 has {POSITIONS} tokens.*nothing can be generated"):
        prompts([1] * POSITIONS)
    with pytest.raises(ValueError, match="max_length=3: row 1 has a prompt of 3"):
        prompts([1, 2], [1, 2, 3], max_length=3)


def test_no_new_tokens_is_legal() -> None:
    options = prompts([1, 2], [1] * POSITIONS, max_new_tokens=0)
    assert [options.ends.room(0, 2), options.ends.room(1, POSITIONS)] == [0, 0]
    assert options.ends.why_not(0, 2) == "length"


def test_an_endless_target_has_no_context_limit() -> None:
    options = resolve([torch.tensor(PROMPT)], facts=TargetFacts(vocab_size=V), max_new_tokens=1000)
    assert options.ends.room(0, len(PROMPT)) == 1000
    assert resolve([torch.tensor(PROMPT)], facts=TargetFacts(vocab_size=V)).ends.room(0, len(PROMPT)) == 20
