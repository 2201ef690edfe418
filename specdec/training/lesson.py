"""What a head learns from: tokens, the target's hidden states at them, and what the target's own head makes of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ..cache import CausalTarget, Lent, read
from ..heads.eagle import EagleConfig, EagleHead
from ..types import Bool, Float, Int64, TargetFacts
from .objective import distilled, unrolled

__all__ = ["HeadLesson", "Lesson", "Reader", "Seen", "fresh_head", "frequent"]


@dataclass(frozen=True)
class Seen:
    """Some dialogues, read by the target."""

    tokens: Int64[Tensor, "B T"]
    own: Bool[Tensor, "B T"]
    embedded: Float[Tensor, "B T D"]
    features: Float[Tensor, "B T F"]
    final: Float[Tensor, "B T D"]
    """What the target's output head reads."""

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(part.numel() * part.element_size() for part in vars(self).values())


class Reader:
    """The target, as a teacher. What it read is kept while there is room, since a second pass needs it again.

    Args:
        layers: input-boundary ids of the hidden states that the head reads.
        room: bytes for what is kept.
    """

    def __init__(self, target: CausalTarget, lent: Lent, layers: tuple[int, ...], room: int = 0) -> None:
        self._target, self._lent, self._layers, self._room = target, lent, layers, room
        self._kept: dict[tuple[int, ...], Seen] = {}

    def __call__(self, tokens: Int64[Tensor, "B T"], own: Bool[Tensor, "B T"], name: tuple[int, ...] = ()) -> Seen:
        """Read these dialogues; `name` is theirs, by which they are known again."""
        if name in self._kept:
            return self._kept[name]
        facts, (batch, width) = self._target.facts, tokens.shape
        last = cast(int, facts.num_layers)
        tokens = tokens.to(facts.device)
        counts = torch.full((batch,), width, device="cpu")
        with torch.no_grad():
            _, found = read(self._target, self._target.new_cache(batch), tokens, counts, logits=False, layers=(*self._layers, last))
            features, final = cast(Tensor, found).split(
                [len(self._layers) * cast(int, facts.hidden_size), cast(int, facts.hidden_size)], -1
            )
            final = self._lent.norm(final)
            seen = Seen(tokens, own.to(facts.device), self._lent.embed(tokens), features.contiguous(), final)
        if name and seen.size <= self._room:
            self._room -= seen.size
            self._kept[name] = seen
        return seen

    def best(self, seen: Seen) -> Int64[Tensor, "B T"]:
        """The target's most likely token after each position."""
        with torch.no_grad():
            return torch.cat([self._lent.head(part).argmax(-1) for part in seen.final.split(64, 1)], 1)


class Lesson(nn.Module, ABC):
    """What is learned from a batch, as a module, so that wrappers which spread modules over devices see what they expect.

    Args:
        learner: whose parameters are fitted.
        steps: how many depths of a draft are assessed.
        weight: how much one position counts, all its steps together.
    """

    def __init__(self, learner: nn.Module, steps: int, weight: float) -> None:
        super().__init__()
        self.learner, self.steps, self.weight = learner, steps, weight

    @abstractmethod
    def forward(self, seen: Seen) -> Float[Tensor, ""]:
        """The loss, summed over the target's own words."""

    @abstractmethod
    def agreement(self, seen: Seen, best: Int64[Tensor, "B T"]) -> list[tuple[int, int]]:
        """For each step how often the learner's most likely token was the target's, which `best` tells of each position, and how often it
        was asked: at the target's own words, all steps before having agreed."""


class HeadLesson(Lesson):
    """An EAGLE-3 head learns the target's law at every depth of a draft.

    Args:
        head: of version 3.
        rows: of the target's output head, those of the draft vocabulary.
        steps: how far a draft is unrolled.
        fading: the weight of a step against the one before.
    """

    rows: Tensor
    reach: Tensor

    def __init__(self, head: EagleHead, rows: Float[Tensor, "Vd D"], steps: int, fading: float = 0.8) -> None:
        super().__init__(head, steps, sum(fading**step for step in range(steps)))
        self.head, self.fading = head, fading
        reach = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=head.offsets.device)
        reach[head.ids] = True
        self.register_buffer("rows", rows.detach().clone(), persistent=False)
        self.register_buffer("reach", reach, persistent=False)

    def forward(self, seen: Seen) -> Float[Tensor, ""]:
        """Words that the head can't draft are left out."""
        loss, wanted = seen.final.new_zeros((), dtype=torch.float32), seen.own & self.reach[seen.tokens]
        for step, hidden in enumerate(unrolled(self.head, seen.embedded, seen.features, self.steps)):
            weight = self.fading**step * wanted[:, 2 + step :].flatten()
            truth = seen.final[:, 1 + step : -1].flatten(0, 1)
            loss = loss + distilled(hidden.flatten(0, 1), self.head.lm_head.weight, truth, self.rows, weight.float())
        return loss

    def agreement(self, seen: Seen, best: Int64[Tensor, "B T"]) -> list[tuple[int, int]]:
        found, asked = [], seen.own[:, 2:]
        with torch.no_grad():
            for step, hidden in enumerate(unrolled(self.head, seen.embedded, seen.features, self.steps)):
                width = hidden.shape[1]
                guess = torch.cat([self.head.ids[self.head.lm_head(part).argmax(-1)] for part in hidden.split(64, 1)], 1)
                agreed = asked[:, :width] & (guess == best[:, 1 + step : 1 + step + width])
                found.append((int(agreed.sum()), int(asked[:, :width].sum())))
                asked = agreed
        return found


def fresh_head(lent: Lent, facts: TargetFacts, layers: tuple[int, ...], ids: Int64[Tensor, " Vd"]) -> EagleHead:
    """An EAGLE-3 head that begins as the target's last layer and output head, in float32.

    The layer reads the highest of the features as if it were its own input; what it will make of the token beside it is still open (zero).
    It gets a key head for each query head, for the token reaches the rest of the layer through keys and values alone.

    Args:
        ids: the target's ids of the draft vocabulary, rising.
    """
    told, width = lent.config, cast(int, facts.hidden_size)
    heads = told["num_attention_heads"]
    size = told.get("head_dim") or width // heads
    rope = told.get("rope_parameters") or {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} if rope.get("rope_type") in ("linear", "llama3") else None
    config = EagleConfig(
        version=3, layers=layers, hidden_size=width, target_hidden_size=width, intermediate_size=told["intermediate_size"], num_heads=heads,
        num_kv_heads=heads, head_dim=size, vocab_size=facts.vocab_size, draft_vocab_size=len(ids), rms_norm_eps=told["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", 10000.0), rope_scaling=scaling, max_positions=told.get("max_position_embeddings", 2048),
    )  # fmt: skip
    head = EagleHead(config)
    every = torch.eye(width, device=lent.layer["self_attn.q_proj.weight"].device)
    rows = cast(nn.Linear, lent.head).weight[ids]
    own = dict(head.named_parameters())
    with torch.no_grad():
        for name, weight in lent.layer.items():
            kind = name.split(".")[-2]
            if kind in ("k_proj", "v_proj") and weight.ndim == 2:
                groups = heads // (weight.shape[0] // size)
                weight = weight.unflatten(0, (-1, size)).repeat_interleave(groups, 0).flatten(0, 1)
            if kind in ("q_proj", "k_proj", "v_proj") and weight.ndim == 2:
                own[f"layer.{name}"].zero_()[:, width:] = weight
            elif name == "input_layernorm.weight":
                own["layer.hidden_norm.weight"].copy_(weight)
            elif f"layer.{name}" in own:  # biases and norms that the head has no place for are left out: it only begins here
                own[f"layer.{name}"].copy_(weight)
        head.fc.weight.zero_()[:, -width:] = every
        head.norm.weight.copy_(cast(Tensor, cast(nn.Module, lent.norm).weight))
        head.lm_head.weight.copy_(rows)
        head.offsets.copy_(ids - torch.arange(len(ids)))
    return head


def frequent(tokens: Iterable[Int64[Tensor, " n"]], vocab_size: int, size: int) -> Int64[Tensor, " Vd"]:
    """The `size` most frequent of these tokens, rising; of equals the lower ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for part in tokens:
        counts += torch.bincount(part, minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
