"""Networks that draft from what the target computed; who drafts with them, trains them and stores them lives above."""

from .eagle import EagleConfig, EagleHead, usual_layers
from .medusa import MedusaConfig, MedusaHeads
from .mtp import MTPConfig, MTPHead
from .pairs import HeadConfig, LayerHead, Output, PairConfig, PairHead, Write, fits
from .parts import LayerConfig, attend

__all__ = [
    "EagleConfig", "EagleHead", "HeadConfig", "LayerConfig", "LayerHead", "MTPConfig", "MTPHead", "MedusaConfig", "MedusaHeads", "Output",
    "PairConfig", "PairHead", "Write", "attend", "fits", "usual_layers",
]  # fmt: skip
