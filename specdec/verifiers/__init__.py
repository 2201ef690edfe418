"""Parts that run the target over a tree."""

from .factory import make_verifier
from .sequential import SequentialVerifier
from .tree import TreeVerifier

__all__ = ["SequentialVerifier", "TreeVerifier", "make_verifier"]
