"""Which weaker tests would have let which fault through, what a state knows that a text does not, and figures that others published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.acceptors import BlockAcceptor, KSeqAcceptor, RejectionAcceptor, TraversalAcceptor
from specdec.models.table import TableModel
from specdec.testing import checks_for
from specdec.testing.battery import battery
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import autoregressive, expected_tokens, extended, one_round, several_rounds, target_law, total_variation
from specdec.testing.mutant_acceptors import mutant_acceptors
from specdec.testing.mutant_deferred import Deferred, mutant_deferred
from specdec.testing.mutant_report import rejection
from specdec.testing.mutants import Mutant, mutant_drafters
from specdec.testing.states import reachable, worst_state
from specdec.testing.tables import TableVerifier, law_pairs
from specdec.testing.weaker import WEAKER, adequacy, weaker_tests

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table():
    return adequacy()


def test_the_table_of_the_docs_is_this_one(table):
    page = (Path(__file__).parents[2] / "docs" / "math" / "mutants.md").read_text(encoding="utf-8")
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in page.splitlines()]
    told = {row[0].replace("\\", ""): row[2:] for row in rows if len(row) > 3}
    wanted = {name: ["x" if passed else "." for passed in row.values()] for name, row in table.items()}
    assert {name: told.get(name) for name in wanted} == wanted, "run: specdec certify --mutants"


def test_every_weaker_test_lets_a_fault_through(table):
    assert set(table) == set(mutant_acceptors()) and all(list(row) == list(WEAKER) for row in table.values())
    for test in WEAKER:
        assert sum(row[test] for row in table.values()) >= 4, test


@pytest.mark.parametrize(
    ("test", "faults"),
    [
        ("a vocabulary of 2", ["residual is one token", "block: residual of token rejection", "residual not chained among siblings"]),
        ("one drafted token", [name for name in mutant_deferred()]),
        ("chains only", ["one coin for all siblings", "residual not chained among siblings", "K-SEQ takes draws without replacement"]),
        ("one round only", ["coins belong to absolute positions", "accepts probes", "writes into its arguments"]),
        ("the first token only", ["bonus from unprocessed logits", "block: residual of token rejection"]),
        ("no bonus", ["bonus from unprocessed logits"]),
        ("one-hot target only", ["accepts the argmax alone", "lenience of 2", "typical acceptance, said to be lossless"]),
        ("draft equal to target", ["no residual", "accepts with <=, so also at p = 0"]),
        ("frequency of each id", ["lenience of 1.1", "block: residual of token rejection"]),
    ],
)
def test_what_each_weaker_test_is_blind_to(table, test, faults):
    assert [name for name in faults if not table[name][test]] == []


@pytest.mark.parametrize("rule", [RejectionAcceptor(), BlockAcceptor(), TraversalAcceptor(), KSeqAcceptor()])
def test_honest_rules_pass_the_weaker_tests(rule):
    assert all(weaker_tests(rule).values())


# -------------------------------------------------------------------------------------------------------------- deferred coins


@pytest.mark.parametrize("cell", [cell for cell in battery() if cell.proposal == "mixed" or cell.shape.startswith("merged paths")])
def test_the_honest_form_is_traversal_verification(cell):
    one, other = (one_round(cell.drafter, cell.verifier, rule, cell.prompts, cell.plan) for rule in (Deferred(), TraversalAcceptor()))
    for prompt in cell.prompts:
        assert total_variation(one[prompt], other[prompt]) < 1e-12


def toy(rule):
    """p = (1/3, 2/3) and q = (2/3, 1/3) at every position, two drafted tokens."""
    target, draft = (TableModel(torch.tensor([law, law], dtype=torch.float64)) for law in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    verifier, drafter = TableVerifier(target), TableDrafter(draft, "ii")
    law = one_round(drafter, verifier, rule, [(0,)], (2, 2, 1))[0,]
    wanted = target_law(verifier, (0,))
    return expected_tokens(law) - 1, total_variation(extended(law, wanted, 3), autoregressive(wanted, 3))


def test_published_figures_of_the_toy_example():
    """Sun et al. 2024: 10/9 accepted by token, 11/9 by block verification; 4/3 and a wrong law if the last ratio is not capped."""
    assert toy(RejectionAcceptor()) == pytest.approx((10 / 9, 0), abs=1e-12)
    assert toy(BlockAcceptor()) == pytest.approx((11 / 9, 0), abs=1e-12) and toy(Deferred()) == pytest.approx((11 / 9, 0), abs=1e-12)
    assert toy(mutant_deferred()["block: the last ratio is not capped on its way (HSD)"].part) == pytest.approx((4 / 3, 1 / 9), abs=1e-12)


# -------------------------------------------------------------------------------------------------------------------- states


def test_errors_that_cancel_between_stories_show_in_the_states_alone():
    mutant = mutant_drafters()["errors that cancel between stories"]
    others = {name: check for name, check in checks_for(mutant.part) if name != "reachable-states"}
    for check in others.values():
        check()
    verifier = TableVerifier(TableModel.random(4, 2, seed=7, zeros=0.2))
    states = reachable(mutant.part, verifier, RejectionAcceptor(), [(3, 3, 0)], (1, 1, 1))
    assert sum(state.probability for state in states) == pytest.approx(1, abs=1e-12)
    defect, state = worst_state(states, verifier)
    assert defect > 1e-2 and state.emitted[-1] > 1
    twins = [other for other in states if other.text == state.text and other.draws != state.draws]
    assert twins, "the same text comes about in another way"
    honest = reachable(mutant.honest, verifier, RejectionAcceptor(), [(3, 3, 0)], (1, 1, 1))
    assert len(honest) == len(states) and worst_state(honest, verifier)[0] < 1e-12


@pytest.mark.parametrize("rule", [RejectionAcceptor(), BlockAcceptor()])
def test_a_text_of_one_token_more_than_a_round_can_draft(rule):
    pairs = law_pairs(3, 2)
    drafter, verifier, prompt = TableDrafter(pairs.draft, "ii"), TableVerifier(pairs.target), pairs.prompts[0]
    law = several_rounds(drafter, verifier, rule, [prompt], (2, 2, 1), length=3)[prompt]
    assert {len(text) for text in law} == {3}
    assert total_variation(law, autoregressive(target_law(verifier, prompt), 3)) < 1e-12


def test_a_text_tells_of_a_wrong_bonus():
    pairs = law_pairs(3, 2)
    drafter, verifier, prompt = TableDrafter(pairs.draft, "ii"), TableVerifier(pairs.target), pairs.prompts[0]
    target, rule = target_law(verifier, prompt), mutant_acceptors()["bonus from unprocessed logits"].part
    law = several_rounds(drafter, verifier, rule, [prompt], (2, 2, 1), length=3)[prompt]
    assert total_variation(law, autoregressive(target, 3)) > 1e-2


def test_a_mutant_that_is_none_is_told():
    honest = RejectionAcceptor()
    assert rejection(Mutant(honest, "law-chain-3-iid", honest, "")) is None
    assert "defect" in str(rejection(replace(mutant_acceptors()["no residual"], honest=honest)))
