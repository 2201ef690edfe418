"""Rules that decide which drafted tokens stand."""

from .block import BlockAcceptor
from .greedy import GreedyAcceptor
from .kseq import KSeqAcceptor
from .match import CoupledAcceptor, MatchAcceptor
from .rejection import RejectionAcceptor
from .traversal import TraversalAcceptor
from .typical import TypicalAcceptor

__all__ = [
    "BlockAcceptor", "CoupledAcceptor", "GreedyAcceptor", "KSeqAcceptor", "MatchAcceptor", "RejectionAcceptor", "TraversalAcceptor",
    "TypicalAcceptor",
]  # fmt: skip
