"""A check is worth what it rejects: every mutant fails the check that is named for it, for its own fault, and its honest sibling passes."""

from __future__ import annotations

import re

import pytest

from specdec.rng import Purpose
from specdec.testing import checks_for
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import autoregressive, extended, hazard_defect, one_round, several_rounds, target_law, total_variation
from specdec.testing.mutant_acceptors import mutant_acceptors
from specdec.testing.mutants import mutant_drafters
from specdec.testing.tables import TableVerifier, law_pairs

pytestmark = pytest.mark.slow

MUTANTS = {**{f"drafter: {k}": v for k, v in mutant_drafters().items()}, **{f"acceptor: {k}": v for k, v in mutant_acceptors().items()}}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected_and_its_honest_sibling_is_not(name):
    mutant = MUTANTS[name]
    dict(checks_for(mutant.honest))[mutant.check]()
    with pytest.raises(Exception) as caught:
        dict(checks_for(mutant.part))[mutant.check]()
    assert re.search(mutant.says, f"{caught.type.__name__}: {caught.value}"), f"rejected for another reason: {caught.value!r}"


def test_coins_read_ahead_bias_the_second_round_only():
    """The size of the fault where addresses keep their values, as they do when decoding: one round is exact, two are not."""
    pairs = law_pairs(3, 2)
    drafter, verifier, prompt = TableDrafter(pairs.draft, "ii"), TableVerifier(pairs.target), pairs.prompts[0]
    mutant, target = mutant_acceptors()["coins belong to absolute positions"], target_law(verifier, prompt)
    reuse = frozenset({Purpose.TARGET})
    one = one_round(drafter, verifier, mutant.part, [prompt], (2, 2, 1), shared=reuse)[prompt]
    two = several_rounds(drafter, verifier, mutant.part, [prompt], (2, 2, 1), shared=reuse)[prompt]
    honest = several_rounds(drafter, verifier, mutant.honest, [prompt], (2, 2, 1))[prompt]
    assert hazard_defect(one, target) < 1e-12 and hazard_defect(honest, target) < 1e-12
    assert hazard_defect(two, target) > 1e-2
    assert total_variation(extended(two, target, 4), autoregressive(target, 4)) > 1e-3


def test_one_coin_for_all_siblings_biases_one_round():
    pairs = law_pairs(4, 1)
    mutant = mutant_acceptors()["one coin for all siblings"]
    verifier, drafter = TableVerifier(pairs.target), TableDrafter(pairs.draft, ["ii"])
    laws = one_round(drafter, verifier, mutant.part, pairs.prompts, (2, 1, 2), shared=frozenset({Purpose.ACCEPT}))
    assert max(hazard_defect(law, target_law(verifier, prompt)) for prompt, law in laws.items()) > 1e-3
