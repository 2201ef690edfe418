"""Draft heads in the layouts of other projects, read strictly and written whole."""

from .heads import load_head, save_head
from .medusa import load_medusa, save_medusa
from .mtp import load_mtp, save_mtp

__all__ = ["load_head", "load_medusa", "load_mtp", "save_head", "save_medusa", "save_mtp"]
