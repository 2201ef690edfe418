"""Parts that guess what the target will say."""

from . import grow
from .early_exit import EarlyExitDrafter
from .model import ModelDrafter
from .ngram import NGramDrafter
from .null import NullDrafter

__all__ = ["EarlyExitDrafter", "ModelDrafter", "NGramDrafter", "NullDrafter", "grow"]
