"""Parts that run the target over a tree."""

from .factory import make_verifier
from .sequential import SequentialVerifier
from .tree import CausalTarget, TreeVerifier

__all__ = ["CausalTarget", "SequentialVerifier", "TreeVerifier", "make_verifier"]
