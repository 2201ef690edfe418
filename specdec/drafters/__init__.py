"""Parts that guess what the target will say."""

from . import grow
from .eagle import EagleDrafter
from .early_exit import EarlyExitDrafter
from .medusa import MedusaDrafter
from .model import ModelDrafter
from .mtp import MTPDrafter
from .ngram import NGramDrafter
from .null import NullDrafter
from .pairs import PairDrafter

__all__ = [
    "EagleDrafter", "EarlyExitDrafter", "MTPDrafter", "MedusaDrafter", "ModelDrafter", "NGramDrafter", "NullDrafter", "PairDrafter", "grow",
]  # fmt: skip
