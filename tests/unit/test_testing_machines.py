"""The state machine passes verifiers that are right and finds what is wrong with the others; the strategies give what they promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from specdec.base import Verifier
from specdec.models.table import TableModel
from specdec.testing.machines import verifier_machine
from specdec.testing.strategies import laws, pairs_of_laws, picks, trees
from specdec.testing.tables import TableVerifier
from specdec.tree import acceptable, check
from specdec.types import Budget, Commit, Kind, Scores
from specdec.verifiers.sequential import SequentialVerifier

# The type checker that executes annotations in tests picks the items it looks at with Python's generator, also while data is drawn.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"),
]

MODEL = TableModel.random(4, 3, seed=0)
ENOUGH = settings(max_examples=60, stateful_step_count=8, derandomize=True, deadline=None, database=None, report_multiple_bugs=False,
                  phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
FEW = settings(ENOUGH, max_examples=8)


class Broken(Verifier):
    """A table verifier with one fault."""

    def __init__(self, fault):
        self.inner, self.fault = TableVerifier(MODEL), fault

    @property
    def facts(self):
        return self.inner.facts

    def begin(self, ctx):
        return self.inner.begin(ctx)

    def extend(self, state, tokens, count):
        if self.fault == "extend ignores count":
            self.inner.extend(state, tokens, torch.full_like(count, tokens.shape[1]))
            return Commit(tokens, count)
        return self.inner.extend(state, tokens, count)

    def verify(self, state, tree):
        got = self.inner.verify(state, tree)
        if self.fault == "no rollback":  # what was verified stays
            state.history.extend(tree.tokens[:, :1], torch.ones(len(tree.tokens), dtype=torch.int64))
        if self.fault == "siblings see each other":
            earlier = (tree.parents[:, :-1] == tree.parents[:, 1:]) & (tree.parents[:, 1:] > 0)
            logp = got.logp.clone()
            logp[:, 1:][earlier] = logp[:, :-1][earlier]
            return Scores(logp)
        return got

    def commit(self, state, path, count):
        if self.fault == "commits the first nodes":
            path = torch.where(path >= 0, torch.arange(path.shape[1]), -1)
        if self.fault == "commit of nothing keeps the root":
            count = count.clamp_min(1)
        return self.inner.commit(state, path, count)

    def select(self, state, rows):
        if self.fault == "select keeps the order":
            rows = sorted(rows)
        return self.inner.select(state, rows)


FAULTS = [
    "no rollback", "siblings see each other", "commits the first nodes", "commit of nothing keeps the root", "select keeps the order",
    "extend ignores count",
]  # fmt: skip


def machine(make):
    return verifier_machine(make, lambda: SequentialVerifier(MODEL, 4), tolerance=1e-12, nodes=4, capacity=24)


@pytest.mark.parametrize("make", [lambda: TableVerifier(MODEL), lambda: SequentialVerifier(MODEL, 4), lambda: Broken(None)])
def test_machine_passes_what_is_right(make):
    run_state_machine_as_test(machine(make), settings=FEW)


@pytest.mark.parametrize("fault", FAULTS)
def test_machine_finds(fault):
    with pytest.raises(AssertionError, match="texts|committed"):
        run_state_machine_as_test(machine(lambda: Broken(fault)), settings=ENOUGH)


@given(st.data(), st.integers(1, 3))
def test_trees_are_well_formed(data, rows):
    tree = data.draw(trees(5, rows, nodes=5, pending=[3] * rows))
    check(tree, torch.full((rows,), 3), Budget.of(5, batch=rows), 5, sums=True)
    path, count = data.draw(picks(tree))
    assert path.shape == tree.tokens.shape and bool((count <= (path >= 0).sum(-1)).all()) and bool((path[:, 0] == 0).all())


@given(st.data())
def test_trees_of_one_kind_without_probes(data):
    tree = data.draw(trees(4, 2, kinds=[Kind.POINT], probes=False))
    assert tree.draws.kinds <= {Kind.POINT}
    there = tree.parents >= 0
    assert torch.equal(acceptable(tree), there)


@pytest.mark.parametrize("what", ["ragged", "duplicates", "probe", "two draws on a node", "three levels"])
def test_trees_reach_the_awkward_shapes(what):
    def is_one(tree):
        there = (tree.parents >= 0).sum(-1)
        siblings = [(p, t) for p, t in zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True) if p >= 0]
        landed = [n for n in tree.draws.node[0].tolist() if n >= 0]
        return {
            "ragged": int(there.max()) > int(there.min()) > 0, "duplicates": len(set(siblings)) < len(siblings),
            "probe": len(set(landed)) < len(siblings), "two draws on a node": len(set(landed)) < len(landed),
            "three levels": any(int(tree.parents[0, p]) > 0 for p, _ in siblings if p > 0),
        }[what]  # fmt: skip

    find(trees(4, 2), is_one, settings=settings(ENOUGH, max_examples=300))


@pytest.mark.parametrize("what", ["zero", "tie", "one-hot", "disjoint", "equal"])
def test_pairs_of_laws_reach_the_awkward_ones(what):
    def is_one(pair):
        p, q = pair
        return {
            "zero": bool((p == 0).any()) and int((p > 0).sum()) > 1, "tie": bool((p[0] == p[1]) & (p[0] > 0)),
            "one-hot": float(p.max()) == 1, "disjoint": float((p * q).sum()) == 0, "equal": torch.equal(p, q),
        }[what]  # fmt: skip

    find(pairs_of_laws(4), is_one, settings=settings(ENOUGH, max_examples=300))


@given(laws(3))
def test_laws_are_laws(law):
    assert law.dtype == torch.float64 and abs(float(law.sum()) - 1) < 1e-12 and float(law.min()) >= 0
