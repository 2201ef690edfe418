"""Parts that decide how much is drafted each round."""

from .planner import FixedPlanner

__all__ = ["FixedPlanner"]
