"""The records that pass between the parts of a round.

A record is made once, is frozen, and is read by everything downstream; nothing flows back. Letters used for shapes, here and
everywhere else: B rows of the batch, N nodes of a tree, M draws, K laws, V target vocabulary, F feature width, D path length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
else:
    try:
        from jaxtyping import Bool, Float, Int64
    except ImportError:  # shapes are checked in the tests only; users need no extra package

        class Int64:
            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int64

__all__ = [
    "Acceptance", "Bool", "Budget", "Commit", "DraftTree", "Draws", "Features", "Float", "Int64", "Kind", "NO_FEATURES",
    "PAD", "ROOT", "Round", "Scores", "TargetFacts", "Verification", "probabilities", "sent",
]  # fmt: skip

ROOT = -1
"""Parent of node 0."""
PAD = -2
"""Parent of a slot that holds no node."""


def sent(data: Tensor | Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """The data on a device, whose queue is not waited for; on the CPU, where it may be read at once, when it has arrived."""
    tensor = data if isinstance(data, Tensor) else torch.tensor(data, dtype=dtype, device="cpu")
    return tensor.to(device, non_blocking=torch.device(device).type != "cpu")


def probabilities(scores: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """The law of these scores, which sums to one but for the last place: a softmax over a large vocabulary in float32 does so to 1e-5
    only, and what is left of such a law after a rejection is off by as much."""
    law = scores.softmax(-1)
    return law / law.sum(-1, keepdim=True, dtype=torch.float64).to(law.dtype)


class Kind(IntEnum):
    """How the token of a draw came about, which decides how an acceptor may treat it without bias."""

    POINT = 0
    """Chosen, not drawn: an argmax, a lookup, a node kept by a ranking. Exact under the rule for point masses, always."""
    IID = 1
    """Drawn from its law, whatever its siblings are."""
    WITHOUT_REPLACEMENT = 2
    """Drawn from its law minus the earlier siblings that were drawn without replacement from the same law, renormalised."""


@dataclass(frozen=True)
class Draws:
    """The draws behind a tree, in the order in which they were drawn; -1 in `node` marks padding.

    Several draws may land on one node (repeated samples, merged trees); a sampled draw is never dropped, re-ordered or
    re-weighted because of its own value. A node on which no draw landed is a *probe*: it is verified but never accepted.
    """

    node: Int64[Tensor, "B M"]
    kind: Int64[Tensor, "B M"]
    law: Int64[Tensor, "B M"]
    """Index into `DraftTree.laws`; -1 for a point draw."""
    kinds: frozenset[Kind] = cast("frozenset[Kind]", None)
    """The kinds that occur. Left out it is read from `kind`, which costs a read from the device."""

    def __post_init__(self) -> None:
        if self.kinds is None:  # filled in here, so that no reader meets a None
            real = self.kind[self.node >= 0]
            known = [k for k in real.unique().tolist() if k in tuple(Kind)]  # `specdec.tree.check` refuses others
            object.__setattr__(self, "kinds", frozenset(map(Kind, known)))


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens as a forest of B trees. Depth, masks, siblings and paths are derived from `parents` by `specdec.tree`.

    Node 0 is the *pending* token: the last token of the output, whose keys and values are not computed yet. `parents` is
    topological (`parents[b, i] < i`), `ROOT` at node 0 and `PAD` where a row has fewer nodes than N.
    Without `draws`, every node but the root is one point draw. Build a new tree rather than `replace` nodes: draws and height were
    filled in for the old ones.
    """

    tokens: Int64[Tensor, "B N"]
    parents: Int64[Tensor, "B N"]
    draws: Draws = cast(Draws, None)
    laws: Float[Tensor, "B K V"] | None = None
    """The probabilities that were really drawn from: after the drafter's own warping, in the precision that was used."""
    height: int = cast(int, None)
    """An upper bound on the depth of any node that the host knows; N - 1 if left out."""

    def __post_init__(self) -> None:
        nodes = self.tokens.shape[1]
        if self.height is None:
            object.__setattr__(self, "height", nodes - 1)
        if self.draws is None:
            node = torch.arange(1, nodes, device=self.parents.device).expand(len(self.parents), -1)
            node = torch.where(self.parents[:, 1:] >= 0, node, -1)
            kinds = frozenset({Kind.POINT}) if nodes > 1 else frozenset()
            draws = Draws(node, torch.full_like(node, Kind.POINT), torch.full_like(node, -1), kinds)
            object.__setattr__(self, "draws", draws)

    def to(self, device: torch.device | str) -> DraftTree:
        """The same tree on another device; itself if it is there already."""
        if self.tokens.device == torch.device(device):
            return self
        draws, laws = self.draws, None if self.laws is None else sent(self.laws, device)
        moved = replace(draws, node=sent(draws.node, device), kind=sent(draws.kind, device), law=sent(draws.law, device))
        return replace(self, tokens=sent(self.tokens, device), parents=sent(self.parents, device), draws=moved, laws=laws)


@dataclass(frozen=True)
class Scores:
    """What one target pass says about a tree, before any logits processor."""

    logits: Float[Tensor, "B N V"]
    """Row i: after node i."""
    features: Float[Tensor, "B N F"] | None = None

    @property
    def logp(self) -> Float[Tensor, "B N V"]:
        """The law that no processor changes, as log-probabilities: float32, float64 where the target is."""
        logits = self.logits
        return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).log_softmax(-1)


@dataclass(frozen=True, init=False)
class Verification:
    """The target's law at every node of a tree, as the user's options shape it; given by its log-probabilities or by scores."""

    scores: Float[Tensor, "B N V"]
    """Row i: the processed logits after node i; float32, float64 where the target is."""
    best: Int64[Tensor, "B N"] | None
    """Argmax of the processed scores, ties to the lowest id; given when decoding greedily. Normalising rounds, and can make equals of
    two scores that differ in the last place, so this is not always the argmax of `logp`."""
    features: Float[Tensor, "B N F"] | None
    logits: Float[Tensor, "B N V"] | None
    """As the target gave them, before any processor."""

    def __init__(self, logp: Float[Tensor, "B N V"] | None = None, best: Int64[Tensor, "B N"] | None = None,
                 features: Float[Tensor, "B N F"] | None = None, *, scores: Float[Tensor, "B N V"] | None = None,
                 logits: Float[Tensor, "B N V"] | None = None) -> None:  # fmt: skip
        if (logp is None) == (scores is None):
            raise ValueError("logp, scores: give one of them")
        values = {"scores": logp if scores is None else scores, "best": best, "features": features, "logits": logits}
        vars(self).update(values if logp is None else {**values, "logp": logp})

    @cached_property
    def logp(self) -> Float[Tensor, "B N V"]:
        """Row i: log-probabilities of the target after node i. Normalised when first asked for: greedy decoding never asks."""
        return self.scores.log_softmax(-1)

    def law(self, node: Int64[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """The target's probabilities after one node of each row, see `probabilities`."""
        return probabilities(self.scores[torch.arange(len(node), device=node.device), node])


@dataclass(frozen=True)
class Acceptance:
    """What an acceptor decided."""

    path: Int64[Tensor, "B D"]
    """Accepted nodes from the root down, -1 behind them."""
    count: Int64[Tensor, " B"]
    """Accepted nodes, the root among them: at least 1."""
    next_token: Int64[Tensor, " B"]
    """The correction or bonus; it is the next pending token."""


@dataclass(frozen=True)
class Commit:
    """What became permanent. The prompt, less its last token, arrives as commits too, in chunks."""

    tokens: Int64[Tensor, "B D"]
    count: Int64[Tensor, " B"]
    """Real tokens in each row; on the CPU always, since the host decides it. 0 is legal."""
    features: Float[Tensor, "B D F"] | None = None


@dataclass(frozen=True)
class Round:
    """One round after the cut. Row b of every field belongs to row `rows[b]` of the call."""

    rows: tuple[int, ...]
    tree: DraftTree
    """What was verified, on the CPU; its laws stay where they were drawn."""
    verification: Verification
    """Handed to a drafter: all nodes. Handed to the user: row j is the law of emitted token j, unless all were asked for."""
    acceptance: Acceptance
    commit: Commit
    emitted: tuple[tuple[int, ...], ...]
    """At least one token, but nothing for a row that has ended and is kept for a session."""
    logprobs: tuple[tuple[float, ...], ...]
    accepted: tuple[int, ...]
    """How many of the emitted tokens were drafted."""
    attempted: tuple[int, ...]
    """The depth to which drafted tokens were up for acceptance: one more than were accepted, unless the tree or the output ended there."""
    finish_reason: tuple[str | None, ...]
    """`None` while the row goes on, else "eos", "stop", "criteria", "length" or "context"."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by phase, see `specdec.stats.PHASES`."""
    prefilled: int = 0
    """Tokens of all rows that the target read before this round without scoring them."""
    lossless: bool = True
    """Whether the rule that accepted is."""

    @property
    def finished(self) -> tuple[bool, ...]:
        return tuple(reason is not None for reason in self.finish_reason)


@dataclass(frozen=True)
class Budget:
    """How much a drafter may draft, per row, the pending token not counted. Tensors on the CPU; 0 nodes is legal."""

    nodes: Int64[Tensor, " B"]
    depth: Int64[Tensor, " B"]
    width: Int64[Tensor, " B"]
    """Children of one node."""

    @classmethod
    def of(cls, nodes: int | Sequence[int], depth: int | Sequence[int] | None = None,
           width: int | Sequence[int] | None = None, batch: int = 1) -> Budget:  # fmt: skip
        """The budget with these numbers, one for all rows or one each; `depth` and `width` are as large as `nodes` if left out."""
        nodes = [nodes] * batch if isinstance(nodes, int) else list(nodes)
        rows = [nodes if x is None else [x] * len(nodes) if isinstance(x, int) else list(x) for x in (nodes, depth, width)]
        if any(x < 0 for row in rows for x in row) or len(set(map(len, rows))) > 1:
            raise ValueError(f"nodes, depth and width take one number of at least 0 per row, got {rows}")
        return cls(*(torch.tensor(row, dtype=torch.int64, device="cpu") for row in rows))

    @property
    def chain(self) -> Int64[Tensor, " B"]:
        """How long a chain may be."""
        return torch.where(self.width > 0, torch.minimum(self.nodes, self.depth), 0)

    def clamp(self, room: Int64[Tensor, " B"]) -> Budget:
        """The same budget with no row deeper than `room`; a row with neither depth nor width has no nodes."""
        depth = torch.minimum(self.depth, room).clamp_min(0)
        nodes = torch.where((depth > 0) & (self.width > 0), self.nodes, 0)
        return replace(self, nodes=nodes, depth=torch.minimum(depth, nodes))


@dataclass(frozen=True)
class Features:
    """Which hidden states of the target a drafter reads: layers by the id of their *input* boundary (0 = embeddings, the number
    of layers = what enters the final norm), concatenated in this order."""

    layers: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.layers)


NO_FEATURES = Features()


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter may know of a target without touching it."""

    vocab_size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    max_positions: int | None = None
    """Longest sequence the target can read, in tokens; `None` if it has no limit."""
    hidden_size: int | None = None
    num_layers: int | None = None
