"""What a head learns from: tokens, the target's hidden states at them, and what the target's own head makes of these."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache import CausalTarget, Lent, read
from ..heads import DraftHead
from ..types import Bool, Float, Int64
from .objective import distilled, unrolled

__all__ = ["HeadLesson", "Lesson", "MedusaLesson", "PairLesson", "Reader", "Seen", "frequent"]


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
        self._kept: dict[Hashable, Seen] = {}

    def __call__(self, tokens: Int64[Tensor, "B T"], own: Bool[Tensor, "B T"], names: Sequence[Hashable] = ()) -> Seen:
        """Read these dialogues; `names` are theirs, by which they are known again."""
        if names and all(name in self._kept for name in names):
            rows = [vars(self._kept[name]) for name in names]
            return Seen(**{part: torch.cat([row[part] for row in rows]) for part in rows[0]})
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
        for number, name in enumerate(names):
            if name not in self._kept and seen.size // batch <= self._room:
                self._room -= seen.size // batch
                self._kept[name] = Seen(**{part: value[number : number + 1].clone() for part, value in vars(seen).items()})
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

    learner: Any

    def __init__(self, learner: nn.Module, steps: int, weight: float) -> None:
        super().__init__()
        self.learner, self.steps, self.weight = learner, steps, weight

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What has to be the same for a run that is gone on with, as JSON has it: what the learner is, and who teaches it."""

    @abstractmethod
    def forward(self, seen: Seen) -> Float[Tensor, ""]:
        """The loss, summed over the target's own words."""

    @abstractmethod
    def agreement(self, seen: Seen, best: Int64[Tensor, "B T"]) -> list[tuple[int, int]]:
        """For each step how often the learner's most likely token was the target's, which `best` tells of each position, and how often it
        was asked: at the target's own words, all steps before having agreed."""


class HeadLesson(Lesson):
    """A head learns the target's law at every depth of a draft.

    Args:
        head: whose config is a dataclass.
        rows: of the target's output head those of these tokens, see `specdec.cache.output_rows`.
        steps: how far a draft is looked at.
        fading: the weight of a step against the one before.
    """

    rows: Tensor
    reach: Tensor

    def __init__(self, head: DraftHead, rows: Float[Tensor, "Vd D"], steps: int, fading: float = 0.8) -> None:
        super().__init__(head, steps, sum(fading**step for step in range(steps)))
        self.fading = fading
        reach = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=head.offsets.device)
        reach[head.ids] = True
        self.register_buffer("rows", rows.detach().clone(), persistent=False)
        self.register_buffer("reach", reach, persistent=False)

    @abstractmethod
    def said(self, seen: Seen) -> list[Float[Tensor, "B t d"]]:
        """What the output head reads at each step, at all positions at once: for step i `[B, T - 2 - i, d]`, of which row t speaks of token
        t + 2 + i."""

    @abstractmethod
    def output(self, step: int) -> Float[Tensor, "Vd d"]:
        """The output head of a step."""

    def about(self) -> dict[str, Any]:
        return {
            "head": asdict(self.learner.config), "ids": fingerprint(self.learner.ids), "teacher": fingerprint(self.rows),
            "steps": self.steps, "fading": self.fading,
        }  # fmt: skip

    def forward(self, seen: Seen) -> Float[Tensor, ""]:
        """Words that the head can't draft are left out."""
        loss, wanted = seen.final.new_zeros((), dtype=torch.float32), seen.own & self.reach[seen.tokens]
        for step, hidden in enumerate(self.said(seen)):
            weight = self.fading**step * wanted[:, 2 + step :].flatten()
            truth = seen.final[:, 1 + step : -1].flatten(0, 1)
            loss = loss + distilled(hidden.flatten(0, 1), self.output(step), truth, self.rows, weight.float())
        return loss

    def agreement(self, seen: Seen, best: Int64[Tensor, "B T"]) -> list[tuple[int, int]]:
        found, asked, ids = [], seen.own[:, 2:], self.learner.ids
        with torch.no_grad():
            for step, hidden in enumerate(self.said(seen)):
                width, output = hidden.shape[1], self.output(step)
                guess = torch.cat([ids[F.linear(part.to(output), output).argmax(-1)] for part in hidden.split(64, 1)], 1)
                asked = asked[:, :width] & seen.own[:, 2 + step :]
                agreed = asked & (guess == best[:, 1 + step : 1 + step + width])
                found.append((int(agreed.sum()), int(asked.sum())))
                asked = agreed
        return found


class PairLesson(HeadLesson):
    """For EAGLE-3 and multi-token prediction: at each step of a draft the head reads what it said itself."""

    def said(self, seen: Seen) -> list[Float[Tensor, "B t d"]]:
        features = seen.final if self.learner.config.normed else seen.features
        return unrolled(self.learner, seen.embedded, features, self.steps)

    def output(self, step: int) -> Float[Tensor, "Vd d"]:
        return self.rows if self.learner.config.shared else self.learner.lm_head.weight


class MedusaLesson(HeadLesson):
    """For Medusa: every step is a head of its own, and all of them read the target."""

    def said(self, seen: Seen) -> list[Float[Tensor, "B t d"]]:
        return [self.learner.said(step, seen.final[:, : -2 - step]) for step in range(self.steps)]

    def output(self, step: int) -> Float[Tensor, "Vd d"]:
        return self.rows if self.learner.config.shared else self.learner.lm_heads[step].weight


def fingerprint(values: Tensor) -> int:
    """Of some of them; whether two are the same."""
    few = values.detach().flatten()[:: max(1, values.numel() // 4096)].cpu()
    return zlib.crc32(few.double().numpy().tobytes())


def frequent(tokens: Iterable[Int64[Tensor, " n"]], vocab_size: int, size: int) -> Int64[Tensor, " Vd"]:
    """The `size` most frequent of these tokens, rising; of equals the lower ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for part in tokens:
        counts += torch.bincount(part, minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
