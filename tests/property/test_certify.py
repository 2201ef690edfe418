"""What `certify` says, against closed forms, and hazards for laws that hypothesis thinks of."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.acceptors import GreedyAcceptor, MatchAcceptor, RejectionAcceptor
from specdec.base import Acceptor
from specdec.models.table import TableModel
from specdec.testing import certify
from specdec.testing.battery import battery
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import expected_tokens, hazard_defect, one_round, target_law
from specdec.testing.mutant_acceptors import Recursive
from specdec.testing.strategies import pairs_of_laws
from specdec.testing.tables import TableVerifier
from specdec.types import Kind

# The type checker that executes annotations in tests picks the items it looks at with Python's generator, also while data is drawn.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"),
]

KEYS = {"acceptor", "drafter", "proposal", "shape", "lossless", "defect", "expected_tokens", "efficiency", "verdict"}
CHEAP = [cell for cell in battery() if cell.shape in ("chain 3", "level 2", "empty")]


class PointsOnly(Acceptor):
    """Exact for point draws, and says so."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset({Kind.POINT})

    def accept(self, tree, verification, source):
        return MatchAcceptor().accept(tree, verification, source)


class Lenient(Acceptor):
    """Lossy, and says so."""

    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree, verification, source):
        return Recursive(weigh=lambda num, den: (2 * num, den)).accept(tree, verification, source)


@pytest.fixture(scope="module")
def rejection():
    return certify(RejectionAcceptor(), cells=CHEAP)


def test_rows_have_the_keys_that_scripts_rely_on_and_are_json(rejection):
    rows = rejection
    assert len(rows) == len(CHEAP) and all(set(row) >= KEYS for row in rows)
    assert json.loads(json.dumps(rows)) == rows
    assert {row["verdict"] for row in rows} == {"pass"} and max(row["defect"] for row in rows) < 1e-14


def test_the_battery_has_every_shape_and_kind():
    cells = {(cell.shape, cell.proposal) for cell in battery()}
    ways = ("point", "iid", "without replacement", "mixed")
    assert cells >= {(shape, way) for shape in ("chain 3", "tree (2,2)", "tree (1,2)", "level 2", "level 3") for way in ways}
    assert cells >= {
        ("merged paths (2,1)", "iid"),
        ("merged level 3", "iid"),
        ("merged samplers", "mixed"),
        ("empty", "none"),
        ("uneven rows", "mixed"),
        ("two rounds", "iid"),
    }
    assert all(len(cell.prompts) >= 4 for cell in battery() if cell.drafter.model.vocab_size > 2)


def test_a_lossy_rule_that_says_so_is_measured_not_failed():
    rows = certify(Lenient(), cells=CHEAP[-5:])
    assert {row["verdict"] for row in rows if row["proposal"] == "iid"} == {"lossy"}
    assert all(row["defect"] > 0.05 for row in rows if row["verdict"] == "lossy")
    assert all(row["verdict"] == "pass" for row in rows if row["proposal"] == "none")


def test_kinds_that_are_not_taken_are_refused():
    rows = certify(PointsOnly(), cells=CHEAP)
    assert {row["proposal"]: row["verdict"] for row in rows} == {
        "point": "pass", "none": "pass", "iid": "refused", "without replacement": "refused", "mixed": "refused",
    }  # fmt: skip
    assert all("PointsOnly treats point draws" in row["reason"] for row in rows if row["verdict"] == "refused")


def test_a_tolerance_of_zero_fails_what_rounds():
    (row,) = certify(RejectionAcceptor(), cells=CHEAP[1:2], tolerance=0.0)
    assert row["verdict"] == "fail" and "worst for the pair of laws" in row["reason"]


def test_efficiency_is_one_where_the_rule_is_known_to_be_optimal(rejection):
    """Point draws: every rule here. Top-k with one sample from the rest, sampled child first: recursive rejection (Hu et al. 2025)."""
    for rows in (rejection, certify(MatchAcceptor(), cells=CHEAP)):
        share = {(row["shape"], row["proposal"]): row["efficiency"] for row in rows}
        assert share["chain 3", "point"] == pytest.approx(1, abs=1e-12) and share["level 2", "point"] == pytest.approx(1, abs=1e-12)
        assert share["level 2", "mixed"] == pytest.approx(1, abs=1e-12) if rows is rejection else share["level 2", "mixed"] < 0.9
        assert 0 < share["level 2", "iid"] < 1 and 0 < share["chain 3", "iid"] < 1 and 0 < share["chain 3", "mixed"] < 1
    assert all(row["efficiency"] in (None, pytest.approx(1, abs=1e-12)) for row in certify(GreedyAcceptor(), cells=CHEAP))


def single(p, q, levels="i"):
    """A target and a drafter whose first laws are p and q, whatever the context."""
    target, draft = (TableModel(law[None].expand(len(law), -1)) for law in (p, q))
    return TableDrafter(draft, levels), TableVerifier(target)


@given(pairs_of_laws(4))
def test_a_chain_of_one_accepts_the_overlap(pair):
    """E[tokens] = 2 - TV(p, q) under rejection, 1 + sum p q under sample-and-match."""
    p, q = pair
    drafter, verifier = single(p, q)
    tv = float((p - q).abs().sum()) / 2
    for acceptor, tokens in ((RejectionAcceptor(), 2 - tv), (MatchAcceptor(), 1 + float((p * q).sum()))):
        law = one_round(drafter, verifier, acceptor, [(0,)], (1, 1, 1))[0,]
        assert expected_tokens(law) == pytest.approx(tokens, abs=1e-12)


@given(pairs_of_laws(5), st.sampled_from(["ii", "ww", "rp", "pp", "wi", "iw", "wwi"]))
def test_rejection_is_exact_for_any_siblings_and_laws(pair, letters):
    drafter, verifier = single(*pair, [letters])
    law = one_round(drafter, verifier, RejectionAcceptor(), [(0,)], (3, 1, 3))[0,]
    assert hazard_defect(law, target_law(verifier, (0,))) < 1e-12
