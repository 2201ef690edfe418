"""Parts that decide how much is drafted each round."""

from .adaptive import AdaptivePlanner
from .planner import FixedPlanner
from .rates import Rates, by_depth, by_rank

__all__ = ["AdaptivePlanner", "FixedPlanner", "Rates", "by_depth", "by_rank"]
