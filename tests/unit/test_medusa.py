"""Medusa's heads beside their target: each level is a head's, and they never show in the text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from eagle_heads import features, fill, medusa, taught
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import Memory, Refuses
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import specdec
from specdec import Budget, Commit, Context, FixedPlanner, MedusaDrafter, NullDrafter, Round
from specdec.drafters.grow import chain, dynamic, iid, mixed, optimal, points, static, without_replacement
from specdec.drafters.growth import drawable
from specdec.heads import MedusaHeads
from specdec.models.tiny import TinyTarget
from specdec.ragged import pad_rows
from specdec.rng import CounterRng
from specdec.tree import check
from specdec.warp import Warper

V = 11
TARGET = TinyTarget(V, seed=3)
SHARED, OWN = medusa(TARGET, shared=True), medusa(TARGET, blocks=2, draft_vocab_size=V)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]
A_ROUND = object.__new__(Round)
"""Says that a commit is no prompt; the drafter reads nothing else of a round."""
SHAPES = {
    "chain": chain(), "mixed": mixed(3, 2, 1), "points": points(3, 2), "dynamic": dynamic(3), "merged": iid(3, 2, merge=True),
    "without replacement": without_replacement(2), "static": static([(0,), (2,), (0, 1), (0, 1, 0), (2, 0)]),
    "optimal": optimal([0.5, 0.2, 0.1], 6, depth=3),
}  # fmt: skip
PROCESSORS = {"none": [], "free": [TemperatureLogitsWarper(0.7)], "reading": [RepetitionPenaltyLogitsProcessor(1.5)]}


def begun(drafter: MedusaDrafter, batch: int = 1, **given: Any) -> Any:
    usual = {"warper": Warper([], batch=batch), "greedy": False, "capacity": 999, "needs": drafter.needs}
    return drafter.begin(Context(batch, TARGET.facts, **{**usual, **given}))


def commit(texts: Sequence[list[int]], new: Sequence[list[int]]) -> Commit:
    """The next tokens of each text, which grows by them, with their features."""
    tokens, count = pad_rows(new, 0)
    found = torch.zeros(*tokens.shape, 32, dtype=torch.float64)
    for row, (text, more) in enumerate(zip(texts, new, strict=True)):
        text += more
        if more:
            found[row, : len(more)] = features(TARGET, torch.tensor([text]), (2,))[0, -len(more) :]
    return Commit(tokens, count, found)


def source(seeds: Sequence[int]) -> Any:
    return CounterRng(list(seeds)).round(range(len(seeds)), [0] * len(seeds), torch.device("cpu"))


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("shape, heads", list(zip(SHAPES, [SHARED, OWN] * 4, strict=True)), ids=list(SHAPES))
def test_the_text_is_that_of_plain_decoding(shape, heads, greedy):
    """Sampled, under a rule whose text depends on the seed alone."""
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": not greedy, "seed": 5}
    if not greedy:
        options |= {"acceptor": specdec.CoupledAcceptor(), "temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3}
    plain = specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), **options)
    drafted = specdec.generate(TARGET, PROMPTS, drafter=MedusaDrafter(heads, TARGET, grow=SHAPES[shape], sample=False), **options)
    assert torch.equal(drafted.sequences, plain.sequences) and drafted.stats.drafted > 0


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=15)
@given(data=st.data())
def test_every_level_is_what_its_head_says_of_the_last_hidden_state(shape, data):
    """The growth is the same, but each law is computed from the whole text, without the drafter."""
    heads, greedy = data.draw(st.sampled_from([SHARED, OWN])), data.draw(st.booleans())
    processors = PROCESSORS[data.draw(st.sampled_from(sorted(PROCESSORS)))]
    drafter = MedusaDrafter(heads, TARGET, grow=SHAPES[shape])
    token, rows = st.integers(0, V - 1), data.draw(st.integers(1, 3))
    texts: list[list[int]] = [[] for _ in range(rows)]
    warper = Warper([[processor] * rows for processor in processors], batch=rows)
    state = drafter.begin(Context(rows, TARGET.facts, warper, greedy, 64, drafter.needs))
    state = drafter.observe(state, commit(texts, [data.draw(st.lists(token, max_size=5)) for _ in texts]))
    alone = greedy or SHAPES[shape].draws <= points(1).draws
    for number in range(3):
        pending = [data.draw(token) for _ in texts]
        limits = [[data.draw(st.integers(0, high)) for high in (6, 5, 3)] for _ in texts]
        budget = Budget.of(*map(list, zip(*limits, strict=True)))
        tree = drafter.propose(state, torch.tensor(pending), budget, source([10 * number + row for row in range(len(texts))]))
        check(tree, torch.tensor(pending), budget, V, sums=True)
        for row, (text, root) in enumerate(zip(texts, pending, strict=True)):
            nodes, depth, width = limits[row]
            own = Budget.of([nodes], [min(nodes, depth, heads.config.heads) if text else 0], [width])
            growth = (SHAPES[shape].chosen() if alone else SHAPES[shape]).begin(torch.tensor([root]), own)
            while growth.more:
                laws = []
                for column in range(growth.last.start, growth.last.stop):
                    path: list[int] = []
                    while column > 0:
                        path.insert(0, int(growth.tokens[0, column]))
                        column = int(growth.parents[0, column])
                    hidden = TARGET.net.norm(features(TARGET, torch.tensor([text]), (2,))[0, -1:])
                    for block in heads.blocks[growth.height]:
                        hidden = hidden + torch.nn.functional.silu(hidden @ block.linear.weight.T + block.linear.bias)
                    output = TARGET.net.head.weight[heads.ids] if heads.config.shared else heads.lm_heads[growth.height].weight
                    scores = torch.full((1, V), -torch.inf, dtype=torch.float64)
                    scores[:, heads.ids] = hidden @ output.T
                    for processor in processors:
                        scores = processor(torch.tensor([[*text, root, *path]]), scores)
                    laws.append(scores[0])
                found = torch.stack(laws)[None]
                seed = source([10 * number + row])
                growth.level(found if alone else drawable(found), seed, floor=-torch.inf if alone else 0.0)
            wanted = growth.tree()
            there = tree.parents[row] >= 0
            assert tree.tokens[row][there].tolist() == wanted.tokens[0][wanted.parents[0] >= 0].tolist()
        state = drafter.observe(state, commit(texts, [data.draw(st.lists(token, max_size=3)) for _ in texts]), A_ROUND)
        if data.draw(st.booleans()):
            kept = data.draw(st.permutations(range(len(texts))))[: data.draw(st.integers(1, len(texts)))]
            state, texts = drafter.select(state, kept), [texts[row] for row in kept]


def test_a_tree_is_no_deeper_than_there_are_heads():
    drafter = MedusaDrafter(SHARED, TARGET, grow=chain())
    state = drafter.observe(begun(drafter, 2), commit([[], []], [[1, 2], []]))
    tree = drafter.propose(state, torch.tensor([3, 4]), Budget.of([9, 9]), source([1, 2]))
    assert (tree.parents >= 0).sum(-1).tolist() == [3, 0]  # a text without a token has no hidden state


@pytest.mark.slow
@pytest.mark.parametrize("back", [0, 3])
def test_a_session_goes_on(back):
    drafter = MedusaDrafter(SHARED, TARGET, grow=mixed(2, 1))
    one = specdec.generate(TARGET, [[1, 2, 3]], drafter=drafter, max_new_tokens=50)
    text = [*one.sequences[0, : 53 - back].tolist(), 7, 8, 9]
    two = specdec.generate(TARGET, [text], drafter=drafter, max_new_tokens=20, session=one.session)
    fresh = specdec.generate(TARGET, [text], drafter=drafter, max_new_tokens=20)
    assert torch.equal(two.sequences, fresh.sequences) and fresh.stats.accepted_by_depth == two.stats.accepted_by_depth


def test_a_session_may_go_back_any_way():
    """No feature is left then, and the new tokens bring one."""
    drafter = MedusaDrafter(SHARED, TARGET, grow=mixed(2, 1))
    one = specdec.generate(TARGET, [[1, 2, 3]], drafter=drafter, max_new_tokens=150)
    text = [1, 2, 3, 9, 9, 4]
    two = specdec.generate(TARGET, [text], drafter=drafter, max_new_tokens=8, session=one.session)
    assert torch.equal(two.sequences, specdec.generate(TARGET, [text], drafter=NullDrafter(), max_new_tokens=8).sequences)
    assert two.stats.drafted > 0


def test_for_other_readers_the_output_head_can_be_written(tmp_path):
    drafter = MedusaDrafter(SHARED, TARGET)
    drafter.save_pretrained(tmp_path, output=True)
    again = MedusaDrafter.from_pretrained(tmp_path, TARGET)
    assert not again.head.config.shared
    options = {"max_new_tokens": 20, "do_sample": True, "seed": 3}
    mine, theirs = (specdec.generate(TARGET, PROMPTS, drafter=one, **options) for one in (drafter, again))
    assert torch.equal(mine.sequences, theirs.sequences)


@pytest.mark.parametrize("shape", ["chain", "mixed", "dynamic"])
@pytest.mark.parametrize("pause", [0, 2])
def test_a_processor_with_a_memory_sees_each_token_of_the_text_once(shape, pause):
    """Nothing of the prompt, and nothing that was only drafted."""
    drafter = MedusaDrafter(SHARED, TARGET, grow=SHAPES[shape], logits_processor=[Memory()])
    texts: list[list[int]] = [[], []]
    state = drafter.observe(begun(drafter, 2), commit(texts, [[1, 2, 3], []]))
    for _ in range(3):
        drafter.propose(state, torch.tensor([5, 6]), Budget.of([3, 3]), source([1, 2]))
        state = drafter.observe(state, commit(texts, [[5, *range(pause)], [6, 4]]), A_ROUND)
    drafter.propose(state, torch.tensor([7, 8]), Budget.of([3, 3]), source([1, 2]))
    assert [row.own[0].seen for row in state.warp.each] == [texts[0][3:], texts[1]]


def test_a_row_whose_text_a_memory_refuses_is_drafted_for_no_more():
    drafter = MedusaDrafter(SHARED, TARGET, grow=chain(), logits_processor=[Refuses({6}, pure=False)])
    texts: list[list[int]] = [[], []]
    state = drafter.observe(begun(drafter, 2), commit(texts, [[1, 6], [1, 2]]))
    for pending, drafted in ((6, [0, 2]), (3, [0, 2])):
        tree = drafter.propose(state, torch.tensor([pending, 2]), Budget.of([2, 2]), source([1, 2]))
        assert (tree.parents >= 0).sum(-1).tolist() == drafted
        state = drafter.observe(state, commit(texts, [[pending], [2]]), A_ROUND)


def test_what_cannot_be_used_is_refused():
    with pytest.raises(ValueError, match="hidden_size 32, this one 16"):
        MedusaDrafter(SHARED, TinyTarget(V, hidden_size=16))
    with pytest.raises(ValueError, match="vocab_size 11, this one 12"):
        MedusaDrafter(SHARED, TinyTarget(12))
    with pytest.raises(ValueError, match="heads, blocks: got 0 and 1"):
        medusa(TARGET, heads=0)
    double = copy.deepcopy(SHARED)
    double.offsets[1] -= 2
    with pytest.raises(ValueError, match="different tokens"):
        MedusaDrafter(double, TARGET)


@pytest.mark.parametrize("layout", ["vllm", "medusa"])
def test_a_drafter_is_stored_and_comes_back(tmp_path, layout):
    heads = OWN if layout == "medusa" else medusa(TARGET, blocks=2)
    MedusaDrafter(heads, TARGET).save_pretrained(tmp_path, layout)
    again = MedusaDrafter.from_pretrained(tmp_path, TARGET, grow=mixed(2, 1), sample=False)
    assert again.head.config == heads.config
    assert all(weight.equal(again.head.state_dict()[name]) for name, weight in heads.state_dict().items())


# ------------------------------------------------------------------------------------------------------------ heads that predict


@pytest.fixture(scope="module")
def learned() -> MedusaHeads:
    return taught(TARGET, "medusa")


def accepted(drafter: MedusaDrafter, late: int = 0) -> float:
    """How likely the first drafted token is accepted over texts of the target: the sum of min(p, q). `late` tokens after their feature."""
    texts = specdec.generate(TARGET, [[row, 3] for row in range(8)], drafter=NullDrafter(), do_sample=True, seed=7, max_new_tokens=80)
    found = []
    for text in texts.sequences[:, None]:
        laws = TARGET.net.logits(features(TARGET, text, (2,))).softmax(-1)[0]
        hidden = features(TARGET, text, drafter.needs.layers)
        for at in range(8, text.shape[1] - 8, 8):
            seen = Commit(text[:, : at - late], torch.tensor([at - late]), hidden[:, : at - late])
            state = drafter.observe(begun(drafter), seen)
            tree = drafter.propose(state, text[0, at : at + 1], Budget.of([1]), source([at]))
            found.append(float(torch.minimum(tree.laws[0, 0], laws[at]).sum()))
    return sum(found) / len(found)


@pytest.mark.slow
def test_heads_draft_better_with_the_features_that_they_were_made_for(learned):
    """The tests above hold for any heads; this one would not if features came from elsewhere, unnormed, or late."""
    right = accepted(MedusaDrafter(learned, TARGET, grow=chain()))
    wrong, swapped = copy.deepcopy(learned), copy.deepcopy(learned)
    wrong.config = replace(learned.config, layers=(1,))
    swapped.blocks = torch.nn.ModuleList(reversed(learned.blocks))
    swapped.lm_heads = torch.nn.ModuleList(reversed(learned.lm_heads))
    chance = fill(MedusaHeads(learned.config))
    figures = [accepted(MedusaDrafter(heads, TARGET, grow=chain())) for heads in (wrong, swapped, chance)]
    assert max(*figures, accepted(MedusaDrafter(learned, TARGET, grow=chain()), late=1)) < right - 0.02, (right, figures)


@pytest.mark.slow
def test_heads_that_predict_save_passes(learned):
    plain = specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), max_new_tokens=60)
    for shape in ("chain", "dynamic", "optimal"):
        drafter = MedusaDrafter(learned, TARGET, grow=SHAPES[shape])
        drafted = specdec.generate(TARGET, PROMPTS, drafter=drafter, planner=FixedPlanner(6), max_new_tokens=60)
        assert torch.equal(drafted.sequences, plain.sequences) and drafted.stats.tokens_per_round > 1.15
