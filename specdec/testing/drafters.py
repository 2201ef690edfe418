"""Reference drafters for the battery: every way of drawing that an acceptor may meet, over a draft model that is a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import Context, Drafter
from ..models.table import TableModel
from ..ragged import Ragged
from ..rng import Purpose, Source
from ..tree import root_only
from ..types import PAD, ROOT, Bool, Budget, Commit, DraftTree, Draws, Float, Int64, Kind, Round
from .tables import windows

__all__ = ["TableDrafter"]

KINDS = {"p": Kind.POINT, "i": Kind.IID, "w": Kind.WITHOUT_REPLACEMENT, "r": Kind.IID}


@dataclass(frozen=True)
class _Slot:
    """A place in the largest tree that the levels allow."""

    parent: int
    """Slot above, 0 for the root."""
    depth: int
    letter: str
    child: int
    """Place among its siblings."""
    place: int
    """Place in its level."""


class TableDrafter(Drafter):
    """Draws a tree of a fixed shape from a table, level by level.

    Args:
        model: the draft model, of order 1 or more.
        levels: for each depth the children of one node in draw order, a letter each: `p` point (the next most likely token), `i` iid,
            `w` without replacement, `r` one sample from what the level's points leave (so "rp" is top-1 plus one sampled child that is
            tried first: Hu et al. 2025). Capitals draw from `other` instead.
        other: a second draft model, for nodes where two samplers meet.
        merge: draws of one token below one node land on one node, and the children of all of them hang there: iid paths become a trie
            with multiplicities (SpecInfer). Without it every draw has a node of its own.
        uneven: no row drafts deeper than the id of its pending token, so that the rows of a batch differ in shape; below token 0 nothing
            is drafted.
        stop_below: a token less likely than this under the law that it was drawn from stays in the tree, but nothing is drawn below it.
        dtype: of the declared laws. They are the very weights drawn from.
    """

    def __init__(self, model: TableModel, levels: Sequence[str], *, other: TableModel | None = None, merge: bool = False,
                 uneven: bool = False, stop_below: float = 0.0, dtype: torch.dtype = torch.float64) -> None:  # fmt: skip
        wrong = set("".join(levels).lower()) - set(KINDS)
        if wrong or ("".join(levels).lower() != "".join(levels) and other is None):
            raise ValueError(f"levels: got {list(levels)}; letters are {', '.join(KINDS)}, and capitals need the argument other")
        self.models = (model, other)
        self.levels, self.merge, self.uneven, self.stop_below, self.dtype = tuple(levels), merge, uneven, stop_below, dtype
        self.draws = frozenset(KINDS[letter] for letter in "".join(levels).lower())
        self._slots = _layout(levels)

    def begin(self, ctx: Context) -> Ragged:
        return Ragged.empty(ctx.batch)

    def observe(self, state: Ragged, commit: Commit, round: Round | None = None) -> Ragged:
        state.extend(commit.tokens, commit.count)
        return state

    def select(self, state: Ragged, rows: Sequence[int]) -> Ragged:
        return state.select(rows)

    def propose(self, state: Ragged, pending: Int64[Tensor, " B"], budget: Budget, source: Source) -> DraftTree:
        if not self._slots:
            return root_only(pending)
        grown = _Growing(self, state, pending)
        for number, slot in enumerate(self._slots):
            grown.add(number, slot, self._wanted(grown, slot, pending, budget), source)
        return grown.tree(self.draws, len(self.levels))

    def _wanted(self, grown: _Growing, slot: _Slot, pending: Int64[Tensor, " B"], budget: Budget) -> Bool[Tensor, " B"]:
        """Rows that draw this slot: decided by what was drawn above and before it, never by its own token."""
        # merged, the children of a whole level may come to hang on one node
        place = slot.place if self.merge else slot.child
        wanted = grown.open[slot.parent] & (slot.depth <= budget.depth) & (place < budget.width) & (grown.count < budget.nodes)
        return wanted & (slot.depth <= pending) if self.uneven else wanted


def _layout(levels: Sequence[str]) -> list[_Slot]:
    slots, above = [], [0]
    for depth, letters in enumerate(levels, 1):
        here = []
        for parent in above:
            for child, letter in enumerate(letters):
                slots.append(_Slot(parent, depth, letter, child, len(here)))
                here.append(len(slots))
        above = here
    return slots


class _Growing:
    """A tree on its way; slot s + 1 of the layout is column s + 1 of every list."""

    def __init__(self, drafter: TableDrafter, history: Ragged, pending: Int64[Tensor, " B"]) -> None:
        self.drafter, self.history = drafter, history
        batch = len(pending)
        root = torch.zeros(batch, dtype=torch.int64)
        self.tokens, self.parents = [pending], [torch.full_like(root, ROOT)]
        self.node = [root]
        """The node that each slot's draw landed on, -1 where nothing was drawn."""
        self.open = [torch.ones(batch, dtype=torch.bool)]
        """Whether something may be drawn below a slot."""
        self.count = root
        self.kind: list[int] = []
        self.law: list[int] = []
        self.laws: list[Tensor] = []
        self._index: dict[tuple[int, str], int] = {}

    def add(self, number: int, slot: _Slot, wanted: Bool[Tensor, " B"], source: Source) -> None:
        letter = slot.letter.lower()
        law = self._law(slot)
        elder = [number + 1 - slot.child + i for i in range(slot.child)]
        weights = law
        if letter == "w":
            for s in (s for s in elder if self.drafter._slots[s - 1].letter == slot.letter):
                drawn = torch.where(self.node[s] >= 0, self.tokens[s], -1)
                weights = weights * (drawn[:, None] != torch.arange(law.shape[1]))
        wanted = wanted & (weights.sum(-1) > 0)
        if letter == "p":
            rank = sum(self.drafter._slots[s - 1].letter == slot.letter for s in elder)
            token = law.sort(dim=-1, descending=True, stable=True).indices[:, rank]
        else:
            token = source.categorical(weights, Purpose.DRAFT, number, wanted)
        below = self.node[slot.parent]
        node = torch.where(wanted, number + 1, -1)
        if self.drafter.merge:
            for s in reversed(range(1, number + 1)):
                same = (self.node[s] == s) & (self.parents[s] == below) & (self.tokens[s] == token)
                node = torch.where(wanted & same, s, node)
        self.tokens.append(token)
        self.parents.append(torch.where(node == number + 1, below, PAD))
        self.node.append(node)
        self.open.append(wanted & (law.gather(1, token[:, None])[:, 0] >= self.drafter.stop_below))
        self.count = self.count + wanted
        self.kind.append(KINDS[letter])
        self.law.append(self._index[slot.parent, slot.letter] if letter != "p" else -1)

    def _law(self, slot: _Slot) -> Float[Tensor, "B V"]:
        """The law below the slot's parent, made once for all its children of one letter."""
        key = slot.parent, slot.letter
        if key not in self._index:
            model = self.drafter.models[slot.letter.isupper()]
            tokens, parents, node = torch.stack(self.tokens, 1), torch.stack(self.parents, 1), self.node[slot.parent].clamp_min(0)
            context = windows(self.history, tokens, parents, model.order)[torch.arange(len(node)), node]
            law = model.law(context)
            if slot.letter in "rR":
                points = self.drafter.levels[slot.depth - 1].count("P" if slot.letter == "R" else "p")
                law = law.scatter(1, law.sort(dim=-1, descending=True, stable=True).indices[:, :points], 0.0)
                law = law / torch.where(law.sum(-1, keepdim=True) > 0, law.sum(-1, keepdim=True), 1)
            self._index[key] = len(self.laws)
            self.laws.append(law.to(self.drafter.dtype))
        return self.laws[self._index[key]]

    def tree(self, kinds: frozenset[Kind], height: int) -> DraftTree:
        node = torch.stack(self.node[1:], 1)
        draws = Draws(node, torch.tensor(self.kind).expand_as(node), torch.tensor(self.law).expand_as(node), kinds)
        return DraftTree(torch.stack(self.tokens, 1), torch.stack(self.parents, 1), draws, torch.stack(self.laws, 1), height)
