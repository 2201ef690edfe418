"""The heads of Medusa: each says, from one hidden state of the target, a token further ahead."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ..types import Float
from .draft import DraftHead, Output
from .parts import check_vocabulary

__all__ = ["MedusaConfig", "MedusaHeads"]


@dataclass(frozen=True)
class MedusaConfig:
    """What the heads are made of.

    Args:
        layers: the input boundary of the target's final norm, and that alone.
        heads: how many; the first says the token after the one that the target says.
        blocks: residual blocks of a head.
        draft_vocab_size: of what the heads may draft.
        shared: they use the target's output head, see `specdec.heads.HeadConfig`; else each has its own.
        bias: whether the residual blocks have one.
    """

    layers: tuple[int, ...]
    heads: int
    blocks: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    shared: bool = False
    bias: bool = True

    normed = True

    def __post_init__(self) -> None:
        if len(self.layers) != 1:
            raise ValueError(f"layers: got {self.layers}; the heads read one hidden state, what enters the target's final norm")
        check_vocabulary(self.draft_vocab_size, self.vocab_size)
        if self.heads < 1 or self.blocks < 1:
            raise ValueError(f"heads, blocks: got {self.heads} and {self.blocks}; allowed are numbers of at least 1")

    @property
    def target_hidden_size(self) -> int:
        """The same as the heads'."""
        return self.hidden_size


class MedusaHeads(DraftHead):
    """Head i says token t + 2 + i from what the target's output head reads at token t (Cai et al. 2024, arXiv 2401.10774, section 2.1)."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config.draft_vocab_size)
        self.config = c = config
        self.blocks = nn.ModuleList(nn.Sequential(*(_Block(c.hidden_size, c.bias) for _ in range(c.blocks))) for _ in range(c.heads))
        if not c.shared:
            self.lm_heads = nn.ModuleList(nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False) for _ in range(c.heads))

    def said(self, head: int, hidden: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """What the output head of this head reads, from what the target's reads."""
        return self.blocks[head](hidden)

    def rank(self, head: int, hidden: Float[Tensor, "*rows d"], output: Output) -> Float[Tensor, "*rows Vd"]:
        """Scores of what can be drafted; `output` makes them where the target's output head is shared."""
        said = self.said(head, hidden)
        return output(said) if self.config.shared else self.lm_heads[head](said)


class _Block(nn.Module):
    """The weight is zero at first: a fresh block says what it was told."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        return x + F.silu(self.linear(x))
