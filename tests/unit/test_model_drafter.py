"""A draft model beside its target: what it reads, what it draws, and that neither ever shows in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processors import Memory, Refuses

import specdec
from specdec import Budget, Commit, Context, FixedPlanner, NullDrafter
from specdec.drafters import ModelDrafter
from specdec.models.tiny import TinyTarget
from specdec.ragged import pad_rows
from specdec.rng import CounterRng
from specdec.testing.tolerances import TREE_PASS
from specdec.tree import check
from specdec.types import DraftTree, Round, TargetFacts
from specdec.warp import PrefixAllowed, Warper

V = 11
TARGET = TinyTarget(V, seed=3)
DRAFT = TinyTarget(V, hidden_size=16, num_layers=1, seed=4)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]
EXACT = TREE_PASS[torch.float64]
A_ROUND = object.__new__(Round)
"""Says that a commit is no prompt; a draft model reads nothing else of a round."""


class Watched:
    """A model that keeps a list of its passes and may be given logits of its own for some rows."""

    def __init__(self, inner: TinyTarget, spoil: Any = None) -> None:
        self.inner, self.spoil, self.facts = inner, spoil, inner.facts
        self.passes: list[tuple[int, bool]] = []

    def new_cache(self, batch: int) -> Any:
        return self.inner.new_cache(batch)

    def forward(self, tokens: Any, positions: Any, mask: Any, cache: Any, *, logits: bool, layers: tuple[int, ...] = ()) -> Any:
        self.passes.append((tokens.shape[1], logits))
        found, features = self.inner.forward(tokens, positions, mask, cache, logits=logits, layers=layers)
        return (self.spoil(found) if self.spoil is not None and logits else found), features


def context(drafter: ModelDrafter, batch: int, *, target: TargetFacts = TARGET.facts, greedy: bool = False, warper: Any = None) -> Context:
    return Context(batch, target, warper or Warper([], batch=batch), greedy, 64, drafter.needs)


def commit(rows: Sequence[Sequence[int]]) -> Commit:
    return Commit(*pad_rows(rows, 0))


def propose(drafter: ModelDrafter, state: Any, pending: Sequence[int], budget: Budget, seed: int = 0, vocab_size: int = V) -> DraftTree:
    rows, root = range(len(pending)), torch.tensor(pending)
    tree = drafter.propose(state, root, budget, CounterRng([seed + row for row in rows]).round(rows, [0] * len(rows), torch.device("cpu")))
    check(tree, root, budget, vocab_size, sums=True)
    return tree


def drafted(tree: DraftTree) -> list[list[int]]:
    counts = (tree.parents >= 0).sum(-1).tolist()
    return [row[1 : n + 1] for row, n in zip(tree.tokens.tolist(), counts, strict=True)]


# ------------------------------------------------------------------------------------------------------------ what it reads


def test_a_round_reads_what_the_last_one_left_over():
    model = Watched(TARGET)
    specdec.generate(TARGET, [[1, 2, 3, 4]], drafter=ModelDrafter(model), planner=FixedPlanner(3), max_new_tokens=12)
    assert model.passes == [(3, False), (1, True), (1, True), (1, True), *[(2, True), (1, True), (1, True)] * 2]


def test_a_budget_of_nothing_reads_nothing_and_a_long_stretch_is_read_in_chunks():
    model = Watched(TinyTarget(V, num_layers=1, max_positions=2048, seed=4))
    drafter = ModelDrafter(model)
    state = drafter.observe(drafter.begin(context(drafter, 2)), commit([[1] * 40, [2]]))
    assert model.passes == [(40, False)]  # the prompt, without logits
    for _ in range(30):
        assert drafted(propose(drafter, state, [1, 2], Budget.of([0, 0]))) == [[], []]
        state = drafter.observe(state, commit([[1] * 20, [2]]), A_ROUND)
    assert len(model.passes) == 1
    propose(drafter, state, [3, 4], Budget.of([1, 0]))
    assert model.passes[1:] == [(512, False), (88, False), (1, True)]
    assert state.cache.lengths == [641, 1]
    propose(drafter, state, [3, 4], Budget.of([1, 1]))  # the first draft was never observed
    assert model.passes[4:] == [(30, False), (1, True)] and state.cache.lengths == [641, 32]


def test_a_model_shown_to_processors_with_memory_is_read_in_small_chunks():
    model = Watched(DRAFT)
    drafter = ModelDrafter(model, logits_processor=[Memory()])
    state = drafter.observe(drafter.begin(context(drafter, 1)), commit([[1] * 4]))
    state = drafter.observe(state, commit([[2] * 36]), A_ROUND)
    propose(drafter, state, [3], Budget.of([2]))
    assert model.passes == [(4, False), (16, True), (16, True), (5, True), (1, True)]
    (seen,) = [processor.seen for processor in state.warp.each[0].own]
    assert seen == [2] * 36  # what plain decoding would have shown it: no prompt, each token once


def holds_its_text(cache: Any, texts: Sequence[Sequence[int]]) -> None:
    """The cache gives the law that a dense pass over the same tokens gives, with one more token behind them."""
    probe, batch = 5, len(texts)
    cache.open(1)
    mask = cache.mask(torch.ones(batch, 1, 1, dtype=torch.bool))
    logits, _ = DRAFT.forward(torch.full((batch, 1), probe), torch.tensor(cache.lengths)[:, None], mask, cache, logits=True)
    for row, (text, length) in enumerate(zip(texts, cache.lengths, strict=True)):
        torch.testing.assert_close(logits[row], DRAFT(torch.tensor([[*text[:length], probe]])), atol=EXACT, rtol=0)
    cache.rewind(cache.lengths)


@given(data=st.data())
def test_after_any_rounds_the_cache_holds_what_was_committed(data):
    """Whatever was drafted, by itself or by others in a merged tree, and whatever of it was accepted."""
    token, rows = st.integers(0, V - 1), data.draw(st.integers(1, 3))
    drafter = ModelDrafter(DRAFT)
    texts: list[list[int]] = [[] for _ in range(rows)]
    state = drafter.begin(context(drafter, rows))

    def observe(new: list[list[int]], done: Round | None) -> None:
        nonlocal state, texts
        state = drafter.observe(state, commit(new), done)
        texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
        holds_its_text(state.cache, texts)

    for _ in range(data.draw(st.integers(0, 2))):
        observe([data.draw(st.lists(token, max_size=4)) for _ in texts], None)
    for number in range(data.draw(st.integers(1, 5))):
        pending = [data.draw(token) for _ in texts]
        budget = Budget.of([data.draw(st.integers(0, 4)) for _ in texts])
        before = list(state.cache.lengths)
        tree = propose(drafter, state, pending, budget, seed=100 * number)
        new, kept = [], []
        for row, (text, root, own, length) in enumerate(zip(texts, pending, drafted(tree), before, strict=True)):
            assert len(own) == int(budget.nodes[row])
            for i in range(len(own)):
                law = DRAFT(torch.tensor([[*text, root, *own[:i]]]))[0].softmax(-1)
                torch.testing.assert_close(tree.laws[row, i], law, atol=EXACT, rtol=0)
            accepted = [root, *own[: data.draw(st.integers(0, len(own)))], *data.draw(st.lists(token, max_size=2))]
            accepted = accepted if data.draw(st.integers(0, 5)) else []
            agree = next((i for i, (x, y) in enumerate(zip([root, *own[:-1]], accepted, strict=False)) if x != y), None)
            agree = min(max(1, len(own)), len(accepted)) if agree is None else agree
            kept.append(len(text) + agree if own else length)
            new.append(accepted)
        observe(new, A_ROUND)
        assert state.cache.lengths == kept  # no more was forgotten than had to be
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(len(texts))))[: data.draw(st.integers(1, len(texts)))]
            state, texts = drafter.select(state, order), [texts[row] for row in order]
            holds_its_text(state.cache, texts)


def test_another_call_goes_on_from_the_state_of_the_last():
    """What was read stays read; processors with memory begin anew."""
    model = Watched(DRAFT)
    drafter = ModelDrafter(model, logits_processor=[Memory()])
    state = drafter.observe(drafter.begin(context(drafter, 1)), commit([[1, 2, 3]]))
    propose(drafter, state, [4], Budget.of([2]))
    state = drafter.observe(state, commit([[4, 5, 6]]), A_ROUND)
    model.passes.clear()
    state = drafter.observe(drafter.resume(state, context(drafter, 1), [6]), commit([[7]]))
    tree = propose(drafter, state, [8], Budget.of([3]))
    fresh = drafter.observe(drafter.begin(context(drafter, 1)), commit([[1, 2, 3, 4, 5, 6, 7]]))
    again = propose(drafter, fresh, [8], Budget.of([3]))
    assert again.tokens.equal(tree.tokens)
    torch.testing.assert_close(again.laws, tree.laws, atol=EXACT, rtol=0)
    assert sum(width for width, _ in model.passes[:2]) <= 4  # all but what it drafted differently


@pytest.mark.parametrize("keep", [[0, 1], [2, 3], [5, 3], [6, 1]])
def test_another_call_may_go_back(keep):
    """To any of the committed tokens, also from the middle of a round."""
    texts = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    model = Watched(DRAFT)
    drafter = ModelDrafter(model)
    state = drafter.observe(drafter.begin(context(drafter, 2)), commit([[1, 2, 3], [7]]))
    propose(drafter, state, [4, 8], Budget.of([3, 3]))
    state = drafter.observe(state, commit([[4, 5, 6], [8, 9]]), A_ROUND)
    propose(drafter, state, [1, 1], Budget.of([3, 3]))  # never observed
    state = drafter.resume(state, context(drafter, 2), keep)
    texts = [text[:n] for text, n in zip(texts, keep, strict=True)]
    assert state.cache.lengths == keep and [state.ids.row(i).tolist() for i in range(2)] == texts
    holds_its_text(state.cache, texts)
    state = drafter.observe(state, commit([[10, 9], [8]]))
    holds_its_text(state.cache, [[*texts[0], 10, 9], [*texts[1], 8]])
    fresh = drafter.observe(drafter.begin(context(drafter, 2)), commit([[*texts[0], 10, 9], [*texts[1], 8]]))
    one, other = (propose(drafter, at, [1, 2], Budget.of([3, 2])) for at in (state, fresh))
    assert one.tokens.equal(other.tokens)


def test_a_causal_mask_is_left_to_the_model_for_the_prompt_alone():
    class Masks(Watched):
        def forward(self, tokens: Any, positions: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            masks.append((tokens.shape[1], mask is None))
            return super().forward(tokens, positions, mask, *args, **kwargs)

    masks: list[tuple[int, bool]] = []
    drafter = ModelDrafter(Masks(DRAFT))
    state = drafter.observe(drafter.begin(context(drafter, 2)), commit([[1, 2, 3], [4, 5, 6]]))
    own = drafted(propose(drafter, state, [7, 8], Budget.of([2, 2])))
    new = [[root, (tokens[0] + 1) % V, 1] for root, tokens in zip([7, 8], own, strict=True)]  # not what was drafted
    state = drafter.observe(state, commit(new), A_ROUND)
    propose(drafter, state, [7, 8], Budget.of([1, 1]))
    assert masks == [(3, True), (1, True), (1, True), (3, False)]


def test_a_smaller_context_than_the_targets_ends_drafting_and_not_the_text():
    draft = Watched(TinyTarget(V, num_layers=1, max_positions=12, seed=4))
    prompts = [[1, 2, 3], [4] * 15, [7]]
    found = specdec.generate(TARGET, prompts, drafter=ModelDrafter(draft), max_new_tokens=20, planner=FixedPlanner(4), return_rounds=True)
    plain = specdec.generate(TARGET, prompts, drafter=NullDrafter(), max_new_tokens=20)
    assert found.sequences.equal(plain.sequences)
    lengths = [len(prompt) for prompt in prompts]
    for done in found.rounds:
        for row, own, emitted in zip(done.rows, drafted(done.tree), done.emitted, strict=True):
            # the pending token is read at position length - 1, the one but last drafted at 11 or before it
            left = 20 - (lengths[row] - len(prompts[row])) - 1
            assert len(own) == max(0, min(4, left, 12 - (lengths[row] - 1)))
            lengths[row] += len(emitted)


# ------------------------------------------------------------------------------------------------------------ what it draws


def test_the_vocabulary_is_the_targets():
    """Surplus ids are never drafted, missing ones never either; a token that the draft model does not know is read as its token 0."""
    larger, smaller = TinyTarget(V + 5, seed=8), TinyTarget(V - 4, seed=8)
    for model, known in ((larger, V), (smaller, V - 4)):
        drafter = ModelDrafter(model)
        state = drafter.begin(context(drafter, 1))
        state = drafter.observe(state, commit([[1, V - 1]]))
        tree = propose(drafter, state, [V - 2], Budget.of([3]))
        text = [token if token < known else 0 for token in (1, V - 1, V - 2, *drafted(tree)[0][:2])]
        for i in range(3):
            law = model(torch.tensor([text[: 3 + i]]))[0, :V].softmax(-1)
            assert tree.laws.shape == (1, 3, V)
            torch.testing.assert_close(tree.laws[0, i, :known], law, atol=EXACT, rtol=0)
            assert not tree.laws[0, i, known:].any()


def test_laws_are_as_wide_as_the_wider_of_both():
    narrow = TinyTarget(V, num_layers=1, seed=4, dtype=torch.float32)
    for model, target, dtype in ((narrow, TARGET, torch.float64), (DRAFT, narrow, torch.float64), (narrow, narrow, torch.float32)):
        drafter = ModelDrafter(model)
        tree = propose(drafter, drafter.begin(context(drafter, 1, target=target.facts)), [1], Budget.of([3]))
        assert tree.laws.dtype == dtype


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_law_are_a_bad_guess_and_no_error(bad):
    """In one row, at some tokens; its mates do not notice."""

    def spoil(logits: torch.Tensor) -> torch.Tensor:
        return torch.where(logits[..., :1] > 0, bad, logits)

    drafter, options = ModelDrafter(Watched(DRAFT, spoil)), {"max_new_tokens": 8, "planner": FixedPlanner(3), "seed": [3, 4, 5]}
    found, plain = (specdec.generate(TARGET, PROMPTS, drafter=d, **options) for d in (drafter, NullDrafter()))
    assert found.sequences.equal(plain.sequences)
    found = specdec.generate(TARGET, PROMPTS, drafter=drafter, do_sample=True, **options)
    alone = specdec.generate(TARGET, PROMPTS[1:2], drafter=drafter, do_sample=True, **{**options, "seed": [4]})
    assert alone.new_tokens[0].equal(found.new_tokens[1])
    state = drafter.begin(context(drafter, 2))
    drafter._model.spoil = lambda logits: torch.where(torch.tensor([True, False])[:, None, None], bad, logits)
    tree = propose(drafter, state, [1, 1], Budget.of([2, 2]))
    assert drafted(tree)[0] == [0, 0] and tree.laws[0].tolist() == [[1.0] + [0.0] * (V - 1)] * 2
    torch.testing.assert_close(tree.laws[1, 0], DRAFT(torch.tensor([[1]]))[0].softmax(-1), atol=EXACT, rtol=0)


@pytest.mark.parametrize("pure", [True, False])
def test_a_processor_that_refuses_a_drafted_token_ends_that_draft_alone(pure):
    drafter, free = ModelDrafter(DRAFT, logits_processor=[Refuses({0, 1, 2, 3, 4}, pure)]), ModelDrafter(DRAFT)
    pending, budget, ended = [7, 8, 9, 10], Budget.of([4, 4, 4, 0]), set()
    for seed in range(8):
        trees = [propose(d, d.begin(context(d, 4)), pending, budget, 10 * seed) for d in (drafter, free)]
        for own, whole in zip(*map(drafted, trees), strict=True):
            stop = next((i + 1 for i, token in enumerate(whole) if token <= 4), 4)
            assert own == whole[:stop]
            ended.add(len(own))
    assert ended == {0, 1, 2, 3, 4}
    # What is really there it may refuse as well: that is for the target's own processors to say.
    assert drafted(propose(drafter, drafter.begin(context(drafter, 2)), [0, 1], Budget.of([1, 2]))) == [[], []]


@pytest.mark.parametrize("pure", [True, False])
def test_a_text_survives_a_refusal_in_its_draft(pure):
    """The target never says token 8 here; the draft does, and a processor of both will not go on from it."""
    refuses = Refuses({8}, pure)
    options = {"suppress_tokens": [8], "logits_processor": [refuses], "do_sample": True, "max_new_tokens": 12, "seed": 2}
    drafter = ModelDrafter(DRAFT, logits_processor=[refuses])
    found = specdec.generate(TARGET, PROMPTS, drafter=drafter, return_rounds=True, **options)
    own = [tokens for done in found.rounds for tokens in drafted(done.tree)]
    assert any(tokens[-1:] == [8] for tokens in own) and not any(8 in tokens[:-1] for tokens in own)
    assert found.stats.emitted == 36


@pytest.mark.parametrize("memory", [False, True])
def test_a_function_that_cannot_go_on_from_a_short_text_holds_drafting_back_and_no_more(memory):
    """Padding, which only the target's processors are shown, may have been what let it. It is asked again when the text is longer, unless
    a processor beside it has a memory and missed a token."""
    rules = [[PrefixAllowed(lambda row, ids: [int(ids[7]), 1], row) for row in range(2)]]
    warper = Warper([[Memory()] * 2, *rules] if memory else rules, batch=2)
    drafter = ModelDrafter(DRAFT)
    state = drafter.observe(drafter.begin(context(drafter, 2, warper=warper)), commit([[1, 2], [5] * 9]))
    lengths = []
    for length in range(3, 12):  # of the first row, with the pending token
        tree = propose(drafter, state, [3, 3], Budget.of([2, 2]))
        own, mate = drafted(tree)
        assert len(mate) == 2 and set(mate) <= {1, 5} and set(own) <= {3, 1}
        lengths.append((length, len(own)))
        state = drafter.observe(state, commit([[3], [3]]), A_ROUND)
    assert lengths == [(n, 2 if n >= 8 and not memory else 0) for n in range(3, 12)]


def test_what_a_processor_missed_is_missing_for_good():
    """It refused a token that stayed, far back: what it would remember is not known. Its mates, and another call, draft on."""
    drafter = ModelDrafter(DRAFT, logits_processor=[Refuses({0}, False)])
    state = drafter.observe(drafter.begin(context(drafter, 3)), commit([[1, 0], [2], [3]]))  # not asked about the prompt
    assert [len(own) > 0 for own in drafted(propose(drafter, state, [4, 5, 0], Budget.of([2, 2, 2])))] == [True, True, False]
    state = drafter.observe(state, commit([[4, 0, *[1] * 30, 2], [5], [0, 3]]), A_ROUND)
    for _ in range(2):
        assert [len(own) > 0 for own in drafted(propose(drafter, state, [7, 7, 7], Budget.of([2, 2, 2])))] == [False, True, False]
        state = drafter.observe(state, commit([[7], [7], [7]]), A_ROUND)
    state = drafter.select(state, [1, 0])
    assert [len(own) > 0 for own in drafted(propose(drafter, state, [7, 7], Budget.of([2, 2])))] == [True, False]
    state = drafter.observe(state, commit([[7], [7]]), A_ROUND)
    state = drafter.resume(state, context(drafter, 2), list(state.ids.lengths))
    assert all(drafted(propose(drafter, state, [7, 7], Budget.of([2, 2]))))
    for pending in ([4, 0], [0, 0]):  # it may refuse every row
        alone = drafter.observe(drafter.begin(context(drafter, 2)), commit([[1], [2]]))
        alone = drafter.observe(alone, commit([[5, 0], [0]]), A_ROUND)
        assert drafted(propose(drafter, alone, pending, Budget.of([2, 2]))) == [[], []]


class Batches:
    """Keeps the shape of what it is shown."""

    pure = True

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(input_ids.shape))
        return scores


def test_a_processor_without_memory_is_called_once_for_all_rows():
    batches = Batches()
    drafter = ModelDrafter(DRAFT, logits_processor=[batches])
    state = drafter.observe(drafter.begin(context(drafter, 3)), commit([[1, 2], [3, 4], [5, 6]]))
    propose(drafter, state, [7, 8, 9], Budget.of([3, 2, 3]))
    assert batches.shapes == [(3, 3), (3, 4), (2, 5)]


# ------------------------------------------------------------------------------------------------------------ what it refuses


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model: got str"):
        ModelDrafter("smollm2")
