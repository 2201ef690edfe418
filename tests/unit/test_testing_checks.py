"""What a reader meets: the decorator, the names of the checks, what they say, and what they need."""

from __future__ import annotations

import pytest
import torch

from specdec.acceptors import MatchAcceptor, RejectionAcceptor
from specdec.base import Acceptor, ContextDrafter, Drafter
from specdec.drafters import NullDrafter
from specdec.models.table import TableModel
from specdec.planning import FixedPlanner
from specdec.testing import check_acceptor, check_drafter, checks_for, parametrize_with_checks
from specdec.testing.battery import battery
from specdec.testing.drafters import TableDrafter
from specdec.testing.purity import Touched, WatchedAcceptor, untouched
from specdec.testing.tables import TableVerifier
from specdec.types import Budget, Features, Kind

NAMES = [
    "declared-law", "budget", "empty-draft", "short-context", "interleaving", "batch-invariance", "select", "determinism", "arguments",
    "two-rounds", "reachable-states", "law-GreedyAcceptor", "law-MatchAcceptor", "law-CoupledAcceptor", "law-RejectionAcceptor",
    "law-TraversalAcceptor", "law-KSeqAcceptor",
]  # fmt: skip


class Mine(ContextDrafter):
    def guess(self, ids, budget):
        return [[int(row[0])] * 2 for row in ids]


class Reads(Drafter):
    needs = Features((1,))

    def begin(self, ctx):
        return None

    def propose(self, state, pending, budget, source):
        raise NotImplementedError

    def observe(self, state, commit, round=None):
        return None

    def select(self, state, rows):
        return None


class Raises(ContextDrafter):
    def guess(self, ids, budget):
        raise RuntimeError("no")


class RaisesToo(Acceptor):
    lossless, takes = True, frozenset(Kind)

    def accept(self, tree, verification, source):
        raise RuntimeError("no")


def test_names_of_a_drafter_s_checks():
    assert [name for name, _ in checks_for(Mine())] == NAMES
    assert [name for name, _ in checks_for(Mine(), acceptors=[MatchAcceptor()])] == [
        *NAMES[: NAMES.index("law-GreedyAcceptor")],
        "law-MatchAcceptor",
    ]


def test_names_of_an_acceptor_s_checks():
    names = [name for name, _ in checks_for(RejectionAcceptor())]
    assert {"law-chain-3-iid", "law-tree-(2,2)-mixed", "law-merged-paths-(2,1)-iid", "law-empty-none"} <= set(names)
    assert names[-3:] == ["answer", "batch-invariance", "probes"] and len(set(names)) == len(names)


def test_the_decorator_parametrises_with_readable_ids():
    mark = parametrize_with_checks([Mine(), NullDrafter(), Mine()])
    ids = [param.id for param in mark.args[1]]
    assert mark.args[0] == "check" and len(ids) == 3 * len(NAMES) + 1  # block verification, for the one that drafts chains
    assert ids[0] == "Mine0-declared-law" and ids[len(NAMES)] == "NullDrafter-declared-law" and ids[-1] == f"Mine2-{NAMES[-1]}"
    assert all(callable(param.values[0]) for param in mark.args[1])


def test_a_target_and_contexts_of_one_s_own():
    verifier = TableVerifier(TableModel.random(5, 1, seed=0))
    drafter = TableDrafter(TableModel.random(5, 1, seed=1), "ii")
    checks = dict(checks_for(drafter, verifier=verifier, contexts=[(4, 4), (0,)], plans=[(2, 2, 1)], acceptors=[RejectionAcceptor()]))
    for name in ("declared-law", "select", "two-rounds", "law-RejectionAcceptor"):
        checks[name]()


def test_check_drafter_tells_of_every_check():
    told = rf"(?s)Raises fails {len(NAMES)} checks\n  declared-law: RuntimeError: no.*{NAMES[-1]}: RuntimeError"
    with pytest.raises(AssertionError, match=told):
        check_drafter(Raises())
    check_drafter(NullDrafter(), contexts=[(1,), (0, 2)], plans=[(1, 1, 1)], acceptors=[MatchAcceptor()])


def test_check_acceptor_tells_of_every_check():
    with pytest.raises(
        AssertionError,
        match="(?s)RaisesToo fails 4 checks\n  law-chain-3-point: .*RuntimeError: no.*probes: RuntimeError",
    ):
        check_acceptor(RaisesToo(), cells=battery()[:1])


def test_other_parts_have_no_checks():
    with pytest.raises(TypeError, match="got FixedPlanner"):
        checks_for(FixedPlanner(3))


def test_a_drafter_that_reads_features_asks_for_a_verifier():
    with pytest.raises(ValueError, match=r"verifier: Reads reads target layers \(1,\); pass a verifier"):
        checks_for(Reads())


def test_untouched_names_what_was_written():
    budget, row = Budget.of(2), torch.zeros(3)
    with untouched(budget=budget, row=row):
        row.clone().add_(1)
    with pytest.raises(Touched, match="budget.depth was written"), untouched(budget=budget, row=row):
        budget.depth.add_(1)
    with pytest.raises(Touched, match="row was written"), untouched(budget=budget, row=row):
        row[1] = float("nan")
    with untouched(row=row):  # a NaN that stays is no change
        pass


def test_watching_changes_nothing_about_an_acceptor():
    watched = WatchedAcceptor(MatchAcceptor())
    assert watched.lossless and watched.takes == MatchAcceptor.takes and not watched.greedy
