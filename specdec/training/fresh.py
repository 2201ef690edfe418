"""Heads as they are before the first lesson."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import Tensor

from ..cache import Lent
from ..heads import EagleConfig, EagleHead, MedusaConfig, MedusaHeads, MTPConfig, MTPHead
from ..types import Float, Int64, TargetFacts

__all__ = ["fresh_head", "fresh_medusa", "fresh_mtp"]


def fresh_head(lent: Lent, facts: TargetFacts, layers: tuple[int, ...], rows: Float[Tensor, "V D"], ids: Int64[Tensor, " Vd"]) -> EagleHead:
    """An EAGLE-3 head that begins as the target's last layer and output head, in float32.

    The layer reads the highest of the features as if it were its own input; what it will make of the token beside it is still open (zero).
    It gets a key head for each query head, for the token reaches the rest of the layer through keys and values alone. Where the target's
    last layer is not like Llama's, there is a warning, and the layer begins with random weights.

    Args:
        rows: the target's output head, see `specdec.cache.output_rows`.
        ids: the target's ids of the draft vocabulary, rising.
    """
    given = _layer(lent, facts)
    width, heads, size = given["hidden_size"], given["num_heads"], given["head_dim"]
    head = EagleHead(EagleConfig(3, layers, target_hidden_size=width, num_kv_heads=heads, draft_vocab_size=len(ids), **given))
    own = dict(head.named_parameters())
    with torch.no_grad():
        for name, weight in _like_llama(lent).items():
            kind = name.split(".")[-2]
            if kind in ("k_proj", "v_proj") and weight.ndim == 2:
                groups = heads // (weight.shape[0] // size)
                weight = weight.unflatten(0, (-1, size)).repeat_interleave(groups, 0).flatten(0, 1)
            if kind in ("q_proj", "k_proj", "v_proj") and weight.ndim == 2:
                own[f"layer.{name}"].zero_()[:, width:] = weight
            elif name == "input_layernorm.weight":
                own["layer.hidden_norm.weight"].copy_(weight)
            elif name == "norm.weight":
                own[name].copy_(weight)
            elif f"layer.{name}" in own:  # biases and norms that the head has no place for are left out: it only begins here
                own[f"layer.{name}"].copy_(weight)
        head.fc.weight.zero_()[:, -width:] = torch.eye(width)
        head.lm_head.weight.copy_(rows[ids])
        head.draft(ids)
    return head


def fresh_mtp(lent: Lent, facts: TargetFacts, ids: Int64[Tensor, " Vd"], scale: float = 1.0) -> MTPHead:
    """A module for multi-token prediction that begins as the target's last layer, in float32; what it makes of the token is still open.

    Args:
        ids: the target's ids of the draft vocabulary, rising.
        scale: the root mean square of what enters the target's last layer, as which the hidden state is handed on.
    """
    given = _layer(lent, facts)
    pairs = lent.config.get("num_key_value_heads") or given["num_heads"]
    config = MTPConfig((cast(int, facts.num_layers),), draft_vocab_size=len(ids), num_kv_heads=pairs, **given)
    head = MTPHead(config)
    own = dict(head.named_parameters())
    with torch.no_grad():
        for name, weight in _like_llama(lent).items():
            if name == "norm.weight":
                head.norm.weight.copy_(weight)
                head.hnorm.weight.copy_(torch.where(weight.float().abs() > 1e-3, 1 / weight.float(), 0.0))  # what was nothing stays nothing
            elif f"layer.{name}" in own:
                own[f"layer.{name}"].copy_(weight)
        head.eh_proj.weight.zero_()[:, config.hidden_size :] = scale * torch.eye(config.hidden_size)
        head.draft(ids)
    return head


def fresh_medusa(facts: TargetFacts, ids: Int64[Tensor, " Vd"], heads: int, blocks: int = 1) -> MedusaHeads:
    """Heads that share the target's output head and say what it says, in float32."""
    config = MedusaConfig(
        (cast(int, facts.num_layers),), heads, blocks, cast(int, facts.hidden_size), facts.vocab_size, len(ids), shared=True
    )
    found = MedusaHeads(config)
    found.draft(ids)
    return found


def _layer(lent: Lent, facts: TargetFacts) -> dict[str, Any]:
    """Of a config: what the target's own layers are made of."""
    told, width = lent.config, cast(int, facts.hidden_size)
    lost = [name for name in ("num_attention_heads", "intermediate_size") if not isinstance(told.get(name), int)]
    if lost:
        raise ValueError(f"target: its config does not say {' and '.join(lost)}, by which a head is made; give a head of your own making")
    rope = told.get("rope_parameters") or {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} if rope.get("rope_type") in ("linear", "llama3") else None
    return {
        "hidden_size": width, "intermediate_size": told["intermediate_size"], "num_heads": told["num_attention_heads"],
        "head_dim": told.get("head_dim") or width // told["num_attention_heads"], "vocab_size": facts.vocab_size,
        "rms_norm_eps": told.get("rms_norm_eps") or 1e-5, "rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": scaling,
        "max_positions": told.get("max_position_embeddings") or 2048,
    }  # fmt: skip


_LLAMA = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def _like_llama(lent: Lent) -> dict[str, Tensor]:
    """The parameters of the target's last layer and, as `norm.weight`, of its final norm; none where they mean something else."""
    norm = getattr(lent.norm, "weight", None)
    known = isinstance(norm, Tensor) and all(f"{name}.weight" in lent.layer for name in _LLAMA)
    if isinstance(norm, Tensor) and known:
        some = torch.linspace(-2, 3, len(norm)).to(norm)
        plain = some.float() * some.float().pow(2).mean().rsqrt() * norm.float()
        with torch.no_grad():
            known = torch.allclose(lent.norm(some).float(), plain, rtol=0.02, atol=0.02)
    if not known:
        warnings.warn(
            "the target's last layer is not made like Llama's, so the head begins with random weights: it will need more tokens",
            stacklevel=3,
        )
        return {}
    return {**lent.layer, "norm.weight": cast(Tensor, norm).detach()}
