"""Keys and values that can be dropped token by token."""

from .full import FullCache
from .read import look, output_rows, read
from .target import CausalTarget, Lender, Lent, Shortened, causal_target, copy_cache

__all__ = ["CausalTarget", "FullCache", "Lender", "Lent", "Shortened", "causal_target", "copy_cache", "look", "output_rows", "read"]
