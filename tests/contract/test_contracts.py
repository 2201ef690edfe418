"""Every drafter and acceptor of the library passes the checks that a reader's own has to pass."""

from __future__ import annotations

import pytest
import torch

from specdec.acceptors import (
    BlockAcceptor,
    CoupledAcceptor,
    GreedyAcceptor,
    KSeqAcceptor,
    MatchAcceptor,
    RejectionAcceptor,
    TraversalAcceptor,
    TypicalAcceptor,
)
from specdec.base import ContextDrafter
from specdec.drafters import NGramDrafter, NullDrafter
from specdec.models.table import TableModel
from specdec.testing import parametrize_with_checks
from specdec.testing.battery import battery
from specdec.testing.drafters import TableDrafter


class Repeat(ContextDrafter):
    """The last token again and again: what a reader writes first."""

    def guess(self, ids, budget):
        return [[int(row[-1])] * int(depth) for row, depth in zip(ids, budget.depth, strict=True)]


DRAFTERS = [NullDrafter(), NGramDrafter(), NGramDrafter(max_ngram=2, choice="frequent"), Repeat()]


@parametrize_with_checks(DRAFTERS)
def test_drafters(check):
    check()


@pytest.mark.slow
@parametrize_with_checks([RejectionAcceptor(), BlockAcceptor(), TraversalAcceptor()])
def test_acceptors(check):
    check()


@pytest.mark.slow
@parametrize_with_checks(
    [GreedyAcceptor(), MatchAcceptor(), CoupledAcceptor(), KSeqAcceptor(), TypicalAcceptor()],
    cells=[cell for cell in battery() if cell.shape in ("chain 3", "level 2", "merged samplers", "two rounds")],
)
def test_more_acceptors(check):
    """`specdec certify` goes through all cells."""
    check()


FULL = TableModel.random(4, 2, seed=1, zeros=0.2)
OTHER = TableModel.random(4, 2, seed=2)
REFERENCES = [
    TableDrafter(FULL, ["pIw"], other=OTHER, merge=True, uneven=True),
    TableDrafter(FULL, "ii", stop_below=0.3, dtype=torch.float32),
]


@pytest.mark.slow
@parametrize_with_checks(REFERENCES, plans=[(3, 2, 3)])
def test_the_drafters_of_the_battery(check):
    check()
