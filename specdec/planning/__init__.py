"""Parts that decide how much is drafted each round."""

from .adaptive import AdaptivePlanner
from .planner import FixedPlanner

__all__ = ["AdaptivePlanner", "FixedPlanner"]
