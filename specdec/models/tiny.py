"""A decoder-only transformer small enough for tests, in float64 throughout: what should be equal is equal to ten digits."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..cache import FullCache, Lent
from ..types import Bool, Float, Int64, TargetFacts

__all__ = ["TinyTarget"]


class TinyTarget:
    """A Llama-like target with random weights: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied head.

    It serves as a `CausalTarget` and, called on whole rows, as the callable of a `SequentialVerifier`: the same law, computed without a
    cache. Its parameters are found in `net`.

    Args:
        num_heads, num_kv_heads: query heads, and the fewer key heads that they share.
        max_positions: longest row that it reads.
        sharpness: standard deviation of the logits, roughly. Too small a value makes argmax a matter of rounding.
        seed: of the weights; the global random state is left alone.
    """

    def __init__(self, vocab_size: int = 16, *, hidden_size: int = 32, num_layers: int = 2, num_heads: int = 4, num_kv_heads: int = 2,
                 max_positions: int = 512, sharpness: float = 3.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:  # fmt: skip
        if hidden_size % (2 * num_heads) or num_heads % num_kv_heads:
            raise ValueError(
                f"hidden_size ({hidden_size}) must be an even multiple of num_heads ({num_heads}), "
                f"and num_heads a multiple of num_kv_heads ({num_kv_heads})"
            )
        self.net = _Net(vocab_size, hidden_size, num_layers, num_heads, num_kv_heads)
        self.net.init(seed, sharpness)
        self.net.to(dtype).requires_grad_(False)
        self._limit, self._depth = max_positions, num_layers
        self._facts = TargetFacts(vocab_size, dtype, torch.device("cpu"), max_positions, hidden_size, num_layers)

    @property
    def facts(self) -> TargetFacts:
        return self._facts

    def new_cache(self, batch: int) -> FullCache:
        return FullCache(batch)

    def first(self, layers: int) -> TinyTarget:
        """See `Shortened`."""
        if not 1 <= layers <= self._depth:
            raise ValueError(f"layers: got {layers}; allowed are 1 to {self._depth}")
        shortened = copy.copy(self)
        shortened._depth, shortened._facts = layers, replace(self._facts, num_layers=layers)
        return shortened

    def lend(self) -> Lent:
        """See `Lender`."""
        net, layer = self.net, self.net.layers[self._depth - 1]
        names = {
            "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "out": "self_attn.o_proj",
            "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
        }  # fmt: skip
        weights = {f"{new}.weight": layer.get_parameter(f"{old}.weight") for old, new in names.items()}
        width = net.embed.embedding_dim
        config = {
            "vocab_size": self._facts.vocab_size, "hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.kv_heads, "head_dim": layer.size, "rms_norm_eps": torch.finfo(net.norm.weight.dtype).eps,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "max_position_embeddings": self._limit,
        }  # fmt: skip
        return Lent(net.embed, net.norm, net.head, weights, config)

    def forward(self, tokens: Int64[Tensor, "B T"], positions: Int64[Tensor, "B T"], mask: Bool[Tensor, "B 1 T slots"] | None,
                cache: FullCache, *, logits: bool, layers: tuple[int, ...] = ()) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `CausalTarget`."""
        if int(positions.max()) >= self._limit:
            raise ValueError(f"positions: {int(positions.max())} lies beyond the last of this model, {self._limit - 1}")
        if not all(0 <= layer <= self._depth for layer in layers):
            raise ValueError(f"layers: got {layers}; this model has the input boundaries 0 to {self._depth}")
        if mask is None:
            nodes, start = tokens.shape[1], cache.start
            mask = torch.ones(nodes, start + nodes, dtype=torch.bool).tril(start)
        with torch.no_grad():
            states = self.net.hidden(tokens, positions, mask, cache, self._depth)
            features = torch.cat([states[layer] for layer in layers], -1) if layers else None
            return self.net.logits(states[-1]) if logits else None, features

    def __call__(self, ids: Int64[Tensor, "R L"]) -> Float[Tensor, "R V"]:
        """Logits after the last token of each row, by dense causal attention."""
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        with torch.no_grad():
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            return self.net.logits(self.net.hidden(ids, positions, mask, None, self._depth)[-1][:, -1])


class _Net(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(
            vocab_size, hidden_size, device="meta", dtype=torch.float32
        )  # meta: drawing weights here would move the global random state
        self.layers = nn.ModuleList(_Layer(hidden_size, num_heads, num_kv_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden_size, device="meta", dtype=torch.float32)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False, device="meta", dtype=torch.float32)

    def init(self, seed: int, sharpness: float) -> None:
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                scale = sharpness if name == "head.weight" else 1.0
                nn.init.normal_(parameter, std=1.0 if name == "embed.weight" else scale * parameter.shape[1] ** -0.5, generator=generator)

    def hidden(self, tokens: Int64[Tensor, "B T"], positions: Int64[Tensor, "B T"], mask: Tensor, cache: FullCache | None,
               depth: int | None = None) -> list[Tensor]:  # fmt: skip
        """The input of each of the first `depth` layers, and at last what they put out, which enters the final norm."""
        states = [self.embed(tokens)]
        for index, layer in enumerate(self.layers[:depth]):
            states.append(layer(states[-1], positions, mask, cache, index))
        return states

    def logits(self, state: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        return self.head(self.norm(state))


class _Layer(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = num_heads, num_kv_heads, hidden_size // num_heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.float32)

        self.norm1, self.norm2 = (
            nn.RMSNorm(hidden_size, device="meta", dtype=torch.float32),
            nn.RMSNorm(hidden_size, device="meta", dtype=torch.float32),
        )
        self.query, self.out = linear(hidden_size, hidden_size), linear(hidden_size, hidden_size)
        self.key, self.value = linear(hidden_size, num_kv_heads * self.size), linear(hidden_size, num_kv_heads * self.size)
        self.gate, self.up = linear(hidden_size, 2 * hidden_size), linear(hidden_size, 2 * hidden_size)
        self.down = linear(2 * hidden_size, hidden_size)

    def forward(self, x: Float[Tensor, "B T H"], positions: Int64[Tensor, "B T"], mask: Bool[Tensor, "*rows T slots"],
                cache: FullCache | None, index: int) -> Float[Tensor, "B T H"]:  # fmt: skip
        h = self.norm1(x)
        q, k, v = (y(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for y in (self.query, self.key, self.value))
        q, k = _rotate(q, positions), _rotate(k, positions)
        if cache is not None:
            k, v = cache.write(index, k, v)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        scores = (q @ k.mT * self.size**-0.5).masked_fill(~mask, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def _rotate(x: Float[Tensor, "B heads T D"], positions: Int64[Tensor, "B T"]) -> Float[Tensor, "B heads T D"]:
    """Rotary positions (Su et al. 2021, eq. 34), halves rotated against each other as in Llama."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = (positions[..., None] * frequency)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
