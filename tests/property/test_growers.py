"""Shapes that are irregular, or found while drafting, against slow ones in plain Python; and what drafters make of them."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specdec
from specdec import Budget, FixedPlanner, Kind, NullDrafter, grow
from specdec.drafters import EarlyExitDrafter, ModelDrafter
from specdec.models.table import TableModel
from specdec.models.tiny import TinyTarget
from specdec.rng import CounterRng, CounterSource
from specdec.testing import parametrize_with_checks
from specdec.testing.battery import battery
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import stand
from specdec.tree import check
from specdec.types import PAD
from specdec.verifiers import TreeVerifier

V = 6


def path(tokens, parents, node):
    return () if node == 0 else (*path(tokens, parents, parents[node]), tokens[node])


def law_after(seed, above, zeros=0.0, size=V):
    """Some law that belongs to a row and the tokens above; without ties."""
    rng = random.Random(f"{seed}{above}")
    weights = [0.0 if rng.random() < zeros else rng.uniform(0.05, 1) for _ in range(size)]
    weights = weights if any(weights) else [1.0, *weights[1:]]
    return [w / sum(weights) for w in weights]


def drawn(shape, budget, seeds, law=law_after, scores=False, shut=()):
    """The token paths of each row's tree, in its order; what was explored on the way must be little, and the tree a tree."""
    pending = torch.arange(len(seeds)) % V
    growth, source = shape.begin(pending, budget), CounterRng(seeds).round(range(len(seeds)), [3] * len(seeds), torch.device("cpu"))
    asked = []
    while growth.more:
        rows = list(zip(growth.tokens.tolist(), growth.parents.tolist(), seeds, strict=True))
        columns = range(growth.last.start, growth.last.stop)
        above = [[None if ps[c] == PAD else path(ts, ps, c) for c in columns] for ts, ps, _ in rows]
        laws = torch.tensor([[law(s, p or ()) for p in paths] for paths, s in zip(above, seeds, strict=True)], dtype=torch.float64)
        asked.append(above)
        open = torch.tensor([[p not in shut for p in paths] for paths in above])
        growth.level((7 + laws.log()).float() if scores else laws, source, open, floor=-torch.inf if scores else 0.0)
    tree = growth.tree()
    check(tree, pending, budget, V, sums=True)
    assert tree.draws.kinds <= shape.draws
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
    return [[path(ts, ps, node) for node in range(1, len(ts)) if ps[node] != PAD] for ts, ps in rows], asked


budgets = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3)

# ----------------------------------------------------------------------------------------------------------------- dynamic


def ranked(width, nodes, depth, wide, law):
    """Algorithm of EAGLE-2 for one row: expand, keep all that was met, rank at the end."""
    met, frontier = [], [((), 0.0)]
    for _ in range(depth if nodes else 0):
        level = []
        for above, worth in frontier:
            best = sorted(enumerate(law(above)), key=lambda pair: -pair[1])[: min(width, wide)]
            level += [((*above, token), worth + math.log(mass)) for token, mass in best if mass > 0]
        met += level
        frontier = sorted(level, key=lambda pair: -pair[1])[:width]
    kept = sorted(met, key=lambda pair: -pair[1])[:nodes]
    return {above for above, _ in kept}


@given(each=budgets, width=st.integers(1, V + 2), seed=st.integers(0, 999), zeros=st.sampled_from([0.0, 0.5, 0.9]), scores=st.booleans())
def test_a_dynamic_tree_is_what_the_slow_one_finds(each, width, seed, zeros, scores):
    seeds = [seed + row for row in range(len(each))]

    def law(s, above):
        return law_after(s, above, zeros)

    found, asked = drawn(grow.dynamic(width), Budget.of(*zip(*each, strict=True)), seeds, law, scores)
    for row, (nodes, depth, wide) in enumerate(each):
        assert len(set(found[row])) == len(found[row])
        assert set(found[row]) == ranked(width, nodes, depth, wide, lambda above, s=seeds[row]: law(s, above))
        assert found[row] == sorted(found[row], key=len)  # in the order in which they were met
        (alone,), _ = drawn(grow.dynamic(width), Budget.of(nodes, depth, wide), seeds[row : row + 1], law, scores)
        assert alone == found[row]
    assert all(len(level[0]) <= width for level in asked)  # a level asks for no more laws than that


TIED = [1 / V] * V, [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@given(nodes=st.integers(1, 20), width=st.integers(1, 5), tied=st.sampled_from(TIED))
def test_among_equals_parents_are_kept(nodes, width, tied):
    """`check`, which `drawn` calls, refuses a node without its parent."""
    (found,), _ = drawn(grow.dynamic(width), Budget.of(nodes, 3), [0], lambda seed, above: tied)
    some = min(width, sum(mass > 0 for mass in tied))
    explored, total = 1, 0
    for _ in range(min(3, nodes)):
        total, explored = total + explored * some, min(width, explored * some)
    assert len(found) == min(nodes, total)
    assert all(tied[token] > 0 for above in found for token in above)


def test_what_is_explored_may_be_dropped_and_what_is_unlikely_beside_the_best_path_is():
    sure = {(): [0.6, 0.4, 0, 0, 0, 0], (0,): [0.9, 0.1, 0, 0, 0, 0], (0, 0): [0.9, 0.1, 0, 0, 0, 0]}
    (found,), asked = drawn(grow.dynamic(2), Budget.of(3, 3), [0], lambda seed, above: sure.get(above, [0.5, 0.5, 0, 0, 0, 0]))
    assert found == [(0,), (0, 0), (0, 0, 0)] and (1,) in asked[1][0]
    (found,), _ = drawn(grow.dynamic(2), Budget.of(3, 3), [0], lambda seed, above: sure.get(above, [0.5, 0.5, 0, 0, 0, 0]), shut=[(0, 0)])
    assert found == [(0,), (1,), (0, 0)]
    dropping = next(cell for cell in battery() if cell.shape.startswith("ranked"))
    at = stand(dropping.drafter, dropping.verifier, dropping.prompts)
    rows = range(len(dropping.prompts))
    source = CounterRng(rows).round(rows, at.positions, torch.device("cpu"))
    tree = dropping.drafter.propose(at.drafter, at.pending, Budget.of(*dropping.plan, batch=len(rows)), source)
    assert {int(n) for n in (tree.parents == 0).sum(-1)} == {1, 2}  # two were looked at everywhere


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_law_are_not_drafted_from(bad):
    scores = torch.tensor([0.0, 1.0, bad, 0.5])
    for shape in (grow.dynamic(3), grow.static([(0,), (2,)])):
        growth = shape.begin(torch.tensor([1]), Budget.of(3, 1))
        growth.level(scores[None, None], CounterSource(torch.tensor([0]), torch.tensor([0])), floor=-torch.inf)
        tree = growth.tree()
        check(tree, torch.tensor([1]), Budget.of(3, 1), 4)
        if bad < 0:
            assert 2 not in tree.tokens[tree.parents != PAD].tolist()[1:]


@pytest.mark.parametrize("shape", [grow.dynamic(3), grow.static([(0,), (2,), (2, 1)]), grow.static([(0,), (0, 0), (0, 1)], "w")], ids=str)
def test_growing_waits_for_no_device(shape):
    growth = shape.begin(torch.zeros(2, dtype=torch.int64, device="meta"), Budget.of([5, 2], 2))
    source = CounterSource(*(torch.zeros(2, dtype=torch.int64, device="meta") for _ in range(2)))
    while growth.more:
        growth.level(torch.zeros(2, growth.last.stop - growth.last.start, V, device="meta"), source)
    tree = growth.tree()
    assert {part.device.type for part in (tree.tokens, tree.parents, tree.draws.node)} == {"meta"} and tree.height == 2


# ------------------------------------------------------------------------------------------------------------------ static

ranks = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


def closed(paths):
    return {path[:n] for path in paths for n in range(1, len(path) + 1)}


@given(each=budgets, choices=st.sets(ranks, max_size=5).map(closed), seed=st.integers(0, 999), zeros=st.sampled_from([0.0, 0.6]))
def test_a_static_tree_holds_the_tokens_of_its_ranks(each, choices, seed, zeros):
    shape, seeds = grow.static(sorted(choices, reverse=True)), [seed + row for row in range(len(each))]
    found, _ = drawn(shape, Budget.of(*zip(*each, strict=True)), seeds, lambda s, above: law_after(s, above, zeros))
    for row, (nodes, depth, wide) in enumerate(each):
        tokens = {(): ()}
        for number, choice in enumerate(sorted(choices, key=lambda path: (len(path), path))):
            elders = sum(other[:-1] == choice[:-1] and len(other) == len(choice) and other < choice for other in choices)
            if number < nodes and len(choice) <= depth and elders < wide and choice[:-1] in tokens:
                above = tokens[choice[:-1]]
                best = sorted(((-mass, t) for t, mass in enumerate(law_after(seeds[row], above, zeros)) if mass > 0))
                if choice[-1] < len(best):
                    tokens[choice] = (*above, best[choice[-1]][1])
        assert found[row] == list(tokens.values())[1:]


@given(choices=st.sets(ranks, max_size=3), seed=st.integers(0, 99))
def test_draws_without_replacement_fill_the_same_places(choices, seed):
    choices = {(*above[:-1], rank) for above in closed(choices) for rank in range(above[-1] + 1)}
    (found,), _ = drawn(grow.static(choices, "w"), Budget.of(len(choices), 3), [seed])
    shape = sorted((len(above), sum(other[:-1] == above for other in found if other)) for above in [(), *found])
    wanted = sorted((len(above), sum(other[:-1] == above for other in choices)) for above in [(), *choices])
    assert shape == wanted and grow.static(choices, "w").chosen() == grow.static(choices)


def test_what_is_no_tree_is_refused_by_the_name_of_what_is_missing():
    for choices, draw, said in (([(0,), (1, 0)], "p", r"\(1, 0\).*\(1,\)"), ([(0,), (2,)], "w", r"\(2,\).*\(1,\)"), ([()], "p", "choices"),
                                ([(-1,)], "p", "choices"), ([(0,)], "i", "choices, draw: got .*'i'")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            grow.static(choices, draw)
    with pytest.raises(ValueError, match="width, depth: got 0"):
        grow.dynamic(0)
    assert grow.static([(0,), (0, 3)]).chains and not grow.static([(0,), (3,)]).chains and grow.static([]).draws == frozenset()
    assert grow.static([(0,), (1,)], "w").draws == {Kind.WITHOUT_REPLACEMENT} and grow.dynamic(1).chains


def test_optimal_is_a_static_tree():
    assert grow.optimal([0.6, 0.3], 3) == grow.static([(0,), (1,), (0, 0)]) and grow.optimal([0.6, 0.3], 2, depth=1, draw="w").letter == "w"


# --------------------------------------------------------------------------------------------------------------- in drafters

TARGET, DRAFT = TinyTarget(11, seed=3), TinyTarget(11, hidden_size=16, num_layers=1, seed=4)
SHAPES = {
    "static": grow.static([(0,), (1,), (3,), (0, 0), (0, 2), (3, 0), (0, 0, 0)]),
    "static, drawn": grow.static([(0,), (1,), (0, 0), (0, 1), (1, 0)], "w"),
    "dynamic": grow.dynamic(3),
    "optimal": grow.optimal([0.5, 0.2, 0.1], 8),
}


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_text_is_the_plain_one_and_a_sampled_row_is_as_alone(name):
    prompts, options = [[1, 2, 3], [4], [5, 6, 5, 6]], {"max_new_tokens": 12, "planner": FixedPlanner(6, 3), "return_rounds": True}
    plain = specdec.generate(TARGET, prompts, drafter=NullDrafter(), **options)
    drafters = [
        ModelDrafter(DRAFT, grow=SHAPES[name]),
        EarlyExitDrafter(TARGET, 1, grow=SHAPES[name]),
        ModelDrafter(TARGET, grow=SHAPES[name]),
    ]
    for drafter in drafters:
        found = specdec.generate(TARGET, prompts, drafter=drafter, **options)
        assert found.sequences.equal(plain.sequences)
    assert found.stats.accepted_by_depth == found.stats.attempted_by_depth  # who drafts for itself is right
    sampled = specdec.generate(TARGET, prompts, drafter=ModelDrafter(DRAFT, grow=SHAPES[name]), do_sample=True, seed=[7, 8, 9], **options)
    for prompt, seed, new in zip(prompts, (7, 8, 9), sampled.new_tokens, strict=True):
        alone = specdec.generate(TARGET, [prompt], drafter=ModelDrafter(DRAFT, grow=SHAPES[name]), do_sample=True, seed=[seed], **options)
        assert alone.new_tokens[0].equal(new)
    assert sampled.stats.accepted > 0


class Counted:
    """A model that keeps the number of nodes of its passes."""

    def __init__(self, inner):
        self.inner, self.facts, self.new_cache, self.passes = inner, inner.facts, inner.new_cache, []

    def forward(self, tokens, *args, **kwargs):
        self.passes.append(tokens.shape[1])
        return self.inner.forward(tokens, *args, **kwargs)


def test_of_a_dynamic_tree_the_explored_nodes_alone_are_run():
    model = Counted(DRAFT)
    specdec.generate(TARGET, [[1, 2, 3]], drafter=ModelDrafter(model, grow=grow.dynamic(3)), planner=FixedPlanner(20, 4), max_new_tokens=6)
    assert max(model.passes) == 3 * 3  # of 3 + 3 * 9 that were met, three of each level but the last; the root's law was known


TINY = TinyTarget(3, hidden_size=16, seed=5)
SMALL = {
    "static": grow.static([(0,), (2,), (0, 1)]), "drawn": grow.static([(0,), (1,), (1, 0)], "w"), "dynamic": grow.dynamic(2),
}  # fmt: skip


@pytest.mark.slow
@parametrize_with_checks(
    [ModelDrafter(TinyTarget(3, hidden_size=16, num_layers=1, seed=6), grow=shape) for shape in SMALL.values()],
    verifier=TreeVerifier(TINY), plans=[(3, 2, 2), (2, 2, 2)],
)  # fmt: skip
def test_checks(check):
    check()


@pytest.mark.slow
@parametrize_with_checks([TableDrafter(TableModel.random(4, 2, seed=1, zeros=0.3), shape) for shape in SMALL.values()])
def test_checks_of_the_table_drafter(check):
    check()
