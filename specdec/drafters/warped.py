"""What the user's processors make of the scores of drafted nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ragged import Ragged
from ..types import PAD, ROOT, Bool, DraftTree, Float, TargetFacts, sent
from ..warp import Warper, WarpState

__all__ = ["shaped", "show", "wide"]


def wide(logits: Float[Tensor, "*rows W"], facts: TargetFacts) -> Float[Tensor, "*rows W"]:
    """Where the target is, in the wider of both dtypes, so that the declared laws are as exact as the target's."""
    dtype = torch.float64 if torch.float64 in (facts.dtype, logits.dtype) else torch.float32
    return logits.to(facts.device, dtype)


def shaped(warper: Warper, warp: WarpState, scores: Float[Tensor, "B n V"], tree: DraftTree, last: slice,
           text: Ragged) -> tuple[Float[Tensor, "B P V"], Bool[Tensor, "B P"] | None]:  # fmt: skip
    """The processed scores of the last level of a tree that is being drafted, and where no processor raised, if one did.

    Args:
        warp: where the processors stood before the root.
        scores: after every node of the tree, since a processor that reads ids may have to be shown what lies above; after those of the
            last level if the warper is `free`.
        last: the columns of the last level.
        text: the committed tokens and the root behind them.
    """
    after = warper.fork(warp)
    if warper.free:
        tree = DraftTree(tree.tokens[:, last], tree.parents[:, last])
    found = warper.scores(after, scores, tree, text.but_last(), certain=False)
    if warper.free:
        return found, None
    raised = [[column in row.faults for column in range(last.start, last.stop)] for row in after.each]
    return found[:, last], ~sent(raised, found.device) if any(map(any, raised)) else None


def show(warper: Warper, warp: WarpState, scores: Float[Tensor, "B V"], text: Ragged,
         active: Sequence[bool]) -> tuple[WarpState, Float[Tensor, "B V"], list[bool]]:  # fmt: skip
    """Have the processors of the active rows see the last token of the text: where they stand then, the scores of the next token, and the
    rows in which one raised, where they stand as before."""
    parents = torch.tensor([[ROOT if on else PAD] for on in active], device="cpu")
    after = warper.fork(warp)
    found = warper.scores(after, scores[:, None], DraftTree(text.last()[:, None], parents), text.but_last(), certain=False)[:, 0]
    refused = after.faulty
    count = torch.tensor([on and not no for on, no in zip(active, refused, strict=True)], device="cpu").long()
    warper.commit(after, torch.zeros_like(count)[:, None], count)
    return after, found, refused
