"""Hugging Face decoder-only models as targets. No other file but mtp.py knows transformers' internals.

A model is taken as it is: nothing in it is switched, replaced or left behind. Whether it can be used is read from its structure, not
from a list of names: a tree pass needs positions given by the caller, a mask of any shape, and keys and values in every layer that can
be dropped token by token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

from ..cache import FullCache, Lent, causal_target, copy_cache
from ..heads import PairHead
from ..types import Bool, Float, Int64, TargetFacts
from .mtp import read_module
from .view import RowLinear, view

__all__ = ["HFTarget"]

_OTHERWISE = "Any model can be run without a cache: verifier=SequentialVerifier(lambda ids: model(ids).logits[:, -1], vocab_size=...)"


class HFTarget:
    """A causal language model of transformers behind the `CausalTarget` protocol.

    Args:
        model: decoder-only, with a language-model head, full attention in every layer, and "sdpa" or "eager" attention.
        quick: compute the same in less time where that can be done without touching the model, see `_quick`.

    Raises:
        ValueError: the model can't be used; the message says why and what to do.
    """

    def __init__(self, model: PreTrainedModel, *, quick: bool = True) -> None:
        text = model.config.get_text_config(decoder=True)
        self._layers = _check(model, text)
        self._model, self._text = model, text
        self._wanted = quick
        self._quick: PreTrainedModel | None = None
        self._looked = not quick
        """Whether `_quick` is this call's: between calls modules may be replaced, hooked or patched."""
        self._steady = _steady(model, text)
        self._keywords = _cache_keyword(model), _cache_keyword(model.base_model)
        self._additive = ALL_MASK_ATTENTION_FUNCTIONS[text._attn_implementation] is eager_mask
        self._facts = TargetFacts(
            vocab_size=text.vocab_size, dtype=model.dtype, device=_device(model),
            max_positions=_max_positions(text), hidden_size=text.hidden_size, num_layers=text.num_hidden_layers,
        )  # fmt: skip

    @property
    def facts(self) -> TargetFacts:
        return self._facts

    def new_cache(self, batch: int) -> FullCache:
        self._looked = not self._wanted
        return FullCache(batch)

    def first(self, layers: int) -> HFTarget:
        """The model's first decoder layers, its final norm and its head. ValueError if it has fewer layers, or they can't be found."""
        if not 1 <= layers <= len(self._layers):
            raise ValueError(f"layers: got {layers}; {type(self._model).__name__} has 1 to {len(self._layers)} to choose from")
        whole = copy.deepcopy(self._model.config)
        own = whole.get_text_config(decoder=True)
        own.num_hidden_layers = layers
        if getattr(own, "layer_types", None):
            own.layer_types = own.layer_types[:layers]

        def change(module: nn.Module) -> None:
            for old, new in ((self._model.config, whole), (self._text, own)):
                if getattr(module, "config", None) is old:
                    vars(module)["config"] = new

        short = cast(PreTrainedModel, view(self._model, change))
        stack = _decoder_layers(short, len(self._layers))
        for old, new in zip(self._model.modules(), short.modules(), strict=True):
            patches = [vars(old)[key] for key in ("forward", "_old_forward") if key in vars(old) and vars(old)[key] is vars(new)[key]]
            if patches and any(module is stack for module in new.modules()):
                raise ValueError(
                    f"model: {type(old).__name__}.forward was replaced by {patches[0]!r}, which goes through all layers; undo that first"
                )
        stack._modules = dict(list(stack._modules.items())[:layers])
        return HFTarget(short)

    def lend(self) -> Lent:
        """See `Lender`."""
        embed, head, decoder = self._model.get_input_embeddings(), self._model.get_output_embeddings(), self._model.get_decoder()
        norms = [child for child in decoder.children() if "norm" in type(child).__name__.lower()]
        if not self._layers or len(norms) != 1:
            raise ValueError(f"model: the layers or the final norm of {type(self._model).__name__} could not be found")
        width = cast(Tensor, embed.weight).shape[-1]
        if width != self._facts.hidden_size:
            raise ValueError(f"model: its embedding is {width} wide and its layers {self._facts.hidden_size}: a head could not use it")
        layer = {name: weight.detach() for name, weight in self._layers[-1].named_parameters()}
        config = {**self._text.to_dict(), "head_dim": getattr(self._text, "head_dim", None)}
        return Lent(embed, norms[0], cast(nn.Module, head), layer, config)

    def multi_token(self) -> PairHead:
        """See `specdec.drafters.mtp.MultiToken`: the module is read from the checkpoint that the model came from, see `read_module`."""
        return read_module(self._model, self._facts.device)

    def forward(self, tokens: Int64[Tensor, "B T"], positions: Int64[Tensor, "B T"], mask: Bool[Tensor, "B 1 T slots"] | None,
                cache: FullCache, *, logits: bool, layers: tuple[int, ...] = ()) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `CausalTarget`."""
        if not self._looked:
            self._quick, self._looked = _quick(self._model, self._text), True
        # A causal mask left to the model goes with the model's own attention.
        model = self._model if self._quick is None or (mask is None and tokens.shape[1] > 1) else self._quick
        # Below the head, the prompt's logits are never computed.
        module, keyword = (model, self._keywords[0]) if logits else (model.base_model, self._keywords[1])
        mask = self._mask(mask) if model is self._model else _pack(mask, self._text, self._facts.dtype)
        slots = Cache(layers=[_Slots(cache, index) for index in range(self._text.num_hidden_layers)])
        # Features may be trained on, and what runs inside a module that is the user's may keep a tensor: an inference tensor would not do.
        quickest = model is self._quick and self._steady and not layers
        with (
            torch.inference_mode() if quickest else torch.no_grad(),
            _tap(_decoder_layers(model, self._text.num_hidden_layers), layers) as seen,
        ):
            output = module(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=True, **{keyword: slots})
        features = torch.cat([seen[layer].to(tokens.device) for layer in layers], -1) if layers else None
        if not logits:
            return None, features
        return output.logits.clone() if quickest else output.logits, features  # processors may write into a copy made outside

    def _mask(self, mask: Bool[Tensor, "B 1 T slots"] | None) -> Bool[Tensor, "B 1 T slots"] | Float[Tensor, "B 1 T slots"] | None:
        if mask is None or not self._additive:
            return mask
        hidden = torch.finfo(self._facts.dtype).min
        return torch.zeros(mask.shape, dtype=self._facts.dtype, device=mask.device).masked_fill_(~mask, hidden)


# ----------------------------------------------------------------------------------------------- the same model, quicker

_PACKED = "specdec_packed"


def _packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                      scaling: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Grouped-query attention in which the query heads that share a key head are rows of one head: keys are read once for all of
    them, and never repeated. The mask has a row for each, head by head; see `_pack`."""
    batch, heads, nodes, size = query.shape
    groups = heads // key.shape[1]
    if attention_mask is not None and attention_mask.shape[2] != groups * nodes:  # a layer that shares otherwise than the config says
        attention_mask = attention_mask[:, :, :nodes].repeat(1, 1, groups, 1)
    rows = query.reshape(batch, key.shape[1], groups * nodes, size)
    out = nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.view(batch, heads, nodes, -1).transpose(1, 2), None


AttentionInterface.register(_PACKED, _packed_attention)
AttentionMaskInterface.register(_PACKED, sdpa_mask)


def _pack(mask: Tensor | None, text: Any, dtype: torch.dtype) -> Float[Tensor, "B 1 GT slots"] | None:
    """The mask as `_packed_attention` wants it, made once for all layers."""
    if mask is None:
        return None
    groups = text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf).repeat(1, 1, groups, 1)


def _steady(model: PreTrainedModel, text: Any) -> bool:
    """Whether a pass leaves no tensor behind in a module: a view shares leaves with buffers, and the only ones known are rotary
    embeddings whose frequencies do not change."""
    leaves = [module for module in model.modules() if module._buffers and not module._modules]
    kind = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    return kind in ("default", "linear", "llama3", "yarn") and all(type(leaf).__name__.endswith("RotaryEmbedding") for leaf in leaves)


def _quick(model: PreTrainedModel, text: Any) -> PreTrainedModel | None:
    """A view of the model that computes the same in less time; `None` if it must be run as it is."""
    # A patch knows its own module (accelerate dispatches so), and a hook may look up by name the module that it is called with.
    patched = any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if text._attn_implementation != "sdpa" or not model._supports_attention_backend or patched:
        return None
    own = copy.deepcopy(text)
    own._attn_implementation = _PACKED
    rows = _device(model).type == "cpu" and model.dtype in (torch.bfloat16, torch.float16)

    def change(module: nn.Module) -> None:
        if getattr(module, "config", None) is text:
            vars(module)["config"] = own
        if rows and type(module) is nn.Linear and type(module.weight) is nn.Parameter:  # quantised ones have a type of their own
            module.__class__ = RowLinear

    return cast(PreTrainedModel, view(model, change))


class _Slots(DynamicLayer):
    """One layer of a `FullCache`, in the shape in which models expect it."""

    def __init__(self, cache: FullCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.write(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache.start


causal_target.register(PreTrainedModel, HFTarget)


@copy_cache.register(Cache)
def _(cache: Cache, mask: Bool[Tensor, "B L"] | None, name: str) -> FullCache:
    other = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    held = cache.get_seq_length()
    if other or not held:
        raise ValueError(
            f"{name}: {type(cache).__name__} {'has layers of ' + ', '.join(other) if other else 'is empty'}; allowed is a DynamicCache of "
            f"full attention that holds the beginning of input_ids; otherwise leave {name} out"
        )
    layers: list[Any] = cache.layers
    batch = len(layers[0].keys)
    if mask is not None and len(mask) != batch:
        raise ValueError(f"{name}: the cache holds {batch} rows, input_ids have {len(mask)}")
    if mask is not None and mask.shape[1] < held:
        raise ValueError(
            f"{name}: it holds {held} tokens, input_ids only {mask.shape[1]}; give the whole text, of which it holds a beginning"
        )
    real = torch.ones(batch, held, dtype=torch.bool) if mask is None else mask[:, :held].cpu()
    path, copied = torch.argsort(real.int(), dim=1, descending=True, stable=True), FullCache(batch)
    copied.open(held)
    for index, layer in enumerate(layers):
        copied.write(index, layer.keys, layer.values)
    copied.commit(path, real.sum(1))
    return copied


@contextmanager
def _tap(layers: nn.ModuleList, wanted: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states at these input boundaries while the block runs, and leave no hook behind."""
    seen: dict[int, Tensor] = {}
    handles = []

    def before(index: int) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            seen[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        seen[len(layers)] = output[0] if isinstance(output, tuple) else output

    if wanted and not layers:
        raise ValueError(f"layers: got {wanted}, but this model's decoder layers could not be found; use a drafter that reads no features")
    if not all(0 <= index <= len(layers) for index in wanted):
        raise ValueError(f"layers: got {wanted}; this model has the input boundaries 0 to {len(layers)}")
    try:
        for index in set(wanted):
            if index < len(layers):
                handles.append(layers[index].register_forward_pre_hook(before(index), with_kwargs=True))
            else:
                handles.append(layers[-1].register_forward_hook(after))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------------------------- what can be used


def _check(model: PreTrainedModel, text: Any) -> nn.ModuleList:
    """Raise `ValueError` if the model can't be used; otherwise its decoder layers, none if they can't be found."""
    name = type(model).__name__

    def refuse(bad: Any, what: str, advice: str = _OTHERWISE) -> None:
        if bad:
            raise ValueError(f"model: {name} {what}. {advice}")

    refuse(model.config.is_encoder_decoder or getattr(text, "add_cross_attention", False),
           "has an encoder or attends to one; allowed are decoder-only models")  # fmt: skip
    refuse(model.get_output_embeddings() is None, "has no language-model head", "Load it with AutoModelForCausalLM")
    refuse(_device(model).type == "meta", "has no weights: they are on the meta device", "Load them first")
    refuse(model._is_stateful, "keeps a recurrent state, which can't drop rejected tokens; allowed is full attention in every layer")
    kinds = [type(layer) for layer in DynamicCache(config=text).layers]
    other = [(i, kind.__name__) for i, kind in enumerate(kinds) if kind is not DynamicLayer]
    refuse(other, f"needs other caches than full attention does ({other[0][1]} in layer {other[0][0]})" if other else "")
    window = [] if getattr(text, "layer_types", None) else _active(text, "window", "chunk")
    refuse(window, f"attends through a window ({', '.join(window)}); allowed is full attention in every layer")
    refuse(getattr(text, "alibi", False), "places tokens by ALiBi, by their slot; allowed are models that take position_ids")
    for module in (model, model.base_model):
        missing = {"input_ids", "attention_mask", "position_ids"} - set(inspect.signature(module.forward).parameters)
        refuse(missing, f"takes no {' and no '.join(sorted(missing))} in {type(module).__name__}.forward, which a tree pass must set")
        refuse(not _cache_keyword(module), f"takes no cache in {type(module).__name__}.forward")
    layers = _decoder_layers(model, text.num_hidden_layers)
    # A vision tower may look both ways, so look at the decoder's own layers where they are known.
    both_ways = [m for m in (layers or model).modules() if not getattr(m, "is_causal", True) or not getattr(m, "is_decoder", True)]
    refuse(both_ways, "attends in both directions", "Load it as a decoder (config.is_decoder=True), if it was trained as one")
    padding_based = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.get_decoder().modules())
    refuse(padding_based, "numbers positions from its padding token on; allowed are models whose first position is 0")
    attention = text._attn_implementation
    refuse(ALL_MASK_ATTENTION_FUNCTIONS.get(attention) not in (sdpa_mask, eager_mask),
           f"uses {attention!r} attention, which takes no tree mask", 'Load it with attn_implementation="sdpa" (or "eager")')  # fmt: skip
    if any(module.training for module in model.modules()):
        adapters = {f"p={m.p}" for m in model.modules() if isinstance(m, nn.Dropout) and m.training and m.p > 0}
        noise = _active(text, "drop", "jitter") or sorted(adapters)
        refuse(noise, f"is in training mode with dropout or noise ({', '.join(noise)})", "Call model.eval() first")
        recompute = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        refuse(recompute, "is in training mode with gradient checkpointing, which turns the cache off", "Call model.eval() first")
    return layers


def _active(text: Any, *words: str) -> list[str]:
    """The config's positive numbers with one of these words in their names."""
    # what belongs to heads for other tasks is not in a causal model
    own = [(key, value) for key, value in text.to_dict().items() if not key.startswith(("summary_", "classifier_"))]
    found = [(key, value) for key, value in own if any(word in key for word in words)]
    return [f"{key}={value}" for key, value in found if isinstance(value, (int, float)) and value > 0]


def _device(model: PreTrainedModel) -> torch.device:
    """Where the model computes. Weights that accelerate offloads lie on the meta device until their module runs; its hooks know where."""
    hooks = [hook for module in model.modules() if (hook := getattr(module, "_hf_hook", None)) is not None]
    known = [getattr(one, "execution_device", None) for hook in hooks for one in getattr(hook, "hooks", (hook,))]
    return torch.device(next((device for device in known if device is not None), model.device))


def _decoder_layers(model: PreTrainedModel, number: int) -> nn.ModuleList:
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == number), nn.ModuleList())


def _max_positions(text: Any) -> int | None:
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    # Beyond this length the frequencies of all positions change at once, and keys cached before are no longer right.
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else limit


def _cache_keyword(module: nn.Module) -> str:
    """`cache` in newer transformers, `past_key_values` before and in code that came with a checkpoint."""
    known = inspect.signature(module.forward).parameters
    return next((key for key in ("cache", "past_key_values") if key in known), "")
