"""What the user asks for, in the words of `model.generate`: resolved once per call, honoured or refused, never ignored.

The tables are the whole story: every attribute of `GenerationConfig` stands in exactly one of them.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from .stops import Ends
from .types import Int64, TargetFacts
from .warp import PrefixAllowed, Warper

__all__ = ["HONOURED", "IRRELEVANT", "REFUSED", "UNREAD", "Options", "check_prompts", "resolve"]


@dataclass(frozen=True)
class _Rule:
    """What an option falls back to (transformers' own default), and which values it takes besides `None`."""

    default: Any = None
    convert: Callable[[Any], Any] = lambda value: value
    ok: Callable[[Any], bool] = lambda value: True
    allowed: str = ""


def _whole(value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError
    return float(value)


def _ids(value: Any) -> list[int]:
    values = value.flatten().tolist() if isinstance(value, Tensor) else value if isinstance(value, Iterable) else [value]
    return [_whole(token) for token in values]


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _flag(default: bool | None) -> _Rule:
    return _Rule(default, ok=lambda value: isinstance(value, bool), allowed="True or False")


def _count(default: int | None = None, least: int = 0) -> _Rule:
    return _Rule(default, _whole, lambda value: value >= least, f"an integer of at least {least}")


def _real(default: float | None, ok: Callable[[float], bool], allowed: str) -> _Rule:
    return _Rule(default, _number, ok, allowed)


_TOKEN = _Rule(None, _whole, lambda value: value >= 0, "a token id")
_TOKENS = _Rule(None, _ids, lambda value: all(token >= 0 for token in value), "a token id, a list of them, or None")
_SHARE = _real(None, lambda x: 0 <= x <= 1, "a number from 0 to 1")
_DEFAULT_NEW = 20

HONOURED: Mapping[str, _Rule] = MappingProxyType({
    # where the output ends
    "max_new_tokens": _count(), "max_length": _count(least=1), "min_length": _count(0), "min_new_tokens": _count(),
    "max_time": _real(None, lambda x: x >= 0, "a number of seconds"),
    "stop_strings": _Rule(None, _texts, lambda x: all(isinstance(s, str) and s for s in x), "a text or a list of texts, none empty"),
    "eos_token_id": _TOKENS, "pad_token_id": _TOKEN,
    # the law
    "do_sample": _flag(False),
    "temperature": _real(1.0, lambda x: 0 < x < float("inf"), "a number above 0, or do_sample=False for greedy decoding"),
    "top_k": _count(50), "top_p": replace(_SHARE, default=1.0), "min_p": _SHARE,
    "top_h": _real(None, lambda x: 0 < x <= 1, "a number above 0, up to 1"),
    "typical_p": _real(1.0, lambda x: 0 < x <= 1, "a number above 0, up to 1"),
    "epsilon_cutoff": _real(0.0, lambda x: 0 <= x < 1, "a number from 0, below 1"),
    "eta_cutoff": _real(0.0, lambda x: 0 <= x < 1, "a number from 0, below 1"),
    "repetition_penalty": _real(1.0, lambda x: 0 < x < float("inf"), "a number above 0"), "no_repeat_ngram_size": _count(0),
    "bad_words_ids": _Rule(), "sequence_bias": _Rule(), "watermarking_config": _Rule(),  # their transformers classes check these
    "forced_bos_token_id": _TOKEN, "forced_eos_token_id": _TOKENS, "suppress_tokens": _TOKENS, "begin_suppress_tokens": _TOKENS,
    "exponential_decay_length_penalty": _Rule(None, lambda x: (_whole(x[0]), _number(x[1])), allowed="a pair (start, factor)"),
    "remove_invalid_values": _flag(False), "renormalize_logits": _flag(None),
})  # fmt: skip

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Read only with `do_sample=True`, as in transformers; setting one without draws a warning."""

_ONE_TEXT = "one text per prompt is generated, without beams; repeat the prompt to get several"
_NO_ENCODER = "only decoder-only models are supported, and there is no encoder input to refer to"
_OWN_CACHE = "the library keeps its own cache; leave this out"
_OUTPUTS = "this is not collected; run the model on the result"
_LAWS = "ask for return_rounds=True, which keeps the scores of every token; with 'all' the logits too"
_OTHER_METHOD = "this is another decoding method; remove it, or call model.generate"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType({
    "num_beams": ((1,), _ONE_TEXT), "num_return_sequences": ((1,), _ONE_TEXT), "num_beam_groups": ((1,), _ONE_TEXT),
    "diversity_penalty": ((0.0,), _ONE_TEXT), "constraints": ((), _ONE_TEXT), "force_words_ids": ((), _ONE_TEXT),
    "guidance_scale": ((1,), "guidance needs a second forward pass per token"),
    "penalty_alpha": ((0.0,), _OTHER_METHOD), "dola_layers": ((), _OTHER_METHOD),
    "token_healing": ((False,), "the prompt is taken as it is; heal it before the call"),
    "encoder_repetition_penalty": ((1.0,), _NO_ENCODER), "encoder_no_repeat_ngram_size": ((0,), _NO_ENCODER),
    "use_cache": ((True,), "verification needs a cache; leave this out"),
    "cache_implementation": (("dynamic",), _OWN_CACHE), "cache_config": ((), _OWN_CACHE), "max_cache_len": ((), _OWN_CACHE),
    "output_attentions": ((False,), _OUTPUTS), "output_hidden_states": ((False,), _OUTPUTS), "output_scores": ((False,), _LAWS),
    "output_logits": ((False,), _LAWS),
})  # fmt: skip
"""Name: values that change nothing, besides `None`; and what to do instead of any other."""

_DRAFTS = "this configures transformers' own drafting; drafts come from drafter=, and how many from planner=specdec.FixedPlanner(n)"
_ONE_BEAM = "only beam search reads it; leave this out"
UNREAD: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType({
    "num_assistant_tokens": ((20,), _DRAFTS), "num_assistant_tokens_schedule": (("constant",), _DRAFTS), "use_mtp": ((False,), _DRAFTS),
    "assistant_confidence_threshold": ((0.4,), _DRAFTS), "assistant_lookbehind": ((10,), _DRAFTS), "target_lookbehind": ((10,), _DRAFTS),
    "is_assistant": ((False,), _DRAFTS), "assistant_early_exit": ((), _DRAFTS), "assistant_ensemble_weight": ((), _DRAFTS),
    "prompt_lookup_num_tokens": ((), _DRAFTS), "max_matching_ngram_size": ((), _DRAFTS), "speculation_type": ((), _DRAFTS),
    "early_stopping": ((False,), _ONE_BEAM), "length_penalty": ((1.0,), _ONE_BEAM),
})  # fmt: skip
"""The same, but refused from the user alone: in a model's own defaults they say nothing about the output."""

IRRELEVANT = frozenset({
    "return_dict_in_generate", "compile_config", "disable_compile", "transformers_version", "bos_token_id", "low_memory",
    "prefill_chunk_size", "decoder_start_token_id", "continuous_batching_config",
})  # fmt: skip
"""They change no token."""

_KNOWN = (*HONOURED, *REFUSED, *UNREAD, *IRRELEVANT)
_ARGUMENTS = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer")


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    greedy: bool
    pad: int
    warper: Warper
    ends: Ends


def resolve(prompts: Sequence[Int64[Tensor, " _"]], *, facts: TargetFacts, defaults: hf.GenerationConfig | None = None,
            generation_config: hf.GenerationConfig | None = None, logits_processor: Sequence[Any] | None = None,
            stopping_criteria: Sequence[Any] | None = None, prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None,
            tokenizer: Any = None, **generation_kwargs: Any) -> Options:  # fmt: skip
    """The options of a call, with the meaning that `model.generate` gives them.

    As there, a keyword wins over `generation_config`, which wins over the model's `defaults`, and a keyword given as `None` switches
    an option off (`top_k=None`). Lengths count a row's own tokens: there is no padding. Nothing that is passed in is changed.

    Args:
        prompts: the rows' tokens, without padding.
        facts: of the target.
        defaults: the model's own generation config.

    Raises:
        ValueError: an option that is refused, a value that is not allowed, a prompt that cannot be continued.
        TypeError: an unknown keyword, or an object of the wrong kind.
    """
    for name, config in (("generation_config", generation_config), ("defaults", defaults)):
        if not isinstance(config, hf.GenerationConfig | None):
            raise TypeError(f"{name}: got {type(config).__name__}; give a transformers.GenerationConfig")
    check_prompts(prompts, facts)
    o = _values(generation_config, defaults, generation_kwargs)
    lengths, batch = [len(prompt) for prompt in prompts], len(prompts)
    processors, criteria = _listed("logits_processor", logits_processor), _listed("stopping_criteria", stopping_criteria)

    limits = _limits(o, lengths, facts)
    # transformers cuts its default, and nothing else, to what the model reads; a forced EOS then comes there
    default = o["max_new_tokens"] is None and o["max_length"] is None
    lasts = [min(n, facts.max_positions or n) for n in limits] if default else limits
    stages = _merge(_rules(o, lengths, lasts, prefix_allowed_tokens_fn, facts), processors, batch)
    stages += [[processor] * batch for processor in _warpers(o, facts)]

    own: list[tuple[type, list[Any]]] = []
    if o["max_time"] is not None:
        own.append((hf.MaxTimeCriteria, [hf.MaxTimeCriteria(o["max_time"])]))
    if o["stop_strings"]:
        if tokenizer is None:
            raise ValueError(f"stop_strings={o['stop_strings']!r} needs the tokenizer; pass tokenizer=")
        own.append((hf.StopStringCriteria, [hf.StopStringCriteria(tokenizer, o["stop_strings"])]))
    merged = [objects[0] for objects in _merge(own, criteria, 1)]
    eos = o["eos_token_id"] or []
    ends = Ends.of(merged, lengths=lengths, limits=limits, eos=frozenset(eos), context=facts.max_positions, device=facts.device)
    pad = o["pad_token_id"] if o["pad_token_id"] is not None else eos[0] if eos else 0
    return Options(not o["do_sample"], pad, Warper(stages, batch=batch), ends)


# -------------------------------------------------------------------------------------------------------------- values


def _values(config: hf.GenerationConfig | None, defaults: hf.GenerationConfig | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every honoured option, checked. Raises for what is refused or unknown."""
    for name in kwargs:
        if name not in _KNOWN:
            raise TypeError(f"{name}: no such generation option{_closest(name)}")
    for name, value in vars(config).items() if config else ():
        # transformers lets any attribute be set on a config, and old model configs carry some; a typo must not pass for one.
        if name not in _KNOWN and not name.startswith("_") and (not hasattr(defaults, name) or getattr(defaults, name) != value):
            raise ValueError(f"generation_config.{name}: no such generation option{_closest(name)}")

    def asked(name: str) -> Any:
        """What the user said, if it is more than what the model says."""
        value = kwargs[name] if name in kwargs else getattr(config, name, None)
        return None if value is None or (name not in kwargs and value == getattr(defaults, name, None)) else value

    def value_of(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        found = [value for value in (getattr(config, name, None), getattr(defaults, name, None)) if value is not None]
        return found[0] if found else HONOURED[name].default if name in HONOURED else None

    for name, (neutral, advice) in {**REFUSED, **UNREAD}.items():
        value = value_of(name) if name in REFUSED else asked(name)
        if name == "cache_implementation" and value == "hybrid" and asked(name) is None:
            continue  # old checkpoints say so; transformers drops it too
        if value is not None and value not in neutral:
            raise ValueError(f"{name}={value!r} is not supported (allowed: {', '.join(map(repr, (*neutral, None)))}): {advice}")

    values = {name: value_of(name) for name in HONOURED}
    values["do_sample"] = _checked("do_sample", values["do_sample"])
    idle = () if values["do_sample"] else _SAMPLING
    unread = [f"{name}={asked(name)!r}" for name in idle if asked(name) not in (None, HONOURED[name].default)]
    if unread:
        warnings.warn(f"{', '.join(unread)}: no effect without do_sample=True", UserWarning, stacklevel=5)
    return {name: None if name in idle else _checked(name, value) for name, value in values.items()}


def _checked(name: str, value: Any) -> Any:
    rule = HONOURED[name]
    if value is None:
        return None
    try:
        converted = rule.convert(value)
        ok = rule.ok(converted)
    except (TypeError, IndexError):
        ok = False
    if not ok:
        raise ValueError(f"{name}={value!r} is not allowed: give {rule.allowed}")
    return converted


def _closest(name: str) -> str:
    near = difflib.get_close_matches(name, (*_KNOWN, *_ARGUMENTS), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _listed(name: str, objects: Sequence[Any] | None) -> list[Any]:
    if objects is not None and not isinstance(objects, list | tuple):
        raise TypeError(f"{name}: got {type(objects).__name__}; give a list")
    return list(objects or ())


def check_prompts(prompts: Sequence[Tensor], facts: TargetFacts) -> None:
    """Raise `ValueError` for prompts that the target can't read."""
    if not prompts:
        raise ValueError("prompts: the batch is empty; give at least one prompt")
    for row, prompt in enumerate(prompts):
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise ValueError(f"prompts: row {row} has shape {list(prompt.shape)} and dtype {prompt.dtype}; give one dimension of token ids")
        if len(prompt) == 0:
            raise ValueError(f"prompts: row {row} is empty; give at least one token (a beginning-of-text token will do)")
        bad = ((prompt < 0) | (prompt >= facts.vocab_size)).nonzero()
        if len(bad):
            at = int(bad[0])
            raise ValueError(f"prompts: row {row}, position {at} holds id {int(prompt[at])}; the target knows 0 to {facts.vocab_size - 1}")
        if facts.max_positions is not None and len(prompt) > facts.max_positions:
            raise ValueError(f"prompts: row {row} has {len(prompt)} tokens, the target reads at most {facts.max_positions}; shorten it")


def _limits(o: Mapping[str, Any], lengths: list[int], facts: TargetFacts) -> list[int]:
    """How long each row may become, whatever the target reads. Without a word from anyone, 20 new tokens."""
    room = facts.max_positions
    for row, length in enumerate(lengths):
        if o["max_new_tokens"] is None and o["max_length"] is not None and length >= o["max_length"]:
            raise ValueError(f"max_length={o['max_length']}: row {row} has a prompt of {length}; raise it or give max_new_tokens")
        if o["max_new_tokens"] != 0 and length == room:
            raise ValueError(f"prompts: row {row} has {length} tokens, all that the target reads: nothing can be generated; shorten it")
    if o["max_new_tokens"] is not None:
        return [length + o["max_new_tokens"] for length in lengths]
    if o["max_length"] is not None:
        return [o["max_length"]] * len(lengths)
    return [length + _DEFAULT_NEW for length in lengths]


# ---------------------------------------------------------------------------------------------- processors, in transformers' order


def _rules(o: Mapping[str, Any], lengths: list[int], limits: list[int], allowed: Callable[..., Any] | None,
           facts: TargetFacts) -> list[tuple[type, list[Any]]]:  # fmt: skip
    """Processors that hold under greedy decoding too: their transformers class, and one object per row."""
    eos = None if o["eos_token_id"] is None else torch.tensor(o["eos_token_id"], dtype=torch.int64, device=facts.device)
    stages: list[tuple[type, list[Any]]] = []

    def same(kind: type, *args: Any) -> None:
        stages.append((kind, [kind(*args)] * len(lengths)))

    def each(kind: type, made: Iterable[Any]) -> None:
        stages.append((kind, list(made)))

    if o["sequence_bias"] is not None:
        same(hf.SequenceBiasLogitsProcessor, o["sequence_bias"])
    if o["repetition_penalty"] not in (None, 1.0):
        same(hf.RepetitionPenaltyLogitsProcessor, o["repetition_penalty"])
    if o["no_repeat_ngram_size"]:
        same(hf.NoRepeatNGramLogitsProcessor, o["no_repeat_ngram_size"])
    if o["bad_words_ids"] is not None:
        same(hf.NoBadWordsLogitsProcessor, o["bad_words_ids"], o["eos_token_id"])
    if eos is not None and o["min_new_tokens"] is None and o["min_length"]:  # the other one takes precedence
        same(hf.MinLengthLogitsProcessor, o["min_length"], eos)
    if eos is not None and o["min_new_tokens"]:
        kind = hf.MinNewTokensLengthLogitsProcessor
        each(kind, (kind(n, o["min_new_tokens"], eos) for n in lengths))
    if allowed is not None:
        each(hf.PrefixConstrainedLogitsProcessor, (PrefixAllowed(allowed, row) for row in range(len(lengths))))
    if o["forced_bos_token_id"] is not None:
        same(hf.ForcedBOSTokenLogitsProcessor, _inside("forced_bos_token_id", [o["forced_bos_token_id"]], facts)[0])
    if o["forced_eos_token_id"] is not None:
        forced = torch.tensor(_inside("forced_eos_token_id", o["forced_eos_token_id"], facts), device=facts.device)
        each(hf.ForcedEOSTokenLogitsProcessor, (hf.ForcedEOSTokenLogitsProcessor(n, forced) for n in limits))
    if o["remove_invalid_values"]:
        same(hf.InfNanRemoveLogitsProcessor)
    if o["exponential_decay_length_penalty"] is not None:
        decay = o["exponential_decay_length_penalty"]
        if not o["eos_token_id"] or eos is None:
            raise ValueError(f"exponential_decay_length_penalty={decay!r} favours EOS; give eos_token_id")
        _inside("eos_token_id", o["eos_token_id"], facts)
        each(hf.ExponentialDecayLengthPenalty, (hf.ExponentialDecayLengthPenalty(decay, eos, n) for n in lengths))
    if o["suppress_tokens"]:
        same(hf.SuppressTokensLogitsProcessor, o["suppress_tokens"], facts.device)
    if o["begin_suppress_tokens"]:
        kind = hf.SuppressTokensAtBeginLogitsProcessor
        first = [n if n > 1 or o["forced_bos_token_id"] is None else n + 1 for n in lengths]  # a forced BOS comes before the first word
        each(kind, (kind(o["begin_suppress_tokens"], n, str(facts.device)) for n in first))
    return stages


def _warpers(o: Mapping[str, Any], facts: TargetFacts) -> list[Any]:
    """What shapes the law when sampling, and what comes last in any case. The same for all rows."""
    candidates = (
        (o["temperature"] not in (None, 1.0), lambda: hf.TemperatureLogitsWarper(o["temperature"])),
        (o["top_h"] is not None, lambda: hf.TopHLogitsWarper(o["top_h"])),
        (o["top_k"], lambda: hf.TopKLogitsWarper(o["top_k"])),
        (o["top_p"] not in (None, 1.0), lambda: hf.TopPLogitsWarper(o["top_p"])),
        (o["min_p"] is not None, lambda: hf.MinPLogitsWarper(o["min_p"])),
        (o["typical_p"] not in (None, 1.0), lambda: hf.TypicalLogitsWarper(o["typical_p"])),
        (o["epsilon_cutoff"], lambda: hf.EpsilonLogitsWarper(o["epsilon_cutoff"])),
        (o["eta_cutoff"], lambda: hf.EtaLogitsWarper(o["eta_cutoff"], device=str(facts.device))),
    )
    stages: list[Any] = [make() for wanted, make in candidates if o["do_sample"] and wanted]
    if o["watermarking_config"] is not None:
        given = o["watermarking_config"]
        config = hf.WatermarkingConfig.from_dict(given) if isinstance(given, dict) else given
        config.validate()
        stages.append(config.construct_processor(facts.vocab_size, facts.device))
    return stages + [hf.LogitNormalization()] * bool(o["renormalize_logits"])


def _inside(name: str, tokens: list[int], facts: TargetFacts) -> list[int]:
    if tokens and max(tokens) >= facts.vocab_size:
        raise ValueError(f"{name}={tokens} lies outside the vocabulary: give ids below {facts.vocab_size}")
    return tokens


def _merge(own: list[tuple[type, list[Any]]], given: list[Any], batch: int) -> list[list[Any]]:
    """The user's objects join ours as in `model.generate`: in place of ours of the same class, else behind."""
    first: dict[type, Any] = {}
    for item in given:
        first.setdefault(type(item), item)
    merged = [[first[kind]] * batch if kind in first else objects for kind, objects in own]
    for item in given:
        if not any(item is objects[0] for objects in merged):
            merged.append([item] * batch)
    return merged
