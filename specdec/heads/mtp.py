"""The module for multi-token prediction of DeepSeek-V3: a decoder layer that reads what the target's output head reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..types import Float, Int64
from .draft import Output
from .pairs import LayerHead
from .parts import MLP, Attention, Norm, after_attention, check_layer, check_vocabulary

__all__ = ["MTPConfig", "MTPHead"]


@dataclass(frozen=True)
class MTPConfig:
    """What a module is made of. It is as wide as the target, whose embedding, final norm and output head it uses.

    Args:
        layers: the input boundary of the target's final norm, and that alone.
        draft_vocab_size: of what the module may draft; smaller than `vocab_size`, it spares much of the output head.
        rope_scaling: as Llama's configs have it, of type "linear" or "llama3".
    """

    layers: tuple[int, ...]
    hidden_size: int
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

    normed = True
    shared = True
    own_embedding = False

    def __post_init__(self) -> None:
        if len(self.layers) != 1:
            raise ValueError(f"layers: got {self.layers}; such a module reads one hidden state, what enters the target's final norm")
        check_vocabulary(self.draft_vocab_size, self.vocab_size)
        check_layer(self)

    @property
    def target_hidden_size(self) -> int:
        """See `specdec.heads.HeadConfig`."""
        return self.hidden_size


class MTPHead(LayerHead):
    """One module, used again for every token that is drafted (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

    Its last norm belongs to what it says, so that the next step reads what it would read of the target.
    """

    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config.draft_vocab_size)
        self.config = c = config
        self.enorm, self.hnorm, self.norm = (Norm(c.hidden_size, c.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layer = _Layer(c)

    def fuse(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows d"]:
        """See `PairHead`."""
        return features

    def project(self, embedded: Float[Tensor, "B T d"], hidden: Float[Tensor, "B T d"],
                positions: Int64[Tensor, "B T"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """See `LayerHead`."""
        residual = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return residual, *self.layer.self_attn.project(self.config, self.layer.input_layernorm(residual), positions)

    def finish(self, residual: Float[Tensor, "B T d"], attended: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T d"]:
        """See `LayerHead`."""
        return self.norm(after_attention(self.layer, residual, attended))

    def rank(self, hidden: Float[Tensor, "*rows d"], output: Output) -> Float[Tensor, "*rows Vd"]:
        """See `PairHead`."""
        return output(hidden)

    def final(self, hidden: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """See `LayerHead`."""
        return hidden


class _Layer(nn.Module):
    def __init__(self, c: MTPConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(c, c.hidden_size), MLP(c)
