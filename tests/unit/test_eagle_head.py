"""The network of a head against one that is written out word by word, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.heads import EagleConfig, EagleHead, attend

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"type": "linear", "factor": 4.0}
FLAGS = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "bias"]
D, HEADS, PAIRS, WIDTH, TOKENS = 12, 4, 2, 6, 5


def config(version: int, **given) -> EagleConfig:
    target, drafted = (D, 11) if version == 1 else (10, 7)
    return EagleConfig(
        version, (3,) if version == 1 else (1, 2, 4), D, target, 14, HEADS, PAIRS, WIDTH, 11, drafted, rope_theta=100.0, **given
    )


def filled(given: EagleConfig) -> EagleHead:
    head = EagleHead(given).double()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=noise, dtype=torch.float64) / math.sqrt(weight.shape[-1]) + (weight.ndim == 1))
    return head


def vector(head: EagleHead, name: str) -> torch.Tensor:
    return head.state_dict()[name]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def speeds(c: EagleConfig) -> list[float]:
    """How far each pair of coordinates turns from one position to the next."""
    rates = [c.rope_theta ** (-2 * i / c.head_dim) for i in range(c.head_dim // 2)]
    scaling = c.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return [rate / scaling["factor"] for rate in rates]
    if kind == "llama3":
        found, old = [], scaling["original_max_position_embeddings"]
        for rate in rates:
            wave = 2 * math.pi / rate
            if wave > old / scaling["low_freq_factor"]:
                found.append(rate / scaling["factor"])
            elif wave < old / scaling["high_freq_factor"]:
                found.append(rate)
            else:
                smooth = (old / wave - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
                found.append((1 - smooth) * rate / scaling["factor"] + smooth * rate)
        return found
    return rates


def turned(x: torch.Tensor, position: int, c: EagleConfig) -> torch.Tensor:
    out, half = x.clone(), c.head_dim // 2
    for i, rate in enumerate(speeds(c)):
        cos, sin = math.cos(position * rate), math.sin(position * rate)
        out[i], out[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
    return out


def fused(head: EagleHead, feature: torch.Tensor) -> torch.Tensor:
    c = head.config
    if c.version == 1:
        return feature
    if c.norm_before_fc:
        feature = norm(feature, vector(head, "input_norm.weight"), c.rms_norm_eps)
    if c.fc_norm:
        parts = [feature[i * 10 : i * 10 + 10] for i in range(3)]
        feature = torch.cat([norm(part, vector(head, f"fc_norm.{i}.weight"), c.rms_norm_eps) for i, part in enumerate(parts)])
    return vector(head, "fc.weight") @ feature + (vector(head, "fc.bias") if c.bias else 0)


def read(head: EagleHead, embedded: torch.Tensor, hidden: torch.Tensor, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the next step and the output head read of each token, one token and one attention head at a time."""
    c = head.config
    residuals, queries, keys, values = [], [], [], []
    for e, g, position in zip(embedded, hidden, positions, strict=True):
        if c.version == 1:
            inputs = residual = vector(head, "fc.weight") @ torch.cat([e, g]) + (vector(head, "fc.bias") if c.bias else 0)
        else:
            normed = norm(g, vector(head, "layer.hidden_norm.weight"), c.rms_norm_eps)
            residual = normed if c.norm_before_residual else g
            inputs = torch.cat([norm(e, vector(head, "layer.input_layernorm.weight"), c.rms_norm_eps), normed])
        residuals.append(residual)
        rows = [(vector(head, f"layer.self_attn.{part}_proj.weight") @ inputs).view(-1, WIDTH) for part in "qkv"]
        queries.append([turned(row, position, c) for row in rows[0]])
        keys.append([turned(row, position, c) for row in rows[1]])
        values.append(list(rows[2]))
    said, final = [], []
    for t in range(len(residuals)):
        found = []
        for one in range(HEADS):
            pair = one // (HEADS // PAIRS)
            scores = [math.exp(float(queries[t][one] @ keys[s][pair]) / math.sqrt(WIDTH)) for s in range(t + 1)]
            found.append(sum(score / sum(scores) * values[s][pair] for s, score in enumerate(scores)))
        after = residuals[t] + vector(head, "layer.self_attn.o_proj.weight") @ torch.cat(found)
        normed = norm(after, vector(head, "layer.post_attention_layernorm.weight"), c.rms_norm_eps)
        gate = vector(head, "layer.mlp.gate_proj.weight") @ normed
        inner = gate / (1 + torch.exp(-gate)) * (vector(head, "layer.mlp.up_proj.weight") @ normed)
        out = after + vector(head, "layer.mlp.down_proj.weight") @ inner
        last = out if c.version == 1 else norm(out, vector(head, "norm.weight"), c.rms_norm_eps)
        said.append(last if c.norm_output else out)
        final.append(last)
    return torch.stack(said), torch.stack(final)


CASES = [(1, {}), (1, {"bias": True}), (1, {"rope_scaling": LLAMA3}), (3, {"rope_scaling": LLAMA3}), (3, {"rope_scaling": LINEAR})]
CASES += [(3, {name: bool(mask >> i & 1) for i, name in enumerate(FLAGS)}) for mask in range(32)]


@pytest.mark.parametrize(
    ("version", "flags"), CASES, ids=lambda case: "-".join(k for k, v in case.items() if v) if isinstance(case, dict) else None
)
def test_a_head_computes_what_is_written_out(version, flags):
    head = filled(config(version, **flags))
    features = torch.randn(TOKENS, 12 if version == 1 else 30, dtype=torch.float64)
    embedded, positions = torch.randn(TOKENS, D, dtype=torch.float64), [0, 1, 2, 9, 17]
    with torch.no_grad():
        hidden = head.fuse(features)
        residual, query, key, value = head.project(embedded[None], hidden[None], torch.tensor([positions]))
        said = head.finish(residual, attend(query, key, value, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]))
        final = head.final(said)[0]
    wanted = torch.stack([fused(head, feature) for feature in features])
    said_wanted, final_wanted = read(head, embedded, wanted, positions)
    torch.testing.assert_close(hidden, wanted, rtol=1e-12, atol=1e-12)
    # Angles are float32, as in every Llama model.
    torch.testing.assert_close(said[0], said_wanted, rtol=0, atol=5e-6)
    torch.testing.assert_close(final, final_wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3], ids=["plain", "linear", "llama3"])
def test_positions_turn_as_in_transformers(scaling):
    c = config(1, rope_scaling=scaling)
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": c.rope_theta}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=24, num_attention_heads=HEADS, head_dim=WIDTH, rope_parameters=rope))
    positions = torch.tensor([[0, 1, 3, 7, 30, 63, 64]])
    cos, sin = theirs(torch.zeros(1, 1), positions)
    head = EagleHead(c)
    x = torch.randn(1, 7, HEADS * WIDTH)
    with torch.no_grad():
        head.fc.weight.copy_(torch.cat([torch.eye(D), torch.zeros(D, D)], 1))
        head.layer.self_attn.q_proj.weight.copy_(torch.randn(HEADS * WIDTH, D))
        _, query, _, _ = head.project(x[..., :D], torch.zeros(1, 7, D), positions)
        plain = head.layer.self_attn.q_proj(x[..., :D]).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    a, b = plain.chunk(2, -1)
    wanted = plain * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
    torch.testing.assert_close(query, wanted, rtol=0, atol=1e-5)
