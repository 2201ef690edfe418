"""Parts that guess what the target will say."""

from . import grow
from .eagle import EagleDrafter
from .early_exit import EarlyExitDrafter
from .model import ModelDrafter
from .ngram import NGramDrafter
from .null import NullDrafter

__all__ = ["EagleDrafter", "EarlyExitDrafter", "ModelDrafter", "NGramDrafter", "NullDrafter", "grow"]
