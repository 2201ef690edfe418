"""Trees of heads that read pairs against a drafter that keeps nothing: for each node it reads all that lies above it anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_heads import config, features, filled, mtp, said
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec import Budget, Commit, Context, DraftTree, PairDrafter, Round
from specdec.drafters.grow import chain, dynamic, iid, mixed, points, static, without_replacement
from specdec.drafters.growth import drawable
from specdec.models.tiny import TinyTarget
from specdec.ragged import pad_rows
from specdec.rng import CounterRng
from specdec.testing.tolerances import TREE_PASS
from specdec.tree import check
from specdec.warp import Warper

V = 11
TARGET = TinyTarget(V, seed=3)
EXACT = TREE_PASS[torch.float64]
A_ROUND = object.__new__(Round)
"""Says that a commit is no prompt; the drafter reads nothing else of a round."""
SHAPES = {
    "chain": chain(), "mixed": mixed(3, 2, 1), "points": points(3, 2), "dynamic": dynamic(3), "merged": iid(3, 2, merge=True),
    "without replacement": without_replacement(2), "static": static([(0,), (2,), (0, 1), (0, 1, 0), (2, 0)]),
}  # fmt: skip
HEADS = [
    (1, {}), (1, {"bias": True, "own_embedding": True}), (3, {}), (3, {"norm_before_residual": True}), (3, {"norm_before_fc": True}),
    (3, {"fc_norm": True}), (3, {"norm_output": True}), (3, {"own_embedding": True, "bias": True}), (3, {"draft_vocab_size": V}),
    (3, {"norm_output": True, "fc_norm": True, "norm_before_residual": True, "layers": (2, 0)}), 
    ("mtp", {}), ("mtp", {"draft_vocab_size": V}),
]  # fmt: skip
PROCESSORS = {
    "none": [],
    "free": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)],
    "reading": [RepetitionPenaltyLogitsProcessor(1.5), TopPLogitsWarper(0.8)],
}


def slow_law(drafter: PairDrafter, text: list[int], path: list[int], processors: list[Any]) -> torch.Tensor:
    """The processed scores after `path` below the last token of the text, from the very beginning."""
    head, ids = drafter.head, torch.tensor([text])
    found = features(TARGET, ids[:, :-1], drafter.needs.layers)
    hidden = head.fuse(TARGET.net.norm(found) if head.config.normed else found)
    tokens = ids[:, 1:]
    out = said(head, TARGET, tokens, hidden)
    for token in path:
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
        hidden = torch.cat([hidden, out[:, -1:]], 1)
        out = said(head, TARGET, tokens, hidden)
    scores = torch.full((1, V), -torch.inf, dtype=torch.float64)
    scores[0, head.ids] = head.rank(out[0, -1], lambda final: TARGET.net.head(final)[head.ids])
    for processor in processors:
        scores = processor(torch.tensor([[*text, *path]]), scores)
    return scores[0]


def slow_tree(drafter: PairDrafter, grower: Any, text: list[int], budget: tuple[int, int, int], seed: int, points_alone: bool,
              processors: list[Any]) -> DraftTree:  # fmt: skip
    """What one row should draft: the growth is the same, but each law comes from `slow_law`."""
    source = CounterRng([seed]).round([0], [len(text) - 1], torch.device("cpu"))
    nodes, depth, width = budget
    growth = grower.begin(torch.tensor(text[-1:]), Budget.of([nodes], [min(nodes, depth)], [width]))
    while growth.more and len(text) > 1:
        laws = []
        for column in range(growth.last.start, growth.last.stop):
            path: list[int] = []
            while column > 0:
                path.insert(0, int(growth.tokens[0, column]))
                column = int(growth.parents[0, column])
            laws.append(slow_law(drafter, text, path, processors) if column == 0 else torch.zeros(V, dtype=torch.float64))
        scores = torch.stack(laws)[None]
        growth.level(scores if points_alone else drawable(scores), source, floor=-torch.inf if points_alone else 0.0)
    return growth.tree()


def placed(tree: DraftTree, row: int) -> tuple[list[tuple[int, int, int, int]], list[torch.Tensor]]:
    """Every drafted node that is there, its parent's number among them, the draws' kinds, and the laws that they were drawn from."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    there = [node for node, parent in enumerate(parents) if parent >= 0 or node == 0]
    number = {node: i for i, node in enumerate(there)} | {-1: -1}
    drawn = zip(tree.draws.node[row].tolist(), tree.draws.kind[row].tolist(), tree.draws.law[row].tolist(), strict=True)
    draws = [(number[node], kind, law) for node, kind, law in drawn if node >= 0]
    nodes = [(tokens[node], number[parents[node]], -1, -1) for node in there]
    laws = [] if tree.laws is None else [tree.laws[row, law] for _, _, law in draws if law >= 0]
    return [*nodes, *((node, kind, -2, law >= 0) for node, kind, law in draws)], laws


def compare(tree: DraftTree, row: int, wanted: DraftTree) -> None:
    (nodes, laws), (nodes_too, laws_too) = placed(tree, row), placed(wanted, 0)
    assert nodes == nodes_too
    for law, law_too in zip(laws, laws_too, strict=True):
        torch.testing.assert_close(law, law_too, atol=EXACT, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=12)
@given(data=st.data())
def test_the_trees_are_those_of_a_drafter_that_keeps_nothing(shape, data):
    """Over several rounds, of rows that come and go, whatever was drafted and whatever of it was accepted."""
    version, flags = data.draw(st.sampled_from(HEADS))
    head = mtp(TARGET, **flags) if version == "mtp" else filled(config(version, TARGET, **flags))
    greedy, sample = data.draw(st.booleans()), data.draw(st.booleans())
    processors = PROCESSORS[data.draw(st.sampled_from(sorted(PROCESSORS)))]
    drafter = PairDrafter(head, TARGET, grow=SHAPES[shape], sample=sample)
    alone = greedy or not sample or SHAPES[shape].draws <= points(1).draws
    grower = SHAPES[shape].chosen() if alone else SHAPES[shape]
    token, rows = st.integers(0, V - 1), data.draw(st.integers(1, 3))
    texts: list[list[int]] = [[] for _ in range(rows)]
    warper = Warper([[processor] * rows for processor in processors], batch=rows)
    state = drafter.begin(Context(rows, TARGET.facts, warper, greedy, 64, drafter.needs))

    def observe(new: list[list[int]], done: Round | None) -> None:
        nonlocal state
        for text, more in zip(texts, new, strict=True):
            text += more
        tokens, count = pad_rows(new, 0)
        found = torch.zeros(len(new), tokens.shape[1], len(drafter.needs.layers) * 32, dtype=torch.float64)
        for row, (text, more) in enumerate(zip(texts, new, strict=True)):
            if more:
                found[row, : len(more)] = features(TARGET, torch.tensor([text]), drafter.needs.layers)[0, -len(more) :]
        state = drafter.observe(state, Commit(tokens, count, found), done)

    for _ in range(data.draw(st.integers(0, 2))):
        observe([data.draw(st.lists(token, max_size=5)) for _ in texts], None)
    for number in range(data.draw(st.integers(1, 3))):
        pending = [data.draw(token) for _ in texts]
        limits = [tuple(data.draw(st.integers(0, high)) for high in (6, 3, 3)) for _ in texts]
        budget = Budget.of(*map(list, zip(*limits, strict=True))).clamp(torch.tensor([9] * len(texts)))
        limits = list(zip(budget.nodes.tolist(), budget.depth.tolist(), budget.width.tolist(), strict=True))
        seeds = [100 * number + row for row in range(len(texts))]
        for _ in range(data.draw(st.integers(1, 2))):  # a draft that nobody observed is forgotten
            source = CounterRng(seeds).round(range(len(texts)), [len(text) for text in texts], torch.device("cpu"))
            tree = drafter.propose(state, torch.tensor(pending), budget, source)
        check(tree, torch.tensor(pending), budget, V, sums=True)
        for row, (text, root, limit, seed) in enumerate(zip(texts, pending, limits, seeds, strict=True)):
            compare(tree, row, slow_tree(drafter, grower, [*text, root], limit, seed, alone, processors))
        new = []
        for row, root in enumerate(pending):
            below = [int(tree.tokens[row, n]) for n, parent in enumerate(tree.parents[row].tolist()) if parent == 0]
            accepted = [root, *below[: data.draw(st.integers(0, 1))], *data.draw(st.lists(token, max_size=3))]
            new.append(accepted if data.draw(st.integers(0, 4)) else [])
        observe(new, A_ROUND)
        if data.draw(st.booleans()):
            kept = data.draw(st.permutations(range(len(texts))))[: data.draw(st.integers(1, len(texts)))]
            state, texts = drafter.select(state, kept), [texts[row] for row in kept]
