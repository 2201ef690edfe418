"""Targets: the Hugging Face adapter, small models for tests, and `load` for a real one."""

from .pretrained import load

__all__ = ["load"]
