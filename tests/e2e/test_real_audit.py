"""The audits on the real model: its own rows, its own draft, a few tokens. `specdec audit --checks all` takes as many as one likes."""

from __future__ import annotations

import pytest

from specdec.acceptors import BlockAcceptor
from specdec.drafters import EarlyExitDrafter, ModelDrafter, NGramDrafter, NullDrafter
from specdec.testing.audit import Echoes, audit_coupled, coupled_texts, reference_draft, sampled_rounds
from specdec.testing.eprocess import pooled
from specdec.testing.numerics import chain_worth, drift, kernel_defects

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def reference(smollm2):
    return ModelDrafter(reference_draft(smollm2[0]))


def test_one_round_of_chains_of_eight(smollm2, chat, reference):
    """The kernel in float32, what two rules make of the same chain, and no bet that is won by it."""
    model, prompt = smollm2[0], chat("Name three rivers of Europe.")[0].tolist()
    rounds = [
        done for _, done in zip(range(3), sampled_rounds(model, [prompt], reference, BlockAcceptor(), max_new_tokens=40), strict=False)
    ]
    found = [node for node in kernel_defects(rounds[0])]
    assert len(found) > 8 and max(node.defect for node in found) < 1e-6 and max(node.total for node in found) < 1e-5
    for done in rounds:
        token, block = chain_worth(done.tree, done.verification)
        assert 1 < float(token) <= float(block) <= 9
    *_, state = pooled(rounds, 1e-6, 1000)
    assert not state.rejected.any() and int(state.tokens) == sum(len(done.emitted[0]) for done in rounds)


def test_coupled_texts_belong_to_their_seeds(smollm2, chat, reference):
    model, prompts = smollm2[0], [chat("Name three rivers of Europe.")[0].tolist(), chat("Say one one one one.")[0].tolist()]
    plain = list(coupled_texts(model, prompts, NullDrafter(), [1, 2], max_new_tokens=6))
    for drafter in (NGramDrafter(), Echoes(), EarlyExitDrafter(model, 6), reference):
        found = audit_coupled(model, prompts, drafter, [1, 2], plain, max_new_tokens=6, batch=2, num_draft=3)
        assert [one.verdict for one in found] == ["equal", "equal"]


def test_passes_of_several_tokens_are_plain_ones_but_for_rounding(smollm2, chat):
    model, prompt = smollm2[0], chat("Name three rivers of Europe.")[0].tolist()
    (found,) = drift(model, [prompt], [[2068, 28, 253, 2451, 30]], 5)
    assert 0 < found.logits < 1e-3 and found.tv_max < 1e-4 and found.beyond == 0
