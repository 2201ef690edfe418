"""Hazards, several rounds, bounds: against cases that were worked out by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from specdec.acceptors import BlockAcceptor, CoupledAcceptor, MatchAcceptor, RejectionAcceptor
from specdec.base import Drafter
from specdec.drafters import NullDrafter
from specdec.models.table import TableModel
from specdec.rng import Purpose, Source
from specdec.testing import AddressReuse
from specdec.testing.bounds import chain_optimum, level_optimum, point_optimum
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import (
    autoregressive,
    expected_tokens,
    extended,
    hazard_defect,
    laws_after,
    one_round,
    several_rounds,
    tabulated,
    target_law,
    total_variation,
)  # fmt: skip
from specdec.testing.mutant_acceptors import Recursive
from specdec.testing.tables import PAIRS, TableVerifier, law_pairs
from specdec.types import Kind
from specdec.verifiers.sequential import SequentialVerifier


def constant(*law):
    """A model that says the same after every context."""
    probs = torch.tensor(law, dtype=torch.float64)
    return TableModel(probs.expand(len(law), len(law)))


def after(*law):
    return lambda texts: torch.tensor([law] * len(texts), dtype=torch.float64)


def test_hazard_of_a_law_that_stops_early_but_honestly():
    """Stopping may depend on what was said, not on what comes next."""
    law = {(0, 0): 0.7 * 0.7, (0, 1): 0.7 * 0.3, (1,): 0.3}
    assert hazard_defect(law, after(0.7, 0.3)) < 1e-15


def test_hazard_of_an_admission_that_depends_on_the_token():
    """V = {A, B}, p = (.7, .3), q = (.5, .5), a draft admitted only if it is A: the output is A with .85."""
    law = {(0,): 0.5 + 0.5 * 0.7, (1,): 0.5 * 0.3}
    assert hazard_defect(law, after(0.7, 0.3)) == pytest.approx(0.15)


def test_hazard_looks_behind_every_beginning():
    law = {(0, 0): 0.7, (1,): 0.3}
    assert hazard_defect(law, after(0.7, 0.3)) == pytest.approx(0.3)


def test_extended_completes_a_text_by_the_target():
    target = after(0.7, 0.3)
    law = extended({(0,): 0.7, (1, 1): 0.3}, target, 2)
    assert law == {(0, 0): pytest.approx(0.49), (0, 1): pytest.approx(0.21), (1, 1): pytest.approx(0.3)}
    assert total_variation(law, autoregressive(target, 2)) == pytest.approx(0.21)
    assert extended({(0, 1, 1): 1.0}, target, 2) == {(0, 1): 1.0}


def test_autoregressive_law_is_the_product_of_the_target_s():
    model = TableModel.random(3, 2, seed=0, zeros=0.3)
    verifier = TableVerifier(model)
    law = autoregressive(target_law(verifier, (2, 1)), 3)
    for text in product(range(3), repeat=3):
        ids = (2, 1, *text)
        wanted = 1.0
        for n in range(2, 5):
            wanted *= float(model.law(torch.tensor([ids[:n]]))[0, ids[n]])
        assert law.get(text, 0.0) == pytest.approx(wanted, abs=1e-15)


def test_the_missed_comparison():
    """A wrong bonus after a chain of 2 is invisible in the first 2 tokens, shows in the third, and in the hazard at once."""
    pairs = law_pairs(3, 2)
    verifier, drafter, prompt = TableVerifier(pairs.target), TableDrafter(pairs.draft, "ii"), pairs.prompts[0]
    acceptor = Recursive(finish=lambda left, target, draft, failed: torch.where(failed[:, None], left, torch.ones_like(left) / 3))
    target = target_law(verifier, prompt)

    def distance(length):
        law = extended(one_round(drafter, verifier, acceptor, [prompt], (2, 2, 1))[prompt], target, length)
        return total_variation(law, autoregressive(target, length))

    assert distance(2) < 1e-15 < 1e-2 < distance(3)
    assert hazard_defect(one_round(drafter, verifier, acceptor, [prompt], (2, 2, 1))[prompt], target) > 0.1


def test_known_expectations_of_a_toy():
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: 10/9 accepted by token, 11/9 by block (Sun et al. 2024)."""
    verifier, drafter = TableVerifier(constant(1 / 3, 2 / 3)), TableDrafter(constant(2 / 3, 1 / 3), "ii")
    for acceptor, accepted in ((RejectionAcceptor(), 10 / 9), (BlockAcceptor(), 11 / 9), (Recursive(), 10 / 9)):
        law = one_round(drafter, verifier, acceptor, [(0,)], (2, 2, 1))[0,]
        assert expected_tokens(law) == pytest.approx(1 + accepted, abs=1e-12)
        assert hazard_defect(law, target_law(verifier, (0,))) < 1e-14


def test_block_reaches_the_optimum_of_chains():
    pairs = law_pairs(3, 3)
    verifier, drafter = TableVerifier(pairs.target), TableDrafter(pairs.draft, "iii")
    laws = one_round(drafter, verifier, BlockAcceptor(), pairs.prompts, (3, 3, 1))
    targets, drafts = (tabulated(TableVerifier(model), pairs.prompts, 3) for model in (pairs.target, pairs.draft))
    for prompt in pairs.prompts:
        assert hazard_defect(laws[prompt], targets[prompt]) < 1e-13
        assert expected_tokens(laws[prompt]) == pytest.approx(chain_optimum(3, targets[prompt], drafts[prompt]), abs=1e-12)


def test_bounds_worked_by_hand():
    target, draft = after(0.7, 0.3), after(0.5, 0.5)
    assert chain_optimum(1, target, draft) == pytest.approx(1 + 0.5 + 0.3)
    assert chain_optimum(0, target, draft) == 1
    assert point_optimum([(0,), (0, 1)], target) == pytest.approx(1 + 0.7 + 0.21)
    assert point_optimum([], target) == 1
    law = torch.tensor([0.7, 0.3], dtype=torch.float64)
    assert level_optimum([(frozenset({0}), 0.5), (frozenset({1}), 0.5)], law) == pytest.approx(1.8)  # one sample: 2 - TV
    assert level_optimum([(frozenset({0, 1}), 1.0)], law) == 2
    assert level_optimum([(frozenset(), 1.0)], law) == 1


def test_plain_decoding_is_one_token_of_the_target_a_round():
    verifier = TableVerifier(TableModel.random(3, 1, seed=0))
    for acceptor in (MatchAcceptor(), RejectionAcceptor()):
        law = several_rounds(NullDrafter(), verifier, acceptor, [(1, 2)], (4, 4, 4), rounds=3)[1, 2]
        assert set(map(len, law)) == {3}
        assert total_variation(law, autoregressive(target_law(verifier, (1, 2)), 3)) < 1e-15


def test_two_rounds_are_the_first_and_then_the_second():
    """Through the loop with all its state, and composed by hand from one-round laws."""
    model, draft = TableModel.random(2, 2, seed=1), TableModel.random(2, 2, seed=2)
    verifier, drafter, prompt = TableVerifier(model), TableDrafter(draft, "i"), (1, 0)
    two = several_rounds(drafter, verifier, RejectionAcceptor(), [prompt], (1, 1, 1))[prompt]
    composed: dict[tuple[int, ...], float] = {}
    for text, first in one_round(drafter, verifier, RejectionAcceptor(), [prompt], (1, 1, 1))[prompt].items():
        begun = (*prompt, *text)
        for more, then in one_round(drafter, verifier, RejectionAcceptor(), [begun], (1, 1, 1))[begun].items():
            composed[(*text, *more)] = composed.get((*text, *more), 0.0) + first * then
    assert two == {text: pytest.approx(probability, abs=1e-15) for text, probability in composed.items()}


class SharedNoise(Source):
    """Draws the draft with the noise of the positions that it is for."""

    def __init__(self, inner):
        self.inner = inner

    def accept(self, num, den, number, active=None):
        raise NotImplementedError

    def categorical(self, weights, purpose, number, active=None):
        return self.inner.categorical(weights, Purpose.TARGET, number, active)

    def part(self, index):
        raise NotImplementedError


class Sharing(Drafter):
    draws = frozenset({Kind.IID})
    chains = True

    def __init__(self, inner):
        self.inner = inner

    def begin(self, ctx):
        return self.inner.begin(ctx)

    def propose(self, state, pending, budget, source):
        return self.inner.propose(state, pending, budget, SharedNoise(source))

    def observe(self, state, commit, round=None):
        return self.inner.observe(state, commit, round)

    def select(self, state, rows):
        return self.inner.select(state, rows)


def test_noise_may_be_shared_with_the_coupled_rule_alone():
    """It is exact over rounds and accepts more than with noise of the drafter's own; block verification, which looks at drafted tokens
    behind the accepted ones, is biased by it, and the strict source says so."""
    pairs = law_pairs(2, 2)
    verifier, drafter, prompt = TableVerifier(pairs.target), TableDrafter(pairs.draft, "ii"), pairs.prompts[1]
    target, noise = target_law(verifier, prompt), frozenset({Purpose.TARGET})
    laws = [several_rounds(Sharing(drafter), verifier, acceptor, [prompt], (2, 2, 1), shared=noise)[prompt]
            for acceptor in (CoupledAcceptor(), BlockAcceptor())]  # fmt: skip
    assert hazard_defect(laws[0], target) < 1e-12 < 1e-3 < hazard_defect(laws[1], target)
    alone = several_rounds(drafter, verifier, CoupledAcceptor(), [prompt], (2, 2, 1))[prompt]
    assert hazard_defect(alone, target) < 1e-12 and expected_tokens(laws[0]) > expected_tokens(alone) + 0.1
    with pytest.raises(AddressReuse, match="purpose TARGET"):
        several_rounds(Sharing(drafter), verifier, CoupledAcceptor(), [prompt], (2, 2, 1))


def test_a_table_verifier_is_a_sequential_one():
    """Also where the batch is ragged; the machine of test_testing_machines goes through rounds."""
    model = TableModel.random(4, 3, seed=5, zeros=0.2)
    texts = [(1,), (0, 2), (3, 1, 2, 0, 1)]
    fast, slow = laws_after(TableVerifier(model), texts), laws_after(SequentialVerifier(model, 4), texts)
    assert torch.allclose(fast, slow, atol=1e-15, rtol=0)
    greedy = laws_after(TableVerifier(model), texts, greedy=True)
    assert torch.equal(greedy.argmax(-1), fast.argmax(-1)) and torch.equal(greedy.sum(-1), torch.ones(3).double())


def test_every_kind_of_pair_lies_below_a_prompt_of_its_own():
    pairs = law_pairs(4, 2)
    assert set(PAIRS) <= set(pairs.names) and len(pairs.prompts) == 12
    places = [(prompt, text) for prompt in pairs.prompts for n in range(3) for text in product(range(4), repeat=n)]
    ids = torch.tensor([[*([0] * (2 - len(text))), *prompt, *text] for prompt, text in places])
    for (prompt, _), p, q in zip(places, pairs.target.law(ids), pairs.draft.law(ids), strict=True):
        name = pairs.names[pairs.prompts.index(prompt)]
        assert abs(float(p.sum()) - 1) < 1e-12 and abs(float(q.sum()) - 1) < 1e-12
        assert (name != "equal") or torch.equal(p, q)
        assert (name != "disjoint") or float((p * q).sum()) == 0
        assert (name != "one-hot target") or float(p.max()) == 1
        assert (name != "one-hot draft") or float(q.max()) == 1
        assert (name not in ("generic", "close")) or float(torch.minimum(p, q).min()) > 0
