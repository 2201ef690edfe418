"""Rules that decide which drafted tokens stand."""

from .greedy import GreedyAcceptor
from .match import CoupledAcceptor, MatchAcceptor
from .rejection import RejectionAcceptor

__all__ = ["CoupledAcceptor", "GreedyAcceptor", "MatchAcceptor", "RejectionAcceptor"]
