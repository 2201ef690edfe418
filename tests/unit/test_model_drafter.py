"""A draft model beside its target: what it reads, what it draws, and that neither ever shows in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor

import specdec
from specdec import Budget, Commit, Context, FixedPlanner, Kind, NullDrafter, Planner
from specdec.drafters import EarlyExitDrafter, ModelDrafter
from specdec.models.tiny import TinyTarget
from specdec.ragged import pad_rows
from specdec.rng import CounterRng
from specdec.testing.tolerances import TREE_PASS
from specdec.tree import check
from specdec.types import DraftTree, Round, TargetFacts
from specdec.warp import Warper

V = 11
TARGET = TinyTarget(V, seed=3)
DRAFT = TinyTarget(V, hidden_size=16, num_layers=1, seed=4)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]
EXACT = TREE_PASS[torch.float64]
A_ROUND = object.__new__(Round)
"""Says that a commit is no prompt; a draft model reads nothing else of a round."""


class ByLength(Planner):
    """Each row's budget follows from its own length: 0 to 4 nodes, and none at all for a long stretch."""

    def begin(self, ctx: Context) -> None:
        return None

    def plan(self, state: None, lengths: Sequence[int]) -> Budget:
        return Budget.of([0 if 12 <= n < 34 else (7 * n + n // 3) % 5 for n in lengths])

    def observe(self, state: None, round: Any) -> None:
        return None

    def select(self, state: None, rows: Sequence[int]) -> None:
        return None


class Memory(LogitsProcessor):
    """Remembers every call and the scores that it was shown, and lets both decide."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.mass: torch.Tensor | float = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(int(input_ids[0, -1]))
        self.mass = 0.5 * self.mass + scores.max(-1, keepdim=True).values
        return scores + torch.sin(self.mass * torch.arange(1, V + 1)) + 0.3 * len(self.seen) * torch.eye(V)[sum(self.seen) % V]


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


# --------------------------------------------------------------------------------------------- the target drafts for itself

OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "cut": {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "penalty": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "greedy penalty": {"repetition_penalty": 1.3},
    "walked": {"do_sample": True, "logits_processor": [Memory()], "top_k": 6},
    "greedy walked": {"logits_processor": [Memory()]},
    "prefix": {"do_sample": True, "prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + row + i) % V for i in range(4)]},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("planner", [FixedPlanner(4), ByLength()], ids=["fixed", "by length"])
def test_a_target_that_drafts_for_itself_is_always_right(name, planner):
    # max_length, so that the rows end one by one
    found = specdec.generate(TARGET, PROMPTS, drafter=ModelDrafter(TARGET), planner=planner, max_length=42, seed=1, **OPTIONS[name])
    assert found.stats.drafted > 20 and found.stats.accepted == found.stats.drafted


@pytest.mark.parametrize("name", ["greedy", "greedy penalty", "greedy walked"])
def test_the_text_is_that_of_plain_decoding(name):
    options = {**OPTIONS[name], "max_length": 30}
    plain = specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), **options)
    for drafter in (ModelDrafter(DRAFT), ModelDrafter(DRAFT, logits_processor=[Memory()]), EarlyExitDrafter(TARGET, 1)):
        found = specdec.generate(TARGET, PROMPTS, drafter=drafter, planner=ByLength(), **options)
        assert found.sequences.equal(plain.sequences) and found.stats.accepted < found.stats.drafted


@pytest.mark.parametrize("name", ["cut", "penalty", "walked"])
def test_a_row_comes_out_as_it_does_alone(name):
    options = {**OPTIONS[name], "drafter": ModelDrafter(DRAFT), "planner": ByLength(), "max_length": 24}
    batch = specdec.generate(TARGET, PROMPTS, seed=[5, 6, 7], **options)
    for row, prompt in enumerate(PROMPTS):
        alone = specdec.generate(TARGET, [prompt], seed=[5 + row], **options)
        assert alone.new_tokens[0].equal(batch.new_tokens[row])


def test_points_from_a_sampled_law_are_not_always_right_and_never_show():
    drafter = ModelDrafter(TARGET, sample=False)
    assert drafter.draws == {Kind.POINT} and ModelDrafter(TARGET).draws == {Kind.POINT, Kind.IID}
    found = specdec.generate(TARGET, PROMPTS, drafter=drafter, do_sample=True, max_new_tokens=30, seed=1, return_rounds=True)
    assert 0 < found.stats.accepted < found.stats.drafted
    assert all(done.tree.draws.kinds <= {Kind.POINT} for done in found.rounds)


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
    (seen,) = [processor.seen for processor in state.warp[0].each[0].own]
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
    state = drafter.observe(drafter.resume(state, context(drafter, 1)), commit([[7]]))
    tree = propose(drafter, state, [8], Budget.of([3]))
    fresh = drafter.observe(drafter.begin(context(drafter, 1)), commit([[1, 2, 3, 4, 5, 6, 7]]))
    again = propose(drafter, fresh, [8], Budget.of([3]))
    assert again.tokens.equal(tree.tokens)
    torch.testing.assert_close(again.laws, tree.laws, atol=EXACT, rtol=0)
    assert sum(width for width, _ in model.passes[:2]) <= 4  # all but what it drafted differently


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


class Refuses(LogitsProcessor):
    """A grammar that ends below some tokens."""

    def __init__(self, tokens: set[int], pure: bool) -> None:
        self.tokens, self.pure = tokens, pure

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if int(input_ids[0, -1]) in self.tokens:
            raise ValueError("no way on")
        return scores


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
    with pytest.raises(ValueError, match="no way on"):  # it refuses what is really there
        propose(drafter, drafter.begin(context(drafter, 1)), [0], Budget.of([1]))


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


# ------------------------------------------------------------------------------------------------------------ what it refuses


class Words:
    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens) if token}


def test_tokenizers_are_compared_by_what_is_in_them(byte_tokenizer, letter_tokenizer):
    def build(draft: Any, target: Any) -> ModelDrafter:
        return ModelDrafter(DRAFT, tokenizer=draft, target_tokenizer=target)

    build(byte_tokenizer, byte_tokenizer)
    words = Words("a", "b", "c")
    for same in (Words("a", "b", "c"), Words("a", "b", "c", "d"), Words("a", "b"), Words("a", "", "c")):
        build(words, same), build(same, words)
    with pytest.raises(ValueError, match=r"id 1 is 'b' to the draft model and 'c' to the target"):
        build(words, Words("a", "c", "b"))
    with pytest.raises(ValueError, match=r"id 2 is 'c' .* 'x'"):
        build(words, Words("a", "b", "x", "c"))
    with pytest.raises(ValueError, match="id 0 is"):
        build(letter_tokenizer, byte_tokenizer)
    with pytest.raises(ValueError, match="target_tokenizer: got tokenizer alone"):
        build(words, None)
    with pytest.raises(ValueError, match="tokenizer: got target_tokenizer alone"):
        build(None, words)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model: got str"):
        ModelDrafter("smollm2")
