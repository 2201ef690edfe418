"""Heads by the names that commands give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .eagle import EagleDrafter
from .grow import Shape
from .heads import HeadDrafter
from .medusa import MedusaDrafter
from .mtp import MTPDrafter

__all__ = ["HEADS", "head_drafter"]

HEADS: Mapping[str, tuple[Any, str]] = {
    "eagle3": (EagleDrafter, "smollm2-135m-eagle3"),
    "medusa": (MedusaDrafter, "smollm2-135m-medusa"),
    "mtp": (MTPDrafter, "smollm2-135m-mtp"),
}
"""For each kind its drafter, and the head that comes with this package."""


def head_drafter(kind: str, model: Any, head: str | None = None, grow: Shape | None = None) -> HeadDrafter:
    """A drafter for this target with a head of this kind.

    Args:
        head: what `from_pretrained` takes; the packaged one if left out, which is for the packaged model.
    """
    make, packaged = HEADS[kind]
    return make.from_pretrained(head or packaged, model, grow=grow)
