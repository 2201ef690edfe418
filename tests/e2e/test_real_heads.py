"""Medusa's heads and the module for multi-token prediction that come with the package, on the model that they were made for."""

from __future__ import annotations

import pytest
import torch

import specdec
from specdec import FixedPlanner, NullDrafter, grow
from specdec.checkpoints.strict import PACKAGED
from specdec.drafters.by_name import HEADS, head_drafter
from specdec.planning import by_depth

pytestmark = [pytest.mark.real, pytest.mark.slow]

QUESTIONS = ["Name three rivers of Europe.", "Tom has 3 apples and buys twice as many. How many apples does he have?"]
SHAPES = {
    "chain": grow.chain(), "dynamic": grow.dynamic(8), "mixed": grow.mixed(3, 2, 1),
    "optimal": grow.optimal([[0.3, 0.1, 0.06, 0.04], [0.15, 0.07, 0.05], [0.1, 0.06]], 12),
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(chat):
    return [chat(question)[0] for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(smollm2, prompts):
    return specdec.generate(smollm2[0], prompts, drafter=NullDrafter(), max_new_tokens=24).new_tokens


@pytest.mark.parametrize("kind, name", [("medusa", "optimal"), ("medusa", "dynamic"), ("mtp", "chain"), ("mtp", "mixed")])
def test_greedy_texts_are_plain_decoding_s_and_take_fewer_rounds(smollm2, prompts, plain, kind, name):
    """In float32, where the heads are bfloat16."""
    drafter = head_drafter(kind, smollm2[0], grow=SHAPES[name])
    found = specdec.generate(smollm2[0], prompts, drafter=drafter, planner=FixedPlanner(12, 4), max_new_tokens=24)
    assert all(mine.equal(theirs) for mine, theirs in zip(found.new_tokens, plain, strict=True))
    assert found.stats.tokens_per_round > 1.1


def test_a_tree_from_measured_accuracies_is_better_than_a_chain(smollm2, prompts):
    drafter = head_drafter("medusa", smollm2[0], grow=grow.points(6, 2))
    options = {"planner": FixedPlanner(18, 2), "max_new_tokens": 32}
    found = specdec.generate(smollm2[0], prompts, drafter=drafter, return_rounds=True, **options)
    measured = [one.rates for one in by_depth(found.rounds)]
    assert len(measured) == 2 and measured[0][0] > measured[0][3]
    tree = head_drafter("medusa", smollm2[0], grow=grow.optimal(measured, 12))
    chain = head_drafter("medusa", smollm2[0], grow=grow.chain())
    better, worse = (specdec.generate(smollm2[0], prompts, drafter=one, **options).stats for one in (tree, chain))
    assert better.tokens_per_round > worse.tokens_per_round


def test_they_are_small_have_cards_and_are_stored_again(smollm2, tmp_path):
    assert sum(file.stat().st_size for file in PACKAGED.rglob("*") if file.is_file()) <= 40e6
    for kind, (make, name) in HEADS.items():
        card = (PACKAGED / name / "README.md").read_text(encoding="utf-8")
        for word in ("apache-2.0", f"specdec train {kind}", "tokens", "minutes", "depth"):
            assert word in card, (name, word)
        drafter = head_drafter(kind, smollm2[0])
        drafter.save_pretrained(tmp_path / kind)
        again = make.from_pretrained(tmp_path / kind, smollm2[0]).head
        assert again.config == drafter.head.config and next(again.parameters()).dtype == torch.bfloat16
        assert all(weight.equal(again.state_dict()[name]) for name, weight in drafter.head.state_dict().items())
