"""Trees that a draft model grows: what each node was drawn from, what of it is kept, and that the text's law stays the target's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import Memory, Refuses
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

import specdec
from specdec import Budget, Commit, Context, DraftTree, FixedPlanner, Kind, NullDrafter, Round
from specdec.acceptors import RejectionAcceptor, TraversalAcceptor
from specdec.drafters import EarlyExitDrafter, ModelDrafter
from specdec.drafters.grow import Grower, chain, iid, mixed, points, without_replacement
from specdec.models.tiny import TinyTarget
from specdec.ragged import pad_rows
from specdec.rng import CounterRng
from specdec.testing import parametrize_with_checks
from specdec.testing.laws import expected_tokens, hazard_defect, one_round, several_rounds, target_law
from specdec.testing.tolerances import ROUND_LAW, TREE_PASS
from specdec.tree import check, draw_parents, path_to
from specdec.types import PAD
from specdec.verifiers import TreeVerifier
from specdec.warp import Warper

pytestmark = pytest.mark.slow

V = 11
TARGET = TinyTarget(V, seed=3)
DRAFT = TinyTarget(V, hidden_size=16, num_layers=1, seed=4)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]
EXACT = TREE_PASS[torch.float64]
A_ROUND = object.__new__(Round)
"""Says that a commit is no prompt; a draft model reads nothing else of a round."""
GROWERS = {
    "iid": iid(2, 2),
    "without replacement": without_replacement(3, 1),
    "mixed": mixed(3, 2, 1),
    "points": points(2),
    "merged": iid(3, 2, merge=True),
}


class Changed:
    """A model whose logits are something else, and that keeps a list of its passes."""

    def __init__(self, inner: TinyTarget, change: Any = lambda logits: logits) -> None:
        self.inner, self.change, self.facts, self.new_cache = inner, change, inner.facts, inner.new_cache
        self.passes: list[tuple[int, bool]] = []

    def forward(self, tokens: Any, *args: Any, logits: bool, **kwargs: Any) -> Any:
        self.passes.append((tokens.shape[1], logits))
        found, features = self.inner.forward(tokens, *args, logits=logits, **kwargs)
        return (self.change(found) if logits else found), features


def begin(drafter: ModelDrafter, prompts: Sequence[Sequence[int]], *, greedy: bool = False) -> Any:
    batch = len(prompts)
    state = drafter.begin(Context(batch, TARGET.facts, Warper([], batch=batch), greedy, 64, drafter.needs))
    return drafter.observe(state, Commit(*pad_rows(prompts, 0)))


def propose(drafter: ModelDrafter, state: Any, pending: Sequence[int], budget: Budget, seed: int = 0) -> DraftTree:
    batch, root = range(len(pending)), torch.tensor(pending)
    tree = drafter.propose(
        state, root, budget, CounterRng([seed + row for row in batch]).round(batch, [0] * len(batch), torch.device("cpu"))
    )
    check(tree, root, budget, V, sums=True)
    return tree


def paths(tree: DraftTree) -> list[dict[int, list[int]]]:
    """Of each row the drafted tokens from the root down to each node."""
    found: list[dict[int, list[int]]] = [{} for _ in tree.tokens]
    for node in range(tree.tokens.shape[1]):
        path, count = path_to(tree.parents, torch.full_like(tree.tokens[:, 0], node))
        for row, (nodes, n) in enumerate(zip(path.tolist(), count.tolist(), strict=True)):
            if tree.parents[row, node] != PAD:
                found[row][node] = [int(tree.tokens[row, i]) for i in nodes[1:n]]
    return found


# ------------------------------------------------------------------------------------------------- what is drawn, and kept


def law_after(text: Sequence[int], prompt: int, processors: Sequence[Any]) -> torch.Tensor:
    """By a dense pass over each beginning; processors are shown what comes behind the prompt, token by token."""
    own = copy.deepcopy(list(processors))
    scores = torch.empty(0)
    for length in range(prompt + 1 if own else len(text), len(text) + 1):
        ids = torch.tensor([text[:length]])
        scores = DRAFT(ids)
        for processor in own:
            scores = processor(ids, scores)
    return scores[0].softmax(-1)


def drawn_from(tree: DraftTree, row: int, text: Sequence[int], prompt: int, processors: Sequence[Any]) -> None:
    """Every draw of a row against the law that its path has."""
    above, below = paths(tree)[row], draw_parents(tree)[row].tolist()
    nodes, kinds, laws = (part[row].tolist() for part in (tree.draws.node, tree.draws.kind, tree.draws.law))
    known = {parent: law_after([*text, *above[parent]], prompt, processors) for parent in set(below) - {PAD}}
    top = {parent: iter(law.argsort(descending=True).tolist()) for parent, law in known.items()}
    chosen: dict[int, list[int]] = {parent: [] for parent in known}
    for node, parent, kind in zip(nodes, below, kinds, strict=True):
        if node >= 0 and kind == Kind.POINT:
            chosen[parent].append(int(tree.tokens[row, node]))
            assert chosen[parent][-1] == next(top[parent])
    for node, parent, kind, number in zip(nodes, below, kinds, laws, strict=True):
        if node >= 0 and kind != Kind.POINT:
            law = known[parent].index_fill(0, torch.tensor(chosen[parent], dtype=torch.int64), 0.0)
            torch.testing.assert_close(tree.laws[row, number], law / law.sum(), atol=EXACT, rtol=0)


def holds_its_text(cache: Any, texts: Sequence[Sequence[int]]) -> None:
    """The cache gives the law that a dense pass over the same tokens gives, with one more token behind them."""
    probe, batch = 5, len(texts)
    cache.open(1)
    mask = cache.mask(torch.ones(batch, 1, 1, dtype=torch.bool))
    logits, _ = DRAFT.forward(torch.full((batch, 1), probe), torch.tensor(cache.lengths)[:, None], mask, cache, logits=True)
    for row, (text, length) in enumerate(zip(texts, cache.lengths, strict=True)):
        torch.testing.assert_close(logits[row], DRAFT(torch.tensor([[*text[:length], probe]])), atol=EXACT, rtol=0)
    cache.rewind(cache.lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "processors", [[], [RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(6)], [Memory()]], ids=["raw", "pure", "memory"]
)
@pytest.mark.parametrize("name", GROWERS)
@settings(max_examples=10)
@given(data=st.data())
def test_every_node_is_drawn_from_the_law_of_its_path(name, processors, data):
    """Over some rounds, whatever was accepted, for rows of their own lengths and budgets."""
    token = st.integers(0, V - 1)
    drafter = ModelDrafter(DRAFT, grow=GROWERS[name], logits_processor=processors)
    texts = data.draw(st.lists(st.lists(token, max_size=4), min_size=1, max_size=3))
    state, prompts = begin(drafter, texts), [len(text) for text in texts]
    for number in range(data.draw(st.integers(1, 3))):
        pending = [data.draw(token) for _ in texts]
        budget = Budget.of(*([data.draw(st.integers(0, most)) for _ in texts] for most in (8, 3, 3)))
        tree = propose(drafter, state, pending, budget, 100 * number)
        new, kept = [], []
        for row, (text, root) in enumerate(zip(texts, pending, strict=True)):
            drawn_from(tree, row, [*text, root], prompts[row], processors)
            path = data.draw(st.sampled_from(list(paths(tree)[row].values())))
            new.append([root, *path, *data.draw(st.lists(token, max_size=1))] if data.draw(st.integers(0, 5)) else [])
            drafted = len(paths(tree)[row]) > 1
            assert drafted == bool(min(budget.nodes[row], budget.depth[row], budget.width[row]))
            kept.append(len(text) + bool(new[-1]) if drafted else None)
        state = drafter.observe(state, Commit(*pad_rows(new, 0)), A_ROUND)
        texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
        assert all(n in (None, length) for n, length in zip(kept, state.cache.lengths, strict=True))  # the pending token alone stays read
        holds_its_text(state.cache, texts)
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(len(texts))))[: data.draw(st.integers(1, len(texts)))]
            state = drafter.select(state, order)
            texts, prompts = ([part[row] for row in order] for part in (texts, prompts))


def test_a_level_is_one_pass_over_the_nodes_above_it():
    model = Changed(DRAFT)
    drafter = ModelDrafter(model, grow=mixed(2, 2, 1))
    state = begin(drafter, [[1, 2, 3]])
    tree = propose(drafter, state, [4], Budget.of(10))
    assert model.passes == [(3, False), (1, True), (2, True), (6, True)] and tree.tokens.shape == (1, 11)
    accepted = [4, *next(path for path in paths(tree)[0].values() if len(path) == 2)]
    state = drafter.observe(state, Commit(*pad_rows([accepted], 0)), A_ROUND)
    propose(drafter, state, [5], Budget.of(2))
    assert model.passes[4:] == [(3, True)]  # what was accepted and the new pending token; of the branches nothing was kept
    propose(drafter, state, [5], Budget.of(0))
    assert len(model.passes) == 5


@pytest.mark.parametrize("sample", [True, False])
def test_a_tree_without_branches_is_the_chain(sample):
    """Which is drawn another way, from a cache that keeps what was drafted."""
    one, other = (ModelDrafter(DRAFT, grow=grow, sample=sample) for grow in (chain(), iid(1, 1)))
    for seed in range(5):
        found = []
        for drafter in (one, other):
            state = begin(drafter, [[1, 2], [3]])
            first = propose(drafter, state, [4, 5], Budget.of([4, 2]), seed)
            state = drafter.observe(state, Commit(*pad_rows([[4, int(first.tokens[0, 1])], [5, 9]], 0)), A_ROUND)
            found.append((first, propose(drafter, state, [6, 7], Budget.of([3, 4]), seed)))
        for a, b in zip(*found, strict=True):
            assert a.parents.equal(b.parents) and torch.where(a.parents == PAD, 0, a.tokens).equal(
                torch.where(b.parents == PAD, 0, b.tokens)
            )
            assert a.draws.kind.equal(b.draws.kind) or not sample
            if sample:
                torch.testing.assert_close(a.laws[a.draws.node >= 0], b.laws[b.draws.node >= 0], atol=EXACT, rtol=0)


@pytest.mark.parametrize("pure", [True, False])
def test_a_processor_that_refuses_a_drafted_token_ends_the_draft_below_it(pure):
    """And nowhere else: the same tree grows beside it."""
    tokens, grow, budget, lost = {0, 1, 2, 3, 4}, mixed(3, 2), Budget.of([9, 9, 9, 0]), set()
    drafters = [ModelDrafter(DRAFT, grow=grow, logits_processor=processors) for processors in ([Refuses(tokens, pure)], [])]
    for seed in range(4):
        some, whole = (propose(d, begin(d, [[1, 2], [], [3], [4]]), [7, 8, 9, 10], budget, 10 * seed) for d in drafters)
        for own, every in zip(*map(paths, (some, whole)), strict=True):
            assert own == {node: path for node, path in every.items() if tokens.isdisjoint(path[:-1])}
            lost.add(len(every) - len(own))
    assert len(lost) > 3
    one = drafters[0]  # what is really there it may refuse as well: that is for the target's own processors to say
    assert [len(own) for own in paths(propose(one, begin(one, [[5], [6], [6]]), [0, 1, 7], Budget.of([2, 2, 2])))] == [1, 1, 3]
    assert propose(one, begin(one, [[5], [6]]), [0, 1], Budget.of([2, 2])).tokens.shape == (2, 1)


def test_what_a_processor_missed_is_missing_for_good():
    """It refused a token that stayed, so what it would remember is not known; its mate drafts on."""
    drafter = ModelDrafter(DRAFT, grow=mixed(2), logits_processor=[Refuses({0}, False)])
    state = begin(drafter, [[1], [2]])
    for pending, wanted in (([4, 5], [True, True]), ([0, 5], [False, True]), ([7, 7], [False, True]), ([7, 7], [False, True])):
        tree = propose(drafter, state, pending, Budget.of([2, 2]))
        assert [len(own) > 1 for own in paths(tree)] == wanted
        state = drafter.observe(state, Commit(*pad_rows([[token] for token in pending], 0)), A_ROUND)


class Seen(LogitsProcessor):
    """Keeps the last token of what precedes the draft in all that it is shown."""

    pure = True

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tokens += input_ids[:, 1].tolist()
        return scores


def test_of_rows_that_are_not_drafted_for_nothing_is_asked():
    seen = Seen()
    drafter = ModelDrafter(DRAFT, grow=mixed(2), logits_processor=[seen])
    propose(drafter, begin(drafter, [[1], [2]]), [8, 9], Budget.of([6, 0]))
    assert set(seen.tokens) == {8}


def test_a_smaller_context_than_the_targets_ends_drafting_and_not_the_text():
    draft = TinyTarget(V, num_layers=1, max_positions=12, seed=4)
    prompts, deepest = [[1, 2, 3], [4] * 15, [7]], set()
    options = {"planner": FixedPlanner(14, 3), "max_new_tokens": 20, "return_rounds": True}
    found = specdec.generate(TARGET, prompts, drafter=ModelDrafter(draft, grow=points(2)), **options)
    assert found.sequences.equal(specdec.generate(TARGET, prompts, drafter=NullDrafter(), max_new_tokens=20).sequences)
    lengths = [len(prompt) for prompt in prompts]
    for done in found.rounds:
        for row, own, emitted in zip(done.rows, paths(done.tree), done.emitted, strict=True):
            left = 20 - (lengths[row] - len(prompts[row])) - 1
            # the pending token is read at position length - 1, a parent of the deepest at 11 or before it
            assert max(map(len, own.values())) == max(0, min(3, left, 12 - (lengths[row] - 1)))
            deepest.add(max(map(len, own.values())))
            lengths[row] += len(emitted)
    assert deepest == {0, 1, 2, 3}


# --------------------------------------------------------------------------------------------------------------- the text


def test_of_a_model_that_drafts_for_itself_every_level_stands_when_greedy():
    for grow, depth in ((mixed(3, 2), 2), (points(2, 1), 3), (iid(1, 2), 3)):
        found = specdec.generate(
            TARGET, PROMPTS, drafter=ModelDrafter(TARGET, grow=grow), planner=FixedPlanner(9, 3), max_new_tokens=12, return_rounds=True
        )
        assert found.stats.attempted_by_depth == found.stats.accepted_by_depth and len(found.stats.accepted_by_depth) == depth
        assert found.sequences.equal(specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), max_new_tokens=12).sequences)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("mixed", {"repetition_penalty": 1.3, "top_k": 5}), ("merged", {"logits_processor": [Memory()]})]
)
def test_a_text_comes_out_of_a_batch_as_it_does_alone(name, options):
    drafter = ModelDrafter(DRAFT, grow=GROWERS[name])
    options = {"drafter": drafter, "planner": FixedPlanner(8, 3), "do_sample": True, "max_new_tokens": 10, **options}
    batch = specdec.generate(TARGET, PROMPTS, seed=[7, 8, 9], **options)
    assert batch.stats.accepted > 0
    for prompt, seed, new in zip(PROMPTS, (7, 8, 9), batch.new_tokens, strict=True):
        assert specdec.generate(TARGET, [prompt], seed=[seed], **options).new_tokens[0].equal(new)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_law_are_a_bad_guess_and_no_error(bad):
    def spoil(logits: torch.Tensor) -> torch.Tensor:
        return torch.where(logits[..., :1] > 0, bad, logits)

    drafter, options = ModelDrafter(Changed(DRAFT, spoil), grow=mixed(2)), {"max_new_tokens": 6, "planner": FixedPlanner(6, 2)}
    found, plain = (specdec.generate(TARGET, PROMPTS, drafter=d, **options) for d in (drafter, NullDrafter()))
    assert found.sequences.equal(plain.sequences)
    found = specdec.generate(TARGET, PROMPTS, drafter=drafter, do_sample=True, seed=[3, 4, 5], **options)
    alone = specdec.generate(TARGET, PROMPTS[1:2], drafter=drafter, do_sample=True, seed=[4], **options)
    assert alone.new_tokens[0].equal(found.new_tokens[1])
    drafter = ModelDrafter(Changed(DRAFT, lambda logits: torch.full_like(logits, bad)), grow=iid(2))
    tree = propose(drafter, begin(drafter, [[1]]), [2], Budget.of(6))
    assert tree.tokens[0].tolist() == [2, *[0] * 6] and tree.laws[0].tolist() == [[1.0] + [0.0] * (V - 1)] * 3


# ---------------------------------------------------------------------------------------------------------------- the law

TINY = TinyTarget(3, hidden_size=16, seed=5)


def grown(grow: Grower, vocab_size: int = 3, change: Any = lambda logits: logits, **settings: Any) -> ModelDrafter:
    limit = settings.pop("max_positions", 512)
    return ModelDrafter(
        Changed(TinyTarget(vocab_size, hidden_size=16, num_layers=1, seed=6, max_positions=limit), change), grow=grow, **settings
    )


LAWS = {
    "merged": grown(iid(2, merge=True), 2),
    "without replacement, truncated": grown(without_replacement(2), logits_processor=[TopKLogitsWarper(2)]),
    "mixed": grown(mixed(2)),
    "points": grown(mixed(2), sample=False),
    "refused": grown(mixed(2), logits_processor=[Refuses({1}, False)]),
    "larger vocabulary": grown(mixed(2), 5),
    "smaller vocabulary": grown(without_replacement(2), 2),
    "smaller context": grown(mixed(2), max_positions=4),
    "nonsense": grown(without_replacement(2), 3, lambda logits: logits.where(logits > 1.0, torch.nan)),
    "early exit": EarlyExitDrafter(TINY, 1, grow=mixed(2)),
}


EAGER = ("mixed", "refused", "larger vocabulary", "nonsense", "early exit")
DEFERRED = ("merged", "without replacement, truncated", "mixed", "points", "smaller vocabulary", "smaller context")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "acceptor"), [*((name, RejectionAcceptor()) for name in EAGER), *((name, TraversalAcceptor()) for name in DEFERRED)],
    ids=[*(f"{name}, rejection" for name in EAGER), *(f"{name}, traversal" for name in DEFERRED)],
)  # fmt: skip
def test_the_law_of_several_rounds_is_the_targets(name, acceptor):
    verifier, prompt = TreeVerifier(TINY), (1, 2)
    law = several_rounds(LAWS[name], verifier, acceptor, [prompt], (3, 2, 2))[prompt]
    assert max(map(len, law)) >= 4  # something is accepted
    assert hazard_defect(law, target_law(verifier, prompt)) <= ROUND_LAW


CHECKED = [LAWS["merged"], grown(mixed(2), logits_processor=[Memory()])]


@pytest.mark.slow
@parametrize_with_checks(CHECKED, verifier=TreeVerifier(TINY), plans=[(3, 2, 2)])
def test_checks(check):
    check()


def test_a_draft_model_accepts_at_a_mixed_level_what_the_closed_form_says():
    verifier, prompt, drafter = TreeVerifier(TARGET), (1, 2), ModelDrafter(DRAFT, grow=mixed(3))
    p, q = (model(torch.tensor([prompt]))[0].softmax(-1) for model in (TARGET, DRAFT))
    top = q.argsort(descending=True)[:2]
    rest = q.index_fill(0, top, 0.0)
    wanted = float(p[top].sum() + torch.minimum(p, rest / rest.sum()).index_fill(0, top, 0.0).sum())
    law = one_round(drafter, verifier, RejectionAcceptor(), [prompt], (3, 1, 3))[prompt]
    assert abs(expected_tokens(law) - 1 - wanted) < 1e-12
    assert max(map(len, law)) == 2 and hazard_defect(law, target_law(verifier, prompt)) <= ROUND_LAW


def test_two_models_are_not_drawn_from():
    with pytest.raises(ValueError, match=r"grow: .*'iI'.* draws from two models"):
        ModelDrafter(DRAFT, grow=Grower(("iI",)))
