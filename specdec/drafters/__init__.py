"""Parts that guess what the target will say."""

from .ngram import NGramDrafter
from .null import NullDrafter

__all__ = ["NGramDrafter", "NullDrafter"]
