"""What the decoder layers of heads are made of: Llama's parts, under the names of its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..types import Bool, Float, Int64

__all__ = ["MLP", "Attention", "LayerConfig", "Norm", "after_attention", "attend", "check_layer", "check_vocabulary", "turned"]


@runtime_checkable
class LayerConfig(Protocol):
    """What a decoder layer is made of."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> Mapping[str, Any] | None: ...


_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_vocabulary(drafted: int, every: int) -> None:
    """ValueError if so many tokens can't be drafted of so many."""
    if not 1 <= drafted <= every:
        raise ValueError(f"draft_vocab_size: got {drafted}; allowed are 1 to vocab_size, {every}")


def check_layer(c: LayerConfig) -> None:
    """ValueError if no layer can be made of that."""
    if min(c.num_heads, c.num_kv_heads, c.head_dim) < 1 or c.num_heads % c.num_kv_heads or c.head_dim % 2:
        raise ValueError(f"num_heads, num_kv_heads, head_dim: got {c.num_heads}, {c.num_kv_heads}, {c.head_dim}; the first "
                         "must be a multiple of the second, and the last even")  # fmt: skip
    if _kind(c) not in ("default", "linear", "llama3"):
        raise ValueError(f"rope_scaling: got type {_kind(c)!r}; allowed are 'default', 'linear' and 'llama3'")
    needed = {"default": (), "linear": ("factor",), "llama3": ("factor", *_LLAMA3)}[_kind(c)]
    given = {name: (c.rope_scaling or {}).get(name) for name in needed}
    if any(isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf for value in given.values()):
        raise ValueError(f"rope_scaling: got {given}; all of these have to be positive numbers")
    if _kind(c) == "llama3" and given["low_freq_factor"] == given["high_freq_factor"]:
        raise ValueError(f"rope_scaling: got {given}; low_freq_factor and high_freq_factor have to differ")


class Norm(nn.RMSNorm):
    """In the precision of its weight, which is finer than that of its input while a head is trained in bfloat16."""

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """The projections; `width` is that of what queries, keys and values are made of."""

    def __init__(self, c: LayerConfig, width: int) -> None:
        super().__init__()
        heads, pairs = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, outputs, bias=False) for outputs in (heads, pairs, pairs))
        self.o_proj = nn.Linear(heads, c.hidden_size, bias=False)

    def project(self, c: LayerConfig, x: Float[Tensor, "B T W"], positions: Int64[Tensor, "B T"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, T, D]`, keys and values `[B, Hkv, T, D]`, rotated."""
        query, key, value = (part(x).unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        turn = _angles(c, positions)
        return turned(query, turn), turned(key, turn), value


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: LayerConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def after_attention(layer: Any, residual: Float[Tensor, "B T d"], attended: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T d"]:
    """What a layer with `self_attn`, `post_attention_layernorm` and `mlp` says, given what its attention found."""
    hidden = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return cast(Tensor, hidden + layer.mlp(layer.post_attention_layernorm(hidden)))


def _angles(c: LayerConfig, positions: Int64[Tensor, "B T"]) -> Float[Tensor, "B 1 T half"]:
    rate = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, device=positions.device, dtype=torch.float32) / c.head_dim)
    scaling = c.rope_scaling or {}
    kind = _kind(c)
    if kind == "linear":
        rate = rate / scaling["factor"]
    elif kind == "llama3":  # slow ones are stretched, quick ones stay, and between the two it is blended
        turns = scaling["original_max_position_embeddings"] * rate / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        rate = (1 - blend) * rate / scaling["factor"] + blend * rate
    return positions[:, None, :, None] * rate


def turned(x: Float[Tensor, "B H T D"], turn: Float[Tensor, "B 1 T half"]) -> Float[Tensor, "B H T D"]:
    """Rotated by these angles (RoPE, Su et al. 2021)."""
    a, b = x.float().chunk(2, -1) if x.dtype != torch.float64 else x.chunk(2, -1)
    cos, sin = turn.cos(), turn.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend(query: Float[Tensor, "B H T D"], key: Float[Tensor, "B Hkv S D"], value: Float[Tensor, "B Hkv S D"],
           mask: Bool[Tensor, "B 1 T S"]) -> Float[Tensor, "B H T D"]:  # fmt: skip
    """Grouped-query attention under a mask."""
    return cast(Tensor, F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True))


def _kind(c: LayerConfig) -> str:
    scaling = c.rope_scaling or {}
    return scaling.get("rope_type", scaling.get("type", "default"))
