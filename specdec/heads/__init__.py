"""Networks that draft from what the target computed; who drafts with them, trains them and stores them lives above."""

from .eagle import EagleConfig, EagleHead, attend, fits

__all__ = ["EagleConfig", "EagleHead", "attend", "fits"]
