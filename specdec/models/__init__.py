"""Targets: the Hugging Face adapter, small models for tests, and `load` for a real one."""

from .hf import HFTarget
from .pretrained import load

__all__ = ["HFTarget", "load"]
