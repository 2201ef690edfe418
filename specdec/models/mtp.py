"""The modules for multi-token prediction that a Hugging Face target was trained with, run by transformers' own code.

Like hf.py this file knows transformers' internals: its class `MtpModel` reads such modules from the target's checkpoint.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedModel

from ..heads import Output, PairHead, Write
from ..types import Bool, Float, Int64

__all__ = ["NativeConfig", "NativeModule", "read_module"]

_OTHERWISE = "Train one with `specdec train mtp` and give it to MTPDrafter.from_pretrained, or use another drafter"


@dataclass(frozen=True)
class NativeConfig:
    """What has to be known of a module, see `specdec.heads.PairConfig`."""

    layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int

    normed = True
    shared = True
    own_embedding = False

    @property
    def target_hidden_size(self) -> int:
        """See `specdec.heads.HeadConfig`."""
        return self.hidden_size


class NativeModule(PairHead):
    """The first module of transformers' `MtpModel`, used again for every token that is drafted.

    It reads what the target's output head reads, and what it says went through its own last norm, as in transformers. `MtpModel` would use
    its second module for the second token; the first alone is what a tree of any depth needs, and its cache holds true features alone.

    Args:
        mtp_model: a `transformers.modeling_layers.MtpModel`. Its first module is frozen and put into evaluation mode; what it shares
            with the target stays as it is.
        target: the model that it was made of.

    Raises:
        ValueError: the module can't be run over a tree, or not as transformers would run it; the message says why.
    """

    config: NativeConfig

    def __init__(self, mtp_model: Any, target: PreTrainedModel) -> None:
        text = target.config.get_text_config(decoder=True)
        super().__init__(text.vocab_size, next(mtp_model.layers[0].parameters()).device)
        _check(target, mtp_model.config)
        # the last pair is read one position behind its own
        self.config = NativeConfig((text.num_hidden_layers,), text.hidden_size, text.vocab_size, text.max_position_embeddings - 1)
        self.module = mtp_model.layers[0].eval().requires_grad_(False)
        self._rotary = (mtp_model.rotary_emb,)  # the target's: in a tuple, it does not move with this module
        known = inspect.signature(self.module.forward).parameters
        self._keyword = "cache" if "cache" in known else "past_key_values"

    def fuse(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows d"]:
        """See `PairHead`."""
        return features

    def forward(self, embedded: Float[Tensor, "B T d"], hidden: Float[Tensor, "B T d"], positions: Int64[Tensor, "B T"],
                mask: Bool[Tensor, "B 1 T S"], write: Write) -> Float[Tensor, "B T d"]:  # fmt: skip
        """See `PairHead`."""
        # transformers places a pair at its token, one behind its feature. Rotary attention sees distances alone, so it would not matter;
        # but where frequencies are scaled by position, or angles are rounded, this is exact.
        positions = positions + 1
        # "sdpa" and "eager" both add a mask of numbers
        added = torch.zeros(mask.shape, dtype=embedded.dtype, device=mask.device).masked_fill_(~mask, torch.finfo(embedded.dtype).min)
        return self.module(
            embedded, hidden, position_embeddings=self._rotary[0](embedded, position_ids=positions), attention_mask=added,
            position_ids=positions, **{self._keyword: Cache(layers=[_Written(write)])},
        )  # fmt: skip

    def rank(self, hidden: Float[Tensor, "*rows d"], output: Output) -> Float[Tensor, "*rows Vd"]:
        """See `PairHead`."""
        return output(hidden)


class _Written(DynamicLayer):
    """The module's place in our cache, in the shape in which transformers' layers expect it."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._write(0, key_states, value_states)


def read_module(target: PreTrainedModel, device: torch.device) -> NativeModule:
    """The first of the modules that lie beside the target's weights in its checkpoint.

    Raises:
        ValueError: it has none, they can't be found or used, or this transformers can't read them.
    """
    name, text = type(target).__name__, target.config.get_text_config(decoder=True)
    if not getattr(text, "num_mtp_layers", None):
        raise ValueError(f"target: {name} has no modules for multi-token prediction (config.num_mtp_layers). {_OTHERWISE}")
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise ValueError("target: modules for multi-token prediction are read by transformers 5.17 and newer; install one") from error
    _check(target, target.config.get_mtp_config())
    by_hand = "Load the weights into a transformers.modeling_layers.MtpModel and give MTPDrafter a specdec.models.mtp.NativeModule of that"
    if getattr(getattr(target, "hf_quantizer", None), "pre_quantized", False):  # it would take quantised numbers for weights
        raise ValueError(f"target: the checkpoint of {name} is quantised, and transformers reads its modules as if it were not. {by_hand}")
    path = target.config.name_or_path
    if not path:
        raise ValueError(f"target: {name} came from no checkpoint (config.name_or_path), where its modules would be. {by_hand}")
    try:
        found = MtpModel.from_pretrained(target, device_map={"": device})
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"target: {name} has modules for multi-token prediction (config.num_mtp_layers={text.num_mtp_layers}), but they can't be read "
            f"from {path!r}; use a checkpoint that has them. {by_hand}. What was wrong: {error}"
        ) from error
    return NativeModule(found, target)


def _check(target: PreTrainedModel, config: Any) -> None:
    """Raise `ValueError` if modules of this config can't be run over a tree, or are made in a way that this file does not know."""

    def refuse(bad: Any, what: str, advice: str = _OTHERWISE) -> None:
        if bad:
            raise ValueError(f"target: the modules for multi-token prediction of {type(target).__name__} {what}. {advice}")

    kind = type(DynamicCache(config=config).layers[0])
    refuse(kind is not DynamicLayer, f"need another cache than full attention does ({kind.__name__}), from which no branch can be dropped")
    other = ("chain_hidden_post_norm", "mtp_hidden_states_first", "logits_mup_width_multiplier", "unpadded_vocab_size")
    odd = [f"{key}={value}" for key in other if (value := getattr(config, key, None)) not in (None, False)]
    refuse(odd, f"work otherwise than those of DeepSeek-V3 ({', '.join(odd)})")
    rope = getattr(config, "rope_parameters", None) or {}
    rotary = getattr(target.get_decoder(), "rotary_emb", None)
    refuse(rotary is None or any(isinstance(part, dict) for part in rope.values()), "have no rotary positions, or several kinds of them")
    attention = config._attn_implementation
    refuse(attention not in ("sdpa", "eager"), f"use {attention!r} attention, which takes no tree mask",
           'Load the target with attn_implementation="sdpa" (or "eager")')  # fmt: skip
