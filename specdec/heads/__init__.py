"""Networks that draft from what the target computed; who drafts with them, trains them and stores them lives above."""

from .draft import DraftHead, HeadConfig, Output, fits
from .eagle import EagleConfig, EagleHead, usual_layers
from .medusa import MedusaConfig, MedusaHeads
from .mtp import MTPConfig, MTPHead
from .pairs import LayerHead, PairConfig, PairHead, Write
from .parts import LayerConfig, attend

__all__ = [
    "DraftHead", "EagleConfig", "EagleHead", "HeadConfig", "LayerConfig", "LayerHead", "MTPConfig", "MTPHead", "MedusaConfig",
    "MedusaHeads", "Output", "PairConfig", "PairHead", "Write", "attend", "fits", "usual_layers",
]  # fmt: skip
