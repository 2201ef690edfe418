"""The network of EAGLE-1, -2 and -3: one decoder layer that reads the target's hidden states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..types import Bool, Float, Int64, TargetFacts

__all__ = ["EagleConfig", "EagleHead", "attend", "fits"]


@dataclass(frozen=True)
class EagleConfig:
    """What a head is made of.

    Args:
        version: 1 for EAGLE-1 and -2, which read what the target's own head reads and share that head; 3 for EAGLE-3.
        layers: which hidden states of the target are read, as ids of input boundaries, see `specdec.types.Features`.
        hidden_size: of the head; `target_hidden_size`: of the target. Version 1 needs them equal.
        vocab_size: of the target; `draft_vocab_size`: of what the head may draft.
        bias: whether `fc` has one.
        norm_before_residual: the layer's residual is the normed hidden state.
        norm_before_fc: one norm over the concatenated features; `fc_norm`: one over each.
        norm_output: what the next step reads has gone through the final norm.
        own_embedding: the head has an embedding of its own; else it reads the target's.
        rope_scaling: as Llama's configs have it, of type "linear" or "llama3".
    """

    version: Literal[1, 3]
    layers: tuple[int, ...]
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_positions: int = 2048
    bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        if self.version == 1 and (self.hidden_size != self.target_hidden_size or self.draft_vocab_size != self.vocab_size):
            raise ValueError(
                f"hidden_size, draft_vocab_size: got {self.hidden_size} and {self.draft_vocab_size}; a head of version 1 shares "
                f"the target's output head, so they must be the target's {self.target_hidden_size} and {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(f"num_heads, num_kv_heads, head_dim: got {self.num_heads}, {self.num_kv_heads}, {self.head_dim}; the first "
                             "must be a multiple of the second, and the last even")  # fmt: skip
        kind = (self.rope_scaling or {}).get("rope_type", (self.rope_scaling or {}).get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise ValueError(f"rope_scaling: got type {kind!r}; allowed are 'default', 'linear' and 'llama3'")


class EagleHead(nn.Module):
    """Reads pairs of a token and the target's features of the token before it; says which token comes next.

    The pair at position t is (token t + 1, feature t). What the layer says of it takes the place of the next feature where the target's own
    is not known yet (Li et al. 2024, arXiv 2401.15077; 2025, arXiv 2503.01840).

    Parameters bear the names of the published checkpoints, but for the one layer, which is `layer` here. `offsets[i] + i` is the target's
    id of draft token i.
    """

    offsets: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = c = config
        first = c.version == 1
        self.fc = nn.Linear(2 * c.hidden_size if first else len(c.layers) * c.target_hidden_size, c.hidden_size, bias=c.bias)
        self.layer = _Layer(c)
        if c.norm_before_fc:
            self.input_norm = _Norm(len(c.layers) * c.target_hidden_size, c.rms_norm_eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(_Norm(c.target_hidden_size, c.rms_norm_eps) for _ in c.layers)
        if not first:
            self.norm = _Norm(c.hidden_size, c.rms_norm_eps)
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.register_buffer("offsets", torch.zeros(c.draft_vocab_size, dtype=torch.int64))

    @property
    def ids(self) -> Int64[Tensor, " Vd"]:
        """The target's id of each token that can be drafted."""
        return self.offsets + torch.arange(len(self.offsets), device=self.offsets.device)

    def fuse(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows d"]:
        """The target's features, in the width of the head."""
        c = self.config
        if c.version == 1:
            return features
        if c.norm_before_fc:
            features = self.input_norm(features)
        if c.fc_norm:
            parts = features.split(c.target_hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def project(self, embedded: Float[Tensor, "B T d"], hidden: Float[Tensor, "B T d"],
                positions: Int64[Tensor, "B T"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """What the attention needs: the residual `[B, T, d]`, queries `[B, H, T, D]`, keys and values `[B, Hkv, T, D]`, rotated."""
        c, layer = self.config, self.layer
        if c.version == 1:
            inputs = residual = self.fc(torch.cat([embedded, hidden], -1))
        else:
            normed = layer.hidden_norm(hidden)
            residual = normed if c.norm_before_residual else hidden
            inputs = torch.cat([layer.input_layernorm(embedded), normed], -1)
        query, key, value = (
            part(inputs).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        turn = _angles(c, positions)
        return residual, _rotate(query, turn), _rotate(key, turn), value

    def finish(self, residual: Float[Tensor, "B T d"], attended: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T d"]:
        """What the layer says, given what the attention found: the hidden state that the next step reads."""
        hidden = residual + self.layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.config.norm_output else hidden

    def final(self, hidden: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """What the output head reads."""
        return hidden if self.config.version == 1 or self.config.norm_output else self.norm(hidden)


class _Norm(nn.RMSNorm):
    """In the precision of its weight, which is finer than that of its input while a head is trained in bfloat16."""

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        return super().forward(x.to(self.weight.dtype))


class _Attention(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        width, heads, pairs = c.hidden_size * (1 if c.version == 1 else 2), c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, outputs, bias=False) for outputs in (heads, pairs, pairs))
        self.o_proj = nn.Linear(heads, c.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        if c.version == 3:
            self.input_layernorm = _Norm(c.hidden_size, c.rms_norm_eps)
            self.hidden_norm = _Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn, self.mlp = _Attention(c), _MLP(c)
        self.post_attention_layernorm = _Norm(c.hidden_size, c.rms_norm_eps)


def _angles(c: EagleConfig, positions: Int64[Tensor, "B T"]) -> Float[Tensor, "B 1 T half"]:
    rate = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, device=positions.device, dtype=torch.float32) / c.head_dim)
    scaling = c.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        rate = rate / scaling["factor"]
    elif kind == "llama3":  # slow ones are stretched, quick ones stay, and between the two it is blended
        turns = scaling["original_max_position_embeddings"] * rate / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        rate = (1 - blend) * rate / scaling["factor"] + blend * rate
    return positions[:, None, :, None] * rate


def _rotate(x: Float[Tensor, "B H T D"], turn: Float[Tensor, "B 1 T half"]) -> Float[Tensor, "B H T D"]:
    a, b = x.float().chunk(2, -1) if x.dtype != torch.float64 else x.chunk(2, -1)
    cos, sin = turn.cos(), turn.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend(query: Float[Tensor, "B H T D"], key: Float[Tensor, "B Hkv S D"], value: Float[Tensor, "B Hkv S D"],
           mask: Bool[Tensor, "B 1 T S"]) -> Float[Tensor, "B H T D"]:  # fmt: skip
    """Grouped-query attention under a mask."""
    return cast(Tensor, F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True))


def fits(config: EagleConfig, facts: TargetFacts) -> None:
    """ValueError if a head like this was made for another target than these are the facts of."""
    pairs = [("hidden_size", config.target_hidden_size, facts.hidden_size), ("vocab_size", config.vocab_size, facts.vocab_size)]
    for name, mine, theirs in pairs:
        if theirs is not None and mine != theirs:
            raise ValueError(f"head: its target has {name} {mine}, this one {theirs}: it was trained for another target")
    if facts.num_layers is not None and not all(0 <= layer <= facts.num_layers for layer in config.layers):
        raise ValueError(f"head: it reads layers {config.layers}; this target has the input boundaries 0 to {facts.num_layers}")
