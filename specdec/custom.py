"""The drop-in for users of Hugging Face: speculative decoding as the decoding method of `model.generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import transformers as hf
from torch import Tensor

from .base import Verifier
from .generation import Streamer, check_parts, default_acceptor
from .loop import compatible, decode
from .options import REFUSED, UNREAD, Options, check_prompts
from .planning import FixedPlanner
from .ragged import pad_rows, unpad_rows
from .rng import CounterRng, derive_seeds
from .session import Session
from .stops import Ends
from .types import Bool, Float, Int64, TargetFacts
from .verifiers.factory import make_verifier
from .warp import Warper

__all__ = ["custom_generate"]

_Output = cast(Any, hf.generation).GenerateDecoderOnlyOutput
_CACHES = ("cache", "past_key_values", "cache_params")
"""What a cache is called: versions of transformers differ."""
_INPUTS = frozenset({*_CACHES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"})
_WORKS_HERE = frozenset({"output_scores", "output_logits", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"})
"""Refused by `specdec.generate`. The last two refer to the prompt here, and generate has made their processors."""
_WHOLE = "give the whole text as input_ids, of which the cache holds a beginning, and an attention_mask of the same shape"


def custom_generate(*, drafter: Any, acceptor: Any = None, planner: Any = None, verifier: Any = None, seed: Any = None,
                    streamer: Streamer | None = None) -> Callable[..., Any]:  # fmt: skip
    """A decoding method for `model.generate`:

        model.generate(**inputs, custom_generate=specdec.custom_generate(drafter=NGramDrafter()), max_new_tokens=100)

    The options, processors and stopping criteria are those that `generate` has made of its arguments, and the law of the text is
    exactly the target's. What comes back is what `generate` gives: ids `[B, L + new]` with the prompt's padding, or with
    `return_dict_in_generate=True` a `GenerateDecoderOnlyOutput` with `sequences`, and `scores` and `logits` (a tuple of float32 `[B, V]`,
    one for each new token) if asked for. The method may be used for any number of calls.

    Padding on the left is shown to processors and stopping criteria, as in Hugging Face, and lengths count it. Positions, random
    numbers and the target's context limit count real tokens, so that one seed gives the text that it gives in `specdec.generate`,
    unless a processor looks at the padding.

    It differs from plain `generate` in this:

    - A row that has ended is padded, with eos if there is no pad token and with 0 if there is neither; plain `generate` goes on
      writing into it where no eos is set. In such a row `scores` and `logits` say that padding is certain: 0 there, -inf elsewhere.
    - A row ends at the target's context limit. Criteria see one row at a time, and no scores.
    - A cache that is passed is copied, and not advanced. None is returned.

    `generate` does not hand over all of its arguments:

    - `streamer`: give it here. One that is given to `generate` is shown the prompt and nothing else.
    - `tokenizer`: `generate` raises if there are `stop_strings`; pass a `transformers.StopStringCriteria` in `stopping_criteria`.
    - `assistant_model` has no effect. With `cache_implementation="paged"` this method is not called at all.
    - `synced_gpus`: processes are not kept in step, so it can't be used where they must be (DeepSpeed ZeRO 3, FSDP).

    Args:
        drafter, acceptor, planner, verifier: as in `specdec.generate`.
        seed: one integer per row, or one for all to derive the rows' from, the same for every call; fresh for each if left out.
        streamer: as in transformers, for a batch of one: `put(prompt)`, then the tokens of each round, then `end()`.

    Raises:
        TypeError: a part of the wrong kind.
        ValueError: in the call, an option or an input of the model that can't be honoured: several beams or sequences, another
            decoding method, inputs besides the text, padding that is not on the left, position ids of one's own, a cache that is not
            dynamic, attentions and hidden states.
    """
    check_parts(drafter, acceptor, verifier, planner)
    plan = FixedPlanner(10) if planner is None else planner

    # The names behind the slash are what `generate` calls them; a name of our own there would take a keyword out of its hands.
    def decoding_method(model: Any, input_ids: Int64[Tensor, "B L"], /, logits_processor: Sequence[Any], stopping_criteria: Sequence[Any],
                        generation_config: hf.GenerationConfig, synced_gpus: bool = False, **model_kwargs: Any) -> Any:  # fmt: skip
        runner, _ = make_verifier(model, verifier)
        _refuse_options(generation_config, getattr(model, "generation_config", None), synced_gpus)
        _refuse_inputs(model_kwargs)
        mask = _mask(input_ids, model_kwargs)
        prompts, skip = unpad_rows(input_ids, mask.long()), (~mask).sum(1).tolist()
        _check(prompts, runner.facts)
        options = _options(generation_config, logits_processor, stopping_criteria, input_ids, skip, runner.facts)
        rule = default_acceptor(drafter, options.greedy) if acceptor is None else acceptor
        compatible(drafter, rule, options.greedy)
        session = _session(runner, model_kwargs, mask, prompts)
        seeds = derive_seeds(seed, len(prompts))
        if streamer is not None:
            if len(prompts) != 1:
                raise ValueError(f"streamer: it shows one text, but the batch has {len(prompts)} rows; leave it out")
            streamer.put(input_ids.cpu())

        named = bool(generation_config.return_dict_in_generate)
        wanted = [name for name in ("scores", "logits") if named and getattr(generation_config, f"output_{name}")]
        laws: dict[str, list[list[Tensor]]] = {name: [[] for _ in prompts] for name in wanted}
        new: list[list[int]] = [[] for _ in prompts]
        for done in decode(
            runner, list(input_ids.cpu().long()), options, drafter=drafter, acceptor=rule, planner=plan,
            rng=CounterRng(seeds), keep_all=bool(wanted), session=session, model=runner, skip=skip,
        ):  # fmt: skip
            for at, (row, tokens) in enumerate(zip(done.rows, done.emitted, strict=True)):
                new[row] += tokens
                for name in wanted:
                    node = done.acceptance.path[at, : len(tokens)]
                    laws[name][row].append(getattr(done.verification, name)[at, node].to(input_ids.device, torch.float32))
                if streamer is not None:
                    streamer.put(torch.tensor(tokens, device="cpu"))
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, pad_rows(new, options.pad)[0].to(input_ids.device)], 1)
        steps: dict[str, Any] = {name: _by_step(rows, max(map(len, new)), options.pad) for name, rows in laws.items()}
        return _Output(sequences=sequences, **steps) if named else sequences

    return decoding_method


def _options(config: hf.GenerationConfig, processors: Sequence[Any], criteria: Sequence[Any], input_ids: Int64[Tensor, "B L"],
             skip: Sequence[int], facts: TargetFacts) -> Options:  # fmt: skip
    """What `generate` has made of its arguments. Lengths count padding, the target's context does not."""
    batch, limit = len(skip), facts.max_positions
    if processors and input_ids.device.type != facts.device.type:
        raise ValueError(f"input_ids: they are on {input_ids.device}, and with them generate's processors; move them to {facts.device}")
    ends = Ends.of(
        list(criteria), lengths=[input_ids.shape[1]] * batch, limits=[config.max_length] * batch, eos=frozenset(),
        context=None if limit is None else [limit + n for n in skip], device=input_ids.device,
    )  # fmt: skip
    tokens = [token for token in (config.pad_token_id, config.eos_token_id) if token is not None]
    pad = int(torch.as_tensor(tokens[0]).flatten()[0]) if tokens else 0
    return Options(not config.do_sample, pad, Warper([[processor] * batch for processor in processors], batch=batch), ends)


def _check(prompts: Sequence[Int64[Tensor, " _"]], facts: TargetFacts) -> None:
    check_prompts(prompts, facts)
    full = [row for row, prompt in enumerate(prompts) if len(prompt) == facts.max_positions]
    if full:
        raise ValueError(
            f"input_ids: row {full[0]} has {facts.max_positions} tokens, all that the target reads: nothing can be generated; shorten it"
        )


def _refuse_options(config: hf.GenerationConfig, own: hf.GenerationConfig | None, synced_gpus: bool) -> None:
    """Raise for what `generate` passes on and this method does not do. `own` is the model's, which may say things that nobody asked for."""
    if synced_gpus:
        raise ValueError("synced_gpus=True is not supported: rows, and so processes, do different numbers of passes; leave it out")
    for name, (neutral, advice) in {**REFUSED, **UNREAD}.items():
        value = getattr(config, name, None)
        if name in _WORKS_HERE or value is None or value in neutral or (name in UNREAD and value == getattr(own, name, None)):
            continue
        raise ValueError(f"{name}={value!r} is not supported (allowed: {', '.join(map(repr, (*neutral, None)))}): {advice}")


def _refuse_inputs(inputs: Mapping[str, Any]) -> None:
    for name, value in inputs.items():
        if name not in _INPUTS and value is not None and not (isinstance(value, Mapping) and not value):
            raise ValueError(f"{name}: the model would be run without it; only text can be given, as input_ids and attention_mask")


def _mask(input_ids: Int64[Tensor, "B L"], inputs: Mapping[str, Any]) -> Bool[Tensor, "B L"]:
    """Which tokens are real, on the CPU. ValueError if padding is not on the left, or the positions are not the usual ones."""
    given, positions, shape = inputs.get("attention_mask"), inputs.get("position_ids"), list(input_ids.shape)
    if given is not None and list(given.shape) != shape:
        raise ValueError(f"attention_mask: {list(given.shape)} does not fit input_ids of {shape}; {_WHOLE}")
    if given is not None and not ((given == 0) | (given == 1)).all():
        raise ValueError("attention_mask: allowed are 1 at real tokens and 0 at padding")
    mask = torch.ones(shape, dtype=torch.bool) if given is None else given.cpu() == 1
    gaps = mask[:, :-1] & ~mask[:, 1:]
    if gaps.any() or not mask[:, -1:].all():
        row = int((gaps.any(1) | ~mask[:, -1]).nonzero()[0])
        raise ValueError(f"attention_mask: row {row} masks tokens behind its first one; pad on the left only (padding_side='left')")
    if positions is None:
        return mask
    if positions.shape[-1] != shape[1]:
        raise ValueError(f"position_ids: there are {positions.shape[-1]}, for input_ids of {shape}; {_WHOLE}")
    if not ((positions.cpu() == mask.long().cumsum(-1) - 1) | ~mask).all():
        raise ValueError("position_ids: they are not 0, 1, 2, ... from each row's first token on; leave them out")
    return mask


def _session(verifier: Verifier, inputs: Mapping[str, Any], mask: Bool[Tensor, "B L"], prompts: Sequence[Tensor]) -> Session | None:
    """A session around a copy of the user's cache; `None` if there is none, or nothing in it."""
    name, cache = next(((name, inputs[name]) for name in _CACHES if inputs.get(name) is not None), ("", None))
    if cache is None:
        return None
    if not isinstance(cache, hf.DynamicCache):
        raise ValueError(f"{name}: got {type(cache).__name__}; allowed is a DynamicCache, or leave it out")
    if not cache.get_seq_length():
        return None
    return Session.around(cache, mask, prompts, model=verifier, verifier=verifier, name=name)


def _by_step(rows: Sequence[Sequence[Float[Tensor, "_ V"]]], steps: int, pad: int) -> tuple[Float[Tensor, "B V"], ...]:
    """The rows' laws, token by token. Where a row has ended, padding is certain."""
    first = rows[0][0]
    whole = first.new_full((steps, len(rows), first.shape[-1]), -torch.inf)
    whole[:, :, pad : pad + 1] = 0
    for row, parts in enumerate(rows):
        law = torch.cat(list(parts))
        whole[: len(law), row] = law
    return tuple(whole)
