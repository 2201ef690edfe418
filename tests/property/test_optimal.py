"""The tree that promises the most: against every tree of its size, against published trees, and against what a draft really does."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec
from specdec import FixedPlanner
from specdec.drafters import ModelDrafter
from specdec.drafters.grow import points
from specdec.drafters.optimal import best_choices, expected_tokens
from specdec.models.tiny import TinyTarget
from specdec.planning import Rates, by_depth, by_rank

# Medusa's tree for Vicuna 7B, 63 nodes, and EAGLE-1's, 25 nodes, as published: how many children the node at each path has.
MEDUSA = {
    (): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, **{(rank,): 1 for rank in range(4, 10)}, (0, 0): 10, (0, 1): 3, (0, 2): 2,
    **{(0, rank): 1 for rank in range(3, 8)}, (1, 0): 2, (2, 0): 1, (0, 0, 0): 2,
}  # fmt: skip
EAGLE = {(): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1, (0, 0, 0): 3, (0, 0, 0, 0): 2}
VECTORS = {
    "measured": [0.56, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01],
    "sharp": [0.85, 0.05, 0.02, 0.01],
    "flat": [0.08] * 10,
    "not in order": [0.3, 0.05, 0.25, 0.1, 0.02, 0.03, 0.01, 0.01, 0.01, 0.01],
    "one": [0.9],
}


def paths(children):
    return [(*above, rank) for above, count in children.items() for rank in range(count)]


@cache
def trees(nodes, depth, widest):
    """Every tree with so many nodes in which each has its elder siblings."""

    def forests(left, depth, room):
        yield ()
        if not left or not depth or not room:
            return
        for first in range(1, left + 1):
            for below in forests_of(first - 1, depth - 1):
                for rest in forests_of_up_to(left - first, depth, room - 1):
                    yield (below, *rest)

    def forests_of(size, depth):
        return [forest for forest in forests(size, depth, widest) if count(forest) == size]

    def forests_of_up_to(left, depth, room):
        return list(forests(left, depth, room))

    return forests_of(nodes, depth)


def count(forest):
    return sum(1 + count(below) for below in forest)


def written(forest, above=()):
    return [path for rank, below in enumerate(forest) for path in [(*above, rank), *written(below, (*above, rank))]]


def height(choices):
    return max(map(len, choices), default=0)


rates = st.lists(st.floats(0, 1), min_size=1, max_size=3)


@given(acceptance=rates, nodes=st.integers(0, 6), depth=st.integers(0, 4))
def test_no_tree_of_its_size_and_depth_promises_more(acceptance, nodes, depth):
    chosen = best_choices(acceptance, nodes, depth)
    assert len(chosen) <= nodes and height(chosen) <= depth and list(chosen) == sorted(chosen, key=lambda path: (len(path), path))
    best = max(expected_tokens(written(tree), acceptance) for size in range(nodes + 1) for tree in trees(size, depth, len(acceptance)))
    assert expected_tokens(chosen, acceptance) == pytest.approx(best, abs=1e-12)


@given(
    acceptance=rates, nodes=st.integers(0, 5), draft=st.floats(0, 0.5), first=st.floats(0.1, 2), more=st.floats(0, 0.5),
)  # fmt: skip
def test_no_tree_costs_less_for_its_tokens(acceptance, nodes, draft, first, more):
    def verify(size):
        return first + more * size

    def cost(choices):
        return (height(choices) * draft + verify(len(choices))) / expected_tokens(choices, acceptance)

    chosen = best_choices(acceptance, nodes, None, draft, verify)
    best = min(cost(written(tree)) for size in range(nodes + 1) for tree in trees(size, nodes, len(acceptance)))
    assert cost(chosen) == pytest.approx(best, rel=1e-9)


@given(acceptance=st.lists(st.floats(0.001, 1), min_size=1, max_size=6), nodes=st.integers(0, 40))
def test_where_elders_are_likelier_it_is_the_likeliest_nodes(acceptance, nodes):
    """Then no child is likelier than its parent or its elder sibling, so the best nodes one by one are a tree (OPT-Tree)."""
    acceptance = sorted(acceptance, reverse=True)
    total, open_nodes = 1.0, [*acceptance]
    for _ in range(nodes):
        best = max(open_nodes)
        total += best
        open_nodes.remove(best)
        open_nodes += [best * chance for chance in acceptance]
    assert expected_tokens(best_choices(acceptance, nodes), acceptance) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("published", [MEDUSA, EAGLE], ids=["Medusa", "EAGLE-1"])
def test_it_promises_no_less_than_published_trees(name, published):
    theirs = paths(published)
    assert len(theirs) == len(set(theirs)) == {id(MEDUSA): 63, id(EAGLE): 25}[id(published)]
    limited, free = (best_choices(VECTORS[name], len(theirs), depth) for depth in (height(theirs), None))
    ours, given, theirs = (expected_tokens(choices, VECTORS[name]) for choices in (free, limited, theirs))
    assert given >= theirs - 1e-12 and ours > theirs + 1e-3  # they were made for other rates


def test_expected_tokens_of_a_tree_worked_out_by_hand():
    assert expected_tokens([(0,), (1,), (0, 0), (1, 2)], [0.5, 0.25, 0.125]) == 1 + 0.5 + 0.25 + 0.25 + 0.25 * 0.125
    assert expected_tokens([(0,), (7,)], [0.5]) == 1.5 and expected_tokens([], []) == 1


def test_what_pays_is_drafted_and_nothing_else():
    assert best_choices([0.5, 0.0], 9, 3) == ((0,), (0, 0), (0, 0, 0))  # what is never accepted is left out
    assert best_choices([0.8], 4) == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)) and best_choices([], 4) == () == best_choices([0.9], 0)
    assert best_choices([0.3], 9, None, 1.0, lambda size: 1.0) == ()  # a level costs a round and gives less
    assert len(best_choices([0.5, 0.2], 32, None, 0.0, lambda size: 1 + 0.1 * size)) < len(best_choices([0.5, 0.2], 32))
    refused = [
        ({"acceptance": [1.2]}, "acceptance"),
        ({"acceptance": [float("nan")]}, "acceptance"),
        ({"nodes": -1}, "nodes"),
        ({"depth": -1}, "nodes"),
        ({"draft_cost": -1.0}, "nodes"),
        ({"verify_cost": lambda size: size}, "verify_cost"),
    ]
    for wrong, said in refused:
        with pytest.raises(ValueError, match=said):
            best_choices(**{"acceptance": [0.5], "nodes": 3, **wrong})


# ------------------------------------------------------------------------------------------------------------- measured rates


def test_rates_are_counted_where_the_text_came_by():
    target, draft = TinyTarget(11, seed=3), TinyTarget(11, hidden_size=16, num_layers=1, seed=4)
    found = specdec.generate(
        target, [[1, 2, 3], [4], [5, 6]], drafter=ModelDrafter(draft, grow=points(3, 2)), planner=FixedPlanner(9, 2), max_new_tokens=30,
        return_rounds=True, do_sample=True, seed=5,
    )  # fmt: skip
    counted = by_rank(found.rounds)
    assert sum(counted.accepted) == found.stats.accepted > 0 and len(counted.attempted) == 3
    assert counted.attempted[0] == sum(found.stats.attempted_by_depth) and counted.attempted[1] <= counted.attempted[0]
    assert counted.attempted[2] == found.stats.attempted_by_depth[0]  # the second level has two children a node
    again = [by_rank([done]) for done in found.rounds]
    assert sum(one.accepted[0] for one in again if one.accepted) == counted.accepted[0]
    itself = specdec.generate(
        target,
        [[1, 2, 3]],
        drafter=ModelDrafter(target, grow=points(3)),
        planner=FixedPlanner(12, 2),
        max_new_tokens=30,
        return_rounds=True,
    )
    assert by_rank(itself.rounds).rates == [1.0, 0.0, 0.0]  # ranks go from the likeliest on
    assert by_rank([]) == Rates((), ()) and Rates((1, 0), (4, 0)).rates == [0.25, 0.0]


def test_what_the_rates_promise_is_what_a_tree_gives():
    """Of the rounds in which nothing was cut: the nodes that the text came to, each with all its children, are the tree's own."""
    target = TinyTarget(11, seed=3)
    found = specdec.generate(
        target, [[1, 2]] * 4, drafter=ModelDrafter(TinyTarget(11, hidden_size=16, num_layers=1, seed=4), grow=points(3)),
        planner=FixedPlanner(3, 1), max_new_tokens=40, return_rounds=True, do_sample=True, seed=6,
    )  # fmt: skip
    whole = [done for done in found.rounds if not any(done.finished)]
    rounds, emitted = (sum(len(of(done)) for done in whole) for of in (lambda done: done.rows, lambda done: sum(done.emitted, ())))
    assert expected_tokens([(0,), (1,), (2,)], by_rank(whole).rates) == pytest.approx(emitted / rounds)


@given(acceptance=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=1, max_size=3), nodes=st.integers(0, 6))
def test_with_chances_of_their_own_at_each_depth_no_tree_promises_more(acceptance, nodes):
    """Every tree of its size whose elders come first, chances that fall with the rank; and unsorted ones, where no fewer are promised."""
    falling = [sorted(ranks, reverse=True) for ranks in acceptance]
    chosen = best_choices(falling, nodes)
    assert len(chosen) <= nodes and height(chosen) <= len(falling) and {path[:-1] for path in chosen} <= {(), *chosen}
    best = max(expected_tokens(written(tree), falling) for size in range(nodes + 1) for tree in trees(size, len(falling), 3))
    assert expected_tokens(chosen, falling) == pytest.approx(best, abs=1e-12)
    assert expected_tokens(best_choices(acceptance, nodes), acceptance) == pytest.approx(best, abs=1e-12)


def test_where_later_heads_are_worse_the_published_tree_of_medusa_is_not_better():
    rows = [[top * (0.35**rank) for rank in range(10)] for top in (0.56, 0.32, 0.20, 0.15, 0.12)]
    tree = paths(MEDUSA)
    assert expected_tokens(best_choices(rows, len(tree)), rows) > expected_tokens(tree, rows)
    assert max(map(len, best_choices(rows, 63, depth=2))) == 2
    with pytest.raises(ValueError, match="acceptance"):
        best_choices([[0.5], [1.5]], 4)


def test_counts_by_depth_are_those_by_rank_told_apart():
    drafter = ModelDrafter(TinyTarget(seed=1), grow=points(3, 2))
    found = specdec.generate(
        TinyTarget(), [[1, 2, 3], [4]], drafter=drafter, planner=FixedPlanner(9, 2), max_new_tokens=40, return_rounds=True
    )
    first, second = by_depth(found.rounds)
    every = by_rank(found.rounds)
    assert first.accepted[0] + second.accepted[0] == every.accepted[0] and first.attempted[2] == every.attempted[2]
    assert first.attempted[:1] == (found.stats.attempted_by_depth[0],) and len(second.attempted) == 2
    assert sum(first.accepted) == found.stats.accepted_by_depth[0] and sum(second.accepted) == found.stats.accepted_by_depth[1]
    assert by_depth([]) == []


def test_rates_by_depth_serve_every_draw():
    noisy = [[0.1, 0.5], [0.3, 0.2, 0.4]]
    assert specdec.grow.optimal(noisy, 4, draw="w").chains is False
    assert specdec.grow.optimal(noisy, 1).choices == ((1,),)
