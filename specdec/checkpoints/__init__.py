"""Draft heads in the layouts of other projects, read strictly and written whole."""

from .heads import load_head, save_head

__all__ = ["load_head", "save_head"]
