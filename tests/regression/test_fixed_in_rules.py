"""Faults of rules and of what they are told that were found and mended."""

from __future__ import annotations

import pytest
import torch

import specdec
from specdec.acceptors import BlockAcceptor, KSeqAcceptor, RejectionAcceptor, TraversalAcceptor
from specdec.loop import compatible
from specdec.models.tiny import TinyTarget
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import expected_tokens, hazard_defect, one_round, tabulated
from specdec.testing.mutant_trees import second_after_first
from specdec.testing.mutants import _Held
from specdec.testing.tables import TableVerifier, law_pairs
from specdec.types import Kind


def worst(acceptor, drafter, pairs, plan):
    verifier = TableVerifier(pairs.target)
    laws = one_round(drafter, verifier, acceptor, pairs.prompts, plan)
    targets = tabulated(verifier, pairs.prompts, plan[1])
    return max(hazard_defect(laws[p], targets[p]) for p in pairs.prompts), sum(map(expected_tokens, laws.values())) / len(laws)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "rule", [RejectionAcceptor(), BlockAcceptor(), TraversalAcceptor(), KSeqAcceptor()], ids=lambda r: type(r).__name__
)
def test_a_law_is_what_its_weights_are_in_proportion_to(rule, dtype):
    """Rounded to few digits a law sums to something else than one, and the text was off by as much."""
    pairs = law_pairs(3, 2)
    assert worst(rule, TableDrafter(pairs.draft, "ii", dtype=dtype), pairs, (2, 2, 1))[0] < 1e-12


def test_a_second_draw_on_a_node_takes_its_share_under_late_coins():
    """Equal samples share a node and its children: exact with coins kept, and more is accepted than with coins flipped at once."""
    pairs = law_pairs(3, 2)
    drafter = TableDrafter(pairs.draft, ("ii", "i"), merge=True)
    (late, more), (soon, less) = (worst(rule, drafter, pairs, (4, 2, 2)) for rule in (TraversalAcceptor(), RejectionAcceptor()))
    assert late < 1e-12 and soon < 1e-12 and more > less + 1e-3


def test_samples_whose_number_depends_on_a_sample_are_not_for_one_threshold():
    pairs = law_pairs(4, 1)
    loose = _Held(TableDrafter(pairs.draft, ["ii"]), second_after_first)
    loose.draws = frozenset({Kind.IID})
    with pytest.raises(ValueError, match="KSeqAcceptor needs to know how many samples .*its `fixed_widths` is False"):
        compatible(loose, KSeqAcceptor(), False)
    assert max(worst(rule, loose, pairs, (2, 1, 2))[0] for rule in (RejectionAcceptor(), TraversalAcceptor())) < 1e-12
    loose.fixed_widths = True
    assert worst(KSeqAcceptor(), loose, pairs, (2, 1, 2))[0] > 1e-2


@pytest.mark.parametrize("answer", [None, (1, 2), [0]])
def test_an_answer_of_another_kind_is_named(answer):
    class Odd(specdec.Acceptor):
        lossless, takes = True, frozenset(Kind)

        def accept(self, tree, verification, source):
            return answer

    with pytest.raises(TypeError, match="an acceptor must answer with a specdec.Acceptance, got"):
        specdec.generate(TinyTarget(5), [[1]], drafter=specdec.NGramDrafter(), acceptor=Odd(), do_sample=True, max_new_tokens=2)
