"""What a benchmark compares. A method decodes a group of prompts; a new one is a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..base import Drafter, Planner
from ..drafters import ModelDrafter, NGramDrafter, NullDrafter, grow
from ..drafters.by_name import HEADS, head_drafter
from ..generation import generate
from ..models import load
from ..planning import AdaptivePlanner, FixedPlanner
from ..stats import Stats

__all__ = ["METHODS", "Decoded", "Method", "Setup", "make_methods", "read_names", "head_planner"]

PLAIN = "plain"
HF_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Setup:
    """What all methods of a benchmark share."""

    model: Any
    options: Mapping[str, Any]
    """In the words of `model.generate`; every method gets the same."""
    num_draft: int | None = None
    """Drafted tokens a round, or levels where the planner adapts, at most; left out, what suits the method."""
    depth: int | None = None
    """Of a tree, where the planner is a fixed one; as deep as it has nodes if left out."""
    batch: int = 1
    draft_model: str | None = None
    """Name or folder, as `specdec.models.load` takes it."""
    head: str | None = None
    """Of the methods with a head: what `from_pretrained` of the drafter takes."""
    tokenizer: Any = None
    """The model's own, to see that a draft model speaks the same tokens."""


@dataclass(frozen=True)
class Decoded:
    """A group of texts, and what is known of how it came about."""

    texts: list[list[int]]
    """New tokens, the end token included."""
    rounds: int | None = None
    """Rounds of single rows; of transformers' methods the target passes, where the batch is one."""
    stats: Stats | None = None
    """Of our own methods alone."""


Method = Callable[[Sequence[list[int]], Sequence[int]], Decoded]
"""Decodes these prompts, where it samples with these seeds. All results are on the host when it returns, so that it can be timed."""


def read_names(text: str) -> list[str]:
    """The methods in a list such as "ngram, hf-plain", each once; `plain` is among them and first, whether listed or not.

    Raises:
        ValueError: a name that is none.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"methods: {', '.join(map(repr, unknown))} unknown; allowed are {', '.join(METHODS)}, separated by commas")
    return list(dict.fromkeys([PLAIN, *names]))


def make_methods(names: Sequence[str], setup: Setup) -> dict[str, Method]:
    """The methods of these names.

    Raises:
        ValueError: a method lacks something, or cannot do what the setup asks for.
    """
    if setup.draft_model is not None and "draft" not in names:
        raise ValueError(f"draft_model: {setup.draft_model!r} would not be used; add draft to the methods")
    if setup.depth is not None and not any(name == "draft" or "-" in name and name.partition("-")[0] in HEADS for name in names):
        raise ValueError(f"depth: {setup.depth} would not be used; it is for methods that draft the same every round, such as draft")
    kinds = {name.partition("-")[0] for name in names} & HEADS.keys()
    if setup.head is not None and len(kinds) != 1:
        used = f"used by {' and '.join(sorted(kinds))}, which differ" if kinds else "not used"
        raise ValueError(f"head: {setup.head!r} would be {used}; give methods of one of the kinds {', '.join(HEADS)}")
    return {name: METHODS[name](setup) for name in names}


# --------------------------------------------------------------------------------------------------------------------- ours


def _drafted(setup: Setup, drafter: Drafter, planner: Planner | None = None) -> Method:
    """`specdec.generate` with this drafter and the rule that it takes by itself."""
    planner = planner or FixedPlanner(_NUM_DRAFT if setup.num_draft is None else setup.num_draft, setup.depth)

    def decode(prompts: Sequence[list[int]], seeds: Sequence[int]) -> Decoded:
        done = generate(setup.model, prompts, drafter=drafter, planner=planner, seed=seeds, **setup.options)
        return Decoded([tokens.tolist() for tokens in done.new_tokens], done.stats.rounds, done.stats)

    return decode


def _plain(setup: Setup) -> Method:
    return _drafted(setup, NullDrafter())


def _ngram(setup: Setup) -> Method:
    return _drafted(setup, NGramDrafter(), AdaptivePlanner(_NUM_DRAFT if setup.num_draft is None else setup.num_draft))


def _draft(setup: Setup) -> Method:
    if setup.draft_model is None:
        raise ValueError("draft: which model drafts? Give draft_model (--draft-model NAME), a smaller model with the same vocabulary")
    model, tokenizer = load(setup.draft_model, dtype=setup.model.dtype, device=setup.model.device)
    return _drafted(setup, ModelDrafter(model, tokenizer=tokenizer, target_tokenizer=setup.tokenizer))


def _head(setup: Setup, kind: str, shape: grow.Shape | None = None) -> Method:
    return _drafted(setup, head_drafter(kind, setup.model, setup.head, shape))


def head_planner(levels: int | None = None) -> AdaptivePlanner:
    """Trees of few levels, as deep as pays: what a level costs was measured with the packaged model and head on two CPU cores."""
    return AdaptivePlanner(4 if levels is None else levels, first=0.42, more=0.13, spread=3)


def _adaptive(setup: Setup, kind: str) -> Method:
    return _drafted(setup, head_drafter(kind, setup.model, setup.head), head_planner(setup.num_draft))


# ------------------------------------------------------------------------------------------------------------ transformers'


def _hf(setup: Setup, **extra: Any) -> Method:
    """transformers' own `model.generate`, padded on the left, with the same options."""
    model, options = setup.model, dict(setup.options)
    ends = _listed(options.get("eos_token_id", model.generation_config.eos_token_id))
    pad = next(iter([*_listed(model.generation_config.pad_token_id), *ends]), 0)

    def decode(prompts: Sequence[list[int]], seeds: Sequence[int]) -> Decoded:
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
        with _seeded(seeds[0]) if options["do_sample"] else nullcontext(), _counted(model) as passes:
            out = model.generate(ids, attention_mask=mask, pad_token_id=pad, **options, **extra)
        texts = [_until(row, ends) for row in out[:, longest:].tolist()]
        return Decoded(texts, len(passes) if len(prompts) == 1 else None)

    return decode


def _hf_lookup(setup: Setup) -> Method:
    if setup.batch > 1:
        raise ValueError(
            f"hf-lookup: transformers' prompt lookup decodes one prompt at a time, not {setup.batch}; leave it out or use batch 1"
        )
    return _hf(setup, prompt_lookup_num_tokens=HF_LOOKUP_TOKENS)


def _listed(tokens: int | Sequence[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _until(row: list[int], ends: Sequence[int]) -> list[int]:
    """Without the padding behind the first end token."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """transformers draws from torch's global state, which is put back afterwards."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@contextmanager
def _counted(model: Any) -> Iterator[list[None]]:
    """A list that grows with every forward pass of the model; appending to it takes no time that could be measured beside one."""
    passes: list[None] = []
    handle = model.register_forward_hook(lambda *_: passes.append(None))
    try:
        yield passes
    finally:
        handle.remove()


_NUM_DRAFT = 10
_SHAPES = {"chain": grow.chain(), "mixed": grow.mixed(3, 1), "dynamic": grow.dynamic(8)}
METHODS: dict[str, Callable[[Setup], Method]] = {
    "plain": _plain,
    "hf-plain": _hf,
    "hf-lookup": _hf_lookup,
    "ngram": _ngram,
    "draft": _draft,
    **{kind: partial(_adaptive, kind=kind) for kind in HEADS},
    **{f"{kind}-{name}": partial(_head, kind=kind, shape=shape) for kind in HEADS for name, shape in _SHAPES.items()},
}
"""Name to method. Making one may load weights, and says at once what is missing."""
