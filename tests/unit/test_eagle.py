"""An EAGLE head beside its target: what it reads, what it refuses, and that it never shows in the text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from eagle_heads import config, features, fill, filled, mtp, said, taught
from processors import Memory, Refuses
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import specdec
from specdec import Budget, Commit, Context, DraftTree, EagleDrafter, FixedPlanner, NullDrafter, PairDrafter, Round
from specdec.drafters.grow import Grower, chain, dynamic, iid, mixed, points, static, without_replacement
from specdec.heads import EagleHead, LayerHead
from specdec.models.tiny import TinyTarget
from specdec.ragged import pad_rows
from specdec.rng import CounterRng
from specdec.tree import check
from specdec.warp import Warper

V = 11
TARGET = TinyTarget(V, seed=3)
FIRST, THIRD, MTP = filled(config(1, TARGET)), filled(config(3, TARGET)), mtp(TARGET)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]
A_ROUND = object.__new__(Round)
"""Says that a commit is no prompt; the drafter reads nothing else of a round."""
SHAPES = [chain(), mixed(3, 2, 1), points(3, 2), dynamic(3), iid(2, merge=True), without_replacement(2), static([(0,), (1,), (0, 0)])]


def begun(drafter: PairDrafter, batch: int = 1, **given: Any) -> Any:
    usual = {"warper": Warper([], batch=batch), "greedy": False, "capacity": 999, "needs": drafter.needs}
    return drafter.begin(Context(batch, TARGET.facts, **{**usual, **given}))


def commit(drafter: PairDrafter, texts: Sequence[list[int]], new: Sequence[list[int]]) -> Commit:
    """The next tokens of each text, which grows by them, with their features."""
    tokens, count = pad_rows(new, 0)
    found = torch.zeros(*tokens.shape, 32 * len(drafter.needs.layers), dtype=torch.float64)
    for row, (text, more) in enumerate(zip(texts, new, strict=True)):
        text += more
        if more:
            found[row, : len(more)] = features(TARGET, torch.tensor([text]), drafter.needs.layers)[0, -len(more) :]
    return Commit(tokens, count, found)


def propose(drafter: PairDrafter, state: Any, pending: Sequence[int], budget: Budget, seed: int = 0) -> DraftTree:
    rows, root = range(len(pending)), torch.tensor(pending)
    tree = drafter.propose(state, root, budget, CounterRng([seed + row for row in rows]).round(rows, [0] * len(rows), torch.device("cpu")))
    check(tree, root, budget, V, sums=True)
    return tree


class Counted(PairDrafter):
    """Keeps a list of how many tokens its passes read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes: list[int] = []

    def _pass(self, state: Any, tokens: Any, *args: Any) -> Any:
        self.passes.append(tokens.shape[1])
        return super()._pass(state, tokens, *args)


@pytest.fixture(scope="module")
def learned() -> EagleHead:
    return taught(TARGET)


# ------------------------------------------------------------------------------------------------------------ the text


@pytest.mark.slow
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("shape, head", list(zip(SHAPES, [THIRD, FIRST, MTP] * 3, strict=False)), ids=lambda part: type(part).__name__)
def test_the_text_is_that_of_plain_decoding(shape, head, greedy):
    """Sampled, under a rule whose text depends on the seed alone."""
    given: dict[str, Any] = {"max_new_tokens": 16, "do_sample": not greedy, "seed": 5}
    if not greedy:
        given |= {"acceptor": specdec.CoupledAcceptor(), "temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3}
    if not greedy and not specdec.loop.treats(given["acceptor"], PairDrafter(head, TARGET, grow=shape)):
        given |= {"drafter": PairDrafter(head, TARGET, grow=shape, sample=False)}
    plain = specdec.generate(TARGET, PROMPTS, **{**given, "drafter": NullDrafter()})
    drafted = specdec.generate(TARGET, PROMPTS, **{"drafter": PairDrafter(head, TARGET, grow=shape), **given})
    assert torch.equal(drafted.sequences, plain.sequences) and drafted.stats.drafted > 0


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    wanted = LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, initializer_range=0.3, eos_token_id=None, pad_token_id=0)  # fmt: skip
    return LlamaForCausalLM(wanted).to(dtype).eval()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("version", [1, 3])
def test_the_text_of_a_hugging_face_model(version, dtype):
    """Whose head may be of another precision."""
    model = llama(dtype)
    layers = (3,) if version == 1 else (0, 1, 3)
    head = filled(config(version, TARGET, layers=layers), dtype=torch.bfloat16 if version == 3 else dtype)
    plain = specdec.generate(model, PROMPTS, drafter=NullDrafter(), max_new_tokens=16)
    for shape in SHAPES:
        drafter = PairDrafter(head, model, grow=shape)
        assert drafter.needs.layers == layers
        drafted = specdec.generate(model, PROMPTS, drafter=drafter, max_new_tokens=16)
        assert torch.equal(drafted.sequences, plain.sequences)
        done = specdec.generate(model, PROMPTS, drafter=drafter, max_new_tokens=4, do_sample=True, seed=1, return_rounds="all").rounds
        assert all(one.tree.laws is None or one.tree.laws.dtype == dtype for one in done)


# ------------------------------------------------------------------------------------------------------------ what it reads


def test_a_round_reads_what_was_accepted_and_then_level_by_level():
    drafter = Counted(THIRD, TARGET, grow=specdec.grow.chain())
    texts: list[list[int]] = [[]]
    state = drafter.observe(begun(drafter), commit(drafter, texts, [[1, 2, 3, 4]]))
    assert drafter.passes == [3] and state.cache.lengths == [3]  # the last feature waits for its token
    propose(drafter, state, [5], Budget.of([3]))
    assert drafter.passes[1:] == [1, 1, 2] and state.cache.lengths == [4]
    state = drafter.observe(state, commit(drafter, texts, [[5, 6, 7]]), A_ROUND)
    assert drafter.passes[4:] == []
    propose(drafter, state, [8], Budget.of([1]))
    assert drafter.passes[4:] == [3] and state.cache.lengths == [7]


@pytest.mark.slow
def test_a_long_prompt_is_read_in_chunks_and_its_features_go():
    drafter = Counted(THIRD, TARGET, grow=specdec.grow.chain())
    state, texts = begun(drafter, 2), [[], []]
    for _ in range(2):
        state = drafter.observe(state, commit(drafter, texts, [[1] * 512, [2] * 3]))
    assert drafter.passes == [511, 512] and list(map(len, state.features)) == [64, 6] and state.cache.lengths == [1023, 5]
    passes = len(drafter.passes)
    for _ in range(6):  # rounds in which it is not asked
        assert propose(drafter, state, [1, 2], Budget.of([0, 0])).tokens.tolist() == [[1], [2]]
        state = drafter.observe(state, commit(drafter, texts, [[1] * 100, [2]]), A_ROUND)
        assert max(map(len, state.features)) <= 512 + 1
    assert drafter.passes[passes:] == [512, 88]
    tree = propose(drafter, state, [3, 4], Budget.of([2, 1]))
    assert (tree.parents >= 0).sum(-1).tolist() == [2, 1] and state.cache.lengths == [1624, 12]


def test_one_token_has_no_feature_and_no_draft():
    drafter = PairDrafter(THIRD, TARGET, grow=specdec.grow.chain())
    assert propose(drafter, begun(drafter, 2), [4, 5], Budget.of([3, 3])).tokens.tolist() == [[4], [5]]
    state, texts = begun(drafter, 2), [[], []]
    state = drafter.observe(state, commit(drafter, texts, [[], [2]]))
    tree = propose(drafter, state, [4, 5], Budget.of([3, 3]))
    assert (tree.parents >= 0).sum(-1).tolist() == [0, 3]


@pytest.mark.parametrize("length, room", [(5, 3), (6, 2), (7, 1), (8, 0), (20, 0)])
def test_rows_that_outgrow_the_head_are_not_drafted_for(length, room):
    """A token of the last level is not read, so it may lie one behind the last position."""
    drafter = Counted(filled(config(3, TARGET, max_positions=7)), TARGET, grow=points(2))
    state, texts = begun(drafter, 2), [[], []]
    state = drafter.observe(state, commit(drafter, texts, [[1] * length, [2]]))
    tree = propose(drafter, state, [1, 3], Budget.of([30, 6], [9, 2]))
    deep = [node for node in range(1, tree.tokens.shape[1]) if int(tree.parents[0, node]) >= 0]
    assert len(deep) == 2 ** (room + 1) - 2 and int((tree.parents[1] >= 0).sum()) == 6
    for _ in range(15):
        state = drafter.observe(state, commit(drafter, texts, [[1] * 40, []]), A_ROUND)
    assert len(state.features[0]) == 64 and state.cache.lengths[0] == 7
    plain = specdec.generate(TARGET, [[1] * length], drafter=NullDrafter(), max_new_tokens=12)
    assert torch.equal(specdec.generate(TARGET, [[1] * length], drafter=drafter, max_new_tokens=12).sequences, plain.sequences)


@pytest.mark.slow
def test_no_law_is_no_draft():
    head = filled(config(3, TARGET))
    head.lm_head.weight.fill_(torch.nan)
    plain = specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), max_new_tokens=8)
    for shape in SHAPES:
        assert torch.equal(specdec.generate(TARGET, PROMPTS, drafter=PairDrafter(head, TARGET, grow=shape), max_new_tokens=8).sequences,
                           plain.sequences)  # fmt: skip
        specdec.generate(TARGET, PROMPTS, drafter=PairDrafter(head, TARGET, grow=shape), max_new_tokens=8, do_sample=True)


# ------------------------------------------------------------------------------------------------------------ processors


def test_only_known_tokens_are_drafted_and_a_processor_sees_the_target_s_ids():
    shown, known = [], set(THIRD.ids.tolist())

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shown.append(set(scores[0].isfinite().nonzero()[:, 0].tolist()))
        return scores

    watch.pure = True
    drafter = PairDrafter(THIRD, TARGET, grow=specdec.grow.chain(), logits_processor=[watch])
    done = specdec.generate(TARGET, [[1, 2, 3]], drafter=drafter, do_sample=True, max_new_tokens=12, seed=1, return_rounds="all")
    assert shown and all(seen == known for seen in shown)
    tokens = {int(t) for one in done.rounds for t in one.tree.tokens[0, 1:]}
    assert tokens and tokens <= known


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("rest", [[0, 0, 0, 0], [2, 0, 1, 3]])
def test_a_processor_with_a_memory_sees_each_token_of_the_text_once(shape, rest):
    """As plain decoding would have shown it: nothing of the prompt, and nothing that was only drafted."""
    drafter = PairDrafter(THIRD, TARGET, grow=shape, logits_processor=[Memory()])
    texts: list[list[int]] = [[], []]
    state = drafter.observe(begun(drafter, 2), commit(drafter, texts, [[1, 2, 3], []]))
    prompts = [3, 0]
    for pause in rest:
        propose(drafter, state, [5, 6], Budget.of([3, 3]))
        state = drafter.observe(state, commit(drafter, texts, [[5, *range(pause)], [6, 4]]), A_ROUND)
        state = drafter.observe(state, commit(drafter, texts, [[], [1]]), A_ROUND)
    propose(drafter, state, [7, 8], Budget.of([3, 3]))
    for row, text, start in zip(state.warp.each, texts, prompts, strict=True):
        ids, plain = torch.tensor([text]), Memory()
        hidden = THIRD.fuse(features(TARGET, ids[:, :-1], drafter.needs.layers))
        scores = torch.zeros(len(text), V, dtype=torch.float64)  # nothing is said of the first token
        scores[1:] = torch.where(torch.isin(torch.arange(V), THIRD.ids), scores[1:], -torch.inf)
        scores[1:, THIRD.ids] = THIRD.lm_head(THIRD.final(said(THIRD, TARGET, ids[:, 1:], hidden)))[0]
        for place in range(start, len(text)):
            plain(ids[:, : place + 1], scores[place : place + 1])
        assert row.own[0].seen == plain.seen == text[start:]
        torch.testing.assert_close(row.own[0].mass[:1], plain.mass)  # it is called with the row repeated


@pytest.mark.slow
@pytest.mark.parametrize("given", [[Memory()], [Memory(), Refuses({6, 7}, pure=False)], [Refuses({6, 7}, pure=True)]],
                         ids=["memory", "both", "pure"])  # fmt: skip
def test_processors_of_any_kind_leave_the_text_alone(given, learned):
    """The target's here allow all; the head's refuse some of the text."""
    mine = [one for one in given if isinstance(one, Memory)]
    plain = specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), max_new_tokens=16, logits_processor=mine)
    for shape in SHAPES:
        drafter = PairDrafter(learned, TARGET, grow=shape, logits_processor=given)
        drafted = specdec.generate(TARGET, PROMPTS, drafter=drafter, max_new_tokens=16, logits_processor=mine)
        assert torch.equal(drafted.sequences, plain.sequences) and drafted.stats.accepted


def test_a_row_whose_text_a_memory_refuses_is_drafted_for_no_more():
    drafter = PairDrafter(THIRD, TARGET, grow=specdec.grow.chain(), logits_processor=[Refuses({6}, pure=False)])
    texts: list[list[int]] = [[], []]
    state = drafter.observe(begun(drafter, 2), commit(drafter, texts, [[1, 6], [1, 2]]))
    for pending, drafted in ((6, [0, 2]), (3, [0, 2]), (4, [0, 2])):
        tree = propose(drafter, state, [pending, 2], Budget.of([2, 2]))
        assert (tree.parents >= 0).sum(-1).tolist() == drafted
        state = drafter.observe(state, commit(drafter, texts, [[pending], [2]]), A_ROUND)


# ------------------------------------------------------------------------------------------------------------ sessions


@pytest.mark.slow
@pytest.mark.parametrize("head, back", [(FIRST, 40), (THIRD, 0), (THIRD, 3), (MTP, 3)], ids=["first-40", "third-0", "third-3", "mtp-3"])
def test_a_session_goes_on_with_what_was_read(head, back):
    """Also where the next turn takes some of the text back, as templates of chats do."""
    drafter = Counted(head, TARGET, grow=mixed(2, 1))
    one = specdec.generate(TARGET, [[1, 2, 3]], drafter=drafter, max_new_tokens=50)
    text = [*one.sequences[0, : 53 - back].tolist(), 7, 8, 9]
    drafter.passes.clear()
    two = specdec.generate(TARGET, [text], drafter=drafter, max_new_tokens=20, session=one.session)
    assert torch.equal(two.sequences, specdec.generate(TARGET, [text], drafter=NullDrafter(), max_new_tokens=20).sequences)
    assert max(drafter.passes) < 20  # not the whole text again
    fresh = specdec.generate(TARGET, [text], drafter=drafter, max_new_tokens=20)
    assert fresh.stats.accepted_by_depth == two.stats.accepted_by_depth  # as good a draft as from the beginning


@pytest.mark.slow
def test_a_session_without_features_is_refused():
    drafter = PairDrafter(THIRD, TARGET, grow=specdec.grow.chain())
    one = specdec.generate(TARGET, [[1, 2, 3]], drafter=drafter, max_new_tokens=150)
    with pytest.raises(ValueError, match="PairDrafter reads features of the target"):  # too far back
        specdec.generate(TARGET, [[1, 2, 3, 9, 9]], drafter=drafter, max_new_tokens=5, session=one.session)
    other = specdec.generate(TARGET, [[1, 2, 3]], drafter=NullDrafter(), max_new_tokens=5)
    with pytest.raises(ValueError, match="PairDrafter reads features of the target"):  # another drafter began
        specdec.generate(TARGET, [[*other.sequences[0].tolist(), 4]], drafter=drafter, max_new_tokens=5, session=other.session)
    model = llama(torch.float32)
    held = model(torch.tensor([[1, 2, 3]]), past_key_values=DynamicCache(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="PairDrafter reads features of the target"):
        specdec.generate(model, [[1, 2, 3, 4]], drafter=PairDrafter(filled(config(3, TARGET, layers=(0, 1, 3))), model), session=held,
                         max_new_tokens=5)  # fmt: skip


def test_a_verifier_without_features_is_refused():
    drafter = PairDrafter(THIRD, TARGET, grow=specdec.grow.chain())
    with pytest.raises(ValueError, match="it has no features of layers"):
        drafter.observe(begun(drafter), Commit(torch.tensor([[1]]), torch.tensor([1])))
    drafter.observe(begun(drafter), Commit(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0])))  # nothing came


# ------------------------------------------------------------------------------------------------------------ what is refused


def test_a_head_of_another_target_is_refused():
    with pytest.raises(ValueError, match="hidden_size 32, this one 16"):
        PairDrafter(THIRD, TinyTarget(V, hidden_size=16))
    with pytest.raises(ValueError, match="vocab_size 11, this one 12"):
        PairDrafter(THIRD, TinyTarget(12))
    with pytest.raises(ValueError, match="reads layers"):
        PairDrafter(THIRD, TinyTarget(V, num_layers=1))
    narrow = EagleHead(replace(config(3, TARGET), hidden_size=16))
    with pytest.raises(ValueError, match="hidden_size is 16 and own_embedding False"):
        PairDrafter(narrow, TARGET)
    double = copy.deepcopy(THIRD)
    double.offsets[1] -= 2
    with pytest.raises(ValueError, match="different tokens"):
        PairDrafter(double, TARGET)


def test_what_cannot_be_used_is_refused():
    class Stingy:
        facts, new_cache, forward = TARGET.facts, TARGET.new_cache, TARGET.forward

    with pytest.raises(TypeError, match="Stingy does not lend"):
        PairDrafter(THIRD, Stingy())
    with pytest.raises(ValueError, match="two models"):
        PairDrafter(THIRD, TARGET, grow=Grower(("iI",)))


@pytest.mark.parametrize("head, layout", [(FIRST, "eagle"), (THIRD, "eagle"), (THIRD, "speculators")])
def test_a_drafter_is_stored_and_comes_back(tmp_path, head, layout):
    head = filled(config(head.config.version, TARGET, layers=(1, 2))) if head is THIRD and layout == "eagle" else head
    drafter = EagleDrafter(head, TARGET, grow=specdec.grow.chain())
    drafter.save_pretrained(tmp_path, layout)
    again = EagleDrafter.from_pretrained(tmp_path, TARGET, grow=mixed(2, 1), sample=False)
    assert again.head.config == head.config and not again.chains and again.draws == points(1).draws
    state, other = head.state_dict(), again.head.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


# ------------------------------------------------------------------------------------------------------------ a head that predicts


class Unfed(PairDrafter):
    """Goes on from what it made of its own guesses: accepted tokens are not read again with their true features. For one text."""

    last: Any = None

    def _read_pairs(self, state: Any, text: Any, active: Any) -> Any:
        round_begins = text.lengths[0] > state.ids.lengths[0]
        while round_begins and self.last is not None and self._unread(state)[0] > 1:
            have = state.cache.lengths[0]
            state.cache.open(1)
            token = text.window([have + 1], 1)
            self.last = self._pass(state, token, torch.tensor([[have]]), self.last, torch.ones(1, 1, 1, dtype=torch.bool))
            state.cache.commit(torch.tensor([[0]]), torch.tensor([1]))
        found = super()._read_pairs(state, text, active)
        self.last = found if round_begins else None
        return found


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def predicts(request) -> LayerHead:
    return taught(TARGET, request.param)


@pytest.fixture(scope="module")
def texts() -> torch.Tensor:
    prompts = [[row, 3] for row in range(8)]
    return specdec.generate(TARGET, prompts, drafter=NullDrafter(), do_sample=True, seed=7, max_new_tokens=80).sequences


def acceptance(drafters: Sequence[PairDrafter], texts: torch.Tensor) -> float:
    """How likely the first drafted token is accepted where rounds of 8 tokens go through texts of the target: the sum of min(p, q)."""
    found = []
    for drafter, text in zip(drafters, texts[:, None], strict=True):
        laws = TARGET.net.logits(features(TARGET, text, (2,))).softmax(-1)[0]
        hidden = features(TARGET, text, drafter.needs.layers)
        state = drafter.observe(begun(drafter), Commit(text[:, :8], torch.tensor([8]), hidden[:, :8]))
        for at in range(8, text.shape[1] - 8, 8):
            tree = propose(drafter, state, [int(text[0, at])], Budget.of([1]))
            found.append(float(torch.minimum(tree.laws[0, 0], laws[at]).sum()))
            state = drafter.observe(state, Commit(text[:, at : at + 8], torch.tensor([8]), hidden[:, at : at + 8]), A_ROUND)
    return sum(found) / len(found)


@pytest.mark.slow
def test_a_head_drafts_better_with_the_features_that_it_was_made_for(predicts, texts):
    """The tests above hold for any head; this one would not if features came from elsewhere, late, or not at all."""
    right = acceptance([PairDrafter(predicts, TARGET, grow=specdec.grow.chain())] * 8, texts)
    wrong = copy.deepcopy(predicts)
    wrong.config = replace(predicts.config, layers=(0, 1) if len(predicts.config.layers) == 2 else (1,))
    assert right > 0.7
    assert acceptance([PairDrafter(wrong, TARGET, grow=specdec.grow.chain())] * 8, texts) < right - 0.02
    assert acceptance([Unfed(predicts, TARGET, grow=specdec.grow.chain()) for _ in texts], texts) < right - 0.02
    chance = fill(type(predicts)(predicts.config))
    assert acceptance([PairDrafter(chance, TARGET, grow=specdec.grow.chain())] * 8, texts) < 0.5


@pytest.mark.slow
def test_a_head_that_predicts_saves_passes(learned):
    plain = specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), max_new_tokens=60)
    for shape in SHAPES[:4]:
        drafter = PairDrafter(learned, TARGET, grow=shape)
        drafted = specdec.generate(TARGET, PROMPTS, drafter=drafter, planner=FixedPlanner(4), max_new_tokens=60)
        assert torch.equal(drafted.sequences, plain.sequences) and drafted.stats.tokens_per_round > 1.4
