"""Keys and values that can be dropped token by token."""

from .full import FullCache
from .target import CausalTarget

__all__ = ["CausalTarget", "FullCache"]
