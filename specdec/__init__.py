"""specdec: composable decoding primitives for speculative decoding whose output law is exactly the target's."""

from . import models, testing, tree
from .acceptors import (
    BlockAcceptor,
    CoupledAcceptor,
    GreedyAcceptor,
    KSeqAcceptor,
    MatchAcceptor,
    RejectionAcceptor,
    TraversalAcceptor,
    TypicalAcceptor,
)
from .base import Acceptor, Context, ContextDrafter, Drafter, Planner, Verifier
from .custom import custom_generate
from .drafters import (
    EagleDrafter,
    EarlyExitDrafter,
    MedusaDrafter,
    ModelDrafter,
    MTPDrafter,
    NGramDrafter,
    NullDrafter,
    PairDrafter,
    grow,
)  # fmt: skip
from .generation import Generation, generate, stream
from .planning import AdaptivePlanner, FixedPlanner
from .rng import Purpose, Source
from .session import Session
from .stats import Stats
from .tree import chain
from .types import Acceptance, Budget, Commit, DraftTree, Draws, Features, Kind, Round, Scores, TargetFacts, Verification
from .verifiers import SequentialVerifier, TreeVerifier

__version__ = "0.1.0"

__all__ = [
    "Acceptance", "Acceptor", "AdaptivePlanner", "BlockAcceptor", "Budget", "Commit", "Context", "ContextDrafter", "CoupledAcceptor",
    "DraftTree", "Drafter", "Draws", "EagleDrafter", "EarlyExitDrafter", "Features", "FixedPlanner", "Generation", "GreedyAcceptor",
    "KSeqAcceptor", "Kind", "MTPDrafter", "MatchAcceptor", "MedusaDrafter", "ModelDrafter", "NGramDrafter", "NullDrafter", "PairDrafter",
    "Planner", "Purpose", "RejectionAcceptor", "Round", "Scores", "SequentialVerifier", "Session", "Source", "Stats", "TargetFacts",
    "TraversalAcceptor", "TreeVerifier", "TypicalAcceptor", "Verification", "Verifier", "chain", "custom_generate", "generate", "grow",
    "models", "stream", "testing", "tree",
]  # fmt: skip
