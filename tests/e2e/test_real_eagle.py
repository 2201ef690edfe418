"""The EAGLE-3 head that comes with the package, on the model that it was made for."""

from __future__ import annotations

import pytest
import torch

import specdec
from specdec import EagleDrafter, FixedPlanner, NullDrafter, grow
from specdec.checkpoints.strict import PACKAGED
from specdec.planning import by_rank

pytestmark = [pytest.mark.real, pytest.mark.slow]

HEAD = "smollm2-135m-eagle3"
QUESTIONS = ["Name three rivers of Europe.", "Tom has 3 apples and buys twice as many. How many apples does he have?"]
SHAPES = {
    "chain": grow.chain(), "mixed": grow.mixed(3, 2, 1), "points": grow.points(2, 1), "dynamic": grow.dynamic(8),
    "static": grow.static([(0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 0, 0)]),
    "optimal": grow.optimal([0.4, 0.13, 0.07, 0.04], 12, depth=4),
    "without replacement": grow.without_replacement(2, 2, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(chat):
    return [chat(question)[0] for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(smollm2, prompts):
    return specdec.generate(smollm2[0], prompts, drafter=NullDrafter(), max_new_tokens=24).new_tokens


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_texts_are_plain_decoding_s_and_take_fewer_rounds(smollm2, prompts, plain, name):
    """In float32, where the head is bfloat16."""
    drafter = EagleDrafter.from_pretrained(HEAD, smollm2[0], grow=SHAPES[name])
    found = specdec.generate(smollm2[0], prompts, drafter=drafter, planner=FixedPlanner(12, 4), max_new_tokens=24)
    assert all(mine.equal(theirs) for mine, theirs in zip(found.new_tokens, plain, strict=True))
    assert found.stats.tokens_per_round > 1.25


def test_it_is_worth_more_as_a_tree_and_by_rank(smollm2, prompts):
    drafter = EagleDrafter.from_pretrained(HEAD, smollm2[0], grow=SHAPES["dynamic"])
    found = specdec.generate(smollm2[0], prompts, drafter=drafter, planner=FixedPlanner(24, 5), max_new_tokens=40, return_rounds=True)
    assert found.stats.tokens_per_round > 1.5
    assert found.rounds is not None
    rates = by_rank(found.rounds).rates
    assert rates[0] > 0.2 and rates[0] > rates[1] > 0


def test_a_coupled_text_is_plain_decoding_s_of_its_seed(smollm2, prompts):
    """Sampled, in a batch and alone."""
    options = {"max_new_tokens": 24, "do_sample": True, "top_k": 0, "acceptor": specdec.CoupledAcceptor()}
    drafter = EagleDrafter.from_pretrained(HEAD, smollm2[0], sample=False)
    both = specdec.generate(smollm2[0], prompts, drafter=drafter, planner=FixedPlanner(9, 3), seed=[1, 2], **options)
    assert both.stats.accepted > 0
    for prompt, seed, text in zip(prompts, (1, 2), both.new_tokens, strict=True):
        assert specdec.generate(smollm2[0], [prompt], drafter=NullDrafter(), seed=[seed], **options).new_tokens[0].equal(text)


def test_it_is_small_and_has_a_card(smollm2, tmp_path):
    folder = PACKAGED / HEAD
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 24e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    for word in ("apache-2.0", "specdec train eagle3", "tokens", "minutes", "depth"):
        assert word in card
    drafter = EagleDrafter.from_pretrained(HEAD, smollm2[0])
    for layout in ("speculators", "eagle"):
        drafter.save_pretrained(tmp_path / layout, layout=layout)
        again = EagleDrafter.from_pretrained(tmp_path / layout, smollm2[0]).head
        assert again.config == drafter.head.config
        assert all(weight.equal(again.state_dict()[name]) for name, weight in drafter.head.state_dict().items())
        assert drafter.head.lm_head.weight.dtype == torch.bfloat16
