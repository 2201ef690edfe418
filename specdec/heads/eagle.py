"""The network of EAGLE-1, -2 and -3: one decoder layer that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..types import Float, Int64
from .draft import Output
from .pairs import LayerHead
from .parts import MLP, Attention, Norm, after_attention, check_layer, check_vocabulary

__all__ = ["EagleConfig", "EagleHead", "usual_layers"]


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
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers: got {self.layers}; allowed are different input boundaries of the target's layers")
        check_vocabulary(self.draft_vocab_size, self.vocab_size)
        check_layer(self)

    @property
    def normed(self) -> bool:
        """See `specdec.heads.HeadConfig`."""
        return self.version == 1

    @property
    def shared(self) -> bool:
        """See `specdec.heads.HeadConfig`."""
        return self.version == 1


class EagleHead(LayerHead):
    """One decoder layer over pairs (Li et al. 2024, arXiv 2401.15077; 2025, arXiv 2503.01840).

    Parameters bear the names of the published checkpoints, but for the one layer, which is `layer` here.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config.draft_vocab_size)
        self.config = c = config
        first = c.version == 1
        self.fc = nn.Linear(2 * c.hidden_size if first else len(c.layers) * c.target_hidden_size, c.hidden_size, bias=c.bias)
        self.layer = _Layer(c)
        if c.norm_before_fc:
            self.input_norm = Norm(len(c.layers) * c.target_hidden_size, c.rms_norm_eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(c.target_hidden_size, c.rms_norm_eps) for _ in c.layers)
        if not first:
            self.norm = Norm(c.hidden_size, c.rms_norm_eps)
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)

    def fuse(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows d"]:
        """See `PairHead`."""
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
        """See `LayerHead`."""
        c, layer = self.config, self.layer
        if c.version == 1:
            inputs = residual = self.fc(torch.cat([embedded, hidden], -1))
        else:
            normed = layer.hidden_norm(hidden)
            residual = normed if c.norm_before_residual else hidden
            inputs = torch.cat([layer.input_layernorm(embedded), normed], -1)
        return residual, *layer.self_attn.project(c, inputs, positions)

    def finish(self, residual: Float[Tensor, "B T d"], attended: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T d"]:
        """See `LayerHead`."""
        hidden = after_attention(self.layer, residual, attended)
        return self.norm(hidden) if self.config.norm_output else hidden

    def rank(self, hidden: Float[Tensor, "*rows d"], output: Output) -> Float[Tensor, "*rows Vd"]:
        """See `PairHead`."""
        return (output if self.config.shared else self.lm_head)(self.final(hidden))

    def final(self, hidden: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """See `LayerHead`."""
        return hidden if self.config.version == 1 or self.config.norm_output else self.norm(hidden)


def usual_layers(count: int | None) -> tuple[int, int, int]:
    """Which hidden states an EAGLE-3 head reads unless told otherwise.

    Args:
        count: of the target's layers.

    Raises:
        ValueError: they are too few for that, or not known.
    """
    if count is None:
        raise ValueError("layers: not given, and the target's facts have no num_layers; name them")
    layers = (2, count // 2, count - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(f"layers: not given, and the usual ones, {layers}, are not three rising ones of a target of {count}; name them")
    return layers


class _Layer(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        if c.version == 3:
            self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
            self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn, self.mlp = Attention(c, c.hidden_size * (1 if c.version == 1 else 2)), MLP(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
