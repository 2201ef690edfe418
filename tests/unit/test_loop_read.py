"""A round's outcome on the host: what comes over with a tree that lies elsewhere is what is there with one that does not."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.acceptors import RejectionAcceptor
from specdec.loop import _read
from specdec.rng import CounterRng
from specdec.testing.strategies import trees
from specdec.tree import check_answer, evidence
from specdec.types import Draws, Verification

V = 5


@given(trees(V, 3), st.integers(0, 99))
def test_a_tree_from_elsewhere_is_read_whole(tree, seed: int) -> None:
    logits = torch.randn(3, tree.tokens.shape[1], V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    verification = Verification(scores=logits)
    acceptance = RejectionAcceptor().accept(tree, verification, CounterRng([seed] * 3).round([0, 1, 2], [5, 6, 7], torch.device("cpu")))
    here, answer, decided, scores, nothing = _read(tree, tree, verification, acceptance)
    there, told, same, again, known = _read(tree, None, verification, acceptance)
    assert here is tree and nothing is None and same == decided and torch.equal(again, scores)
    for name in ("path", "count", "next_token"):
        assert torch.equal(getattr(told, name), getattr(answer, name))
    check_answer(tree, answer, V)
    for name in ("tokens", "parents"):
        assert torch.equal(getattr(there, name), getattr(tree, name))
    for name in ("node", "kind", "law"):
        assert torch.equal(getattr(there.draws, name), getattr(tree.draws, name))
    assert torch.equal(known, evidence(tree))
    # and what was decided is what the acceptor said
    for row, d in enumerate(decided):
        n = int(acceptance.count[row])
        nodes = acceptance.path[row, :n].tolist()
        assert d.path[:n] == nodes and d.accepted == n - 1 and d.sound == n
        assert d.tokens == [*tree.tokens[row, nodes[1:]].tolist(), int(acceptance.next_token[row])]
        below = {at for at in tree.draws.node[row].tolist() if at > 0 and int(tree.parents[row, at]) == nodes[-1]}
        assert d.attempted == n - 1 + bool(below)
        logp = logits[row].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(d.logprobs).double(), logp[nodes, d.tokens], rtol=0, atol=1e-6)


@given(trees(V, 2))
def test_point_trees_bring_no_evidence(tree) -> None:
    draws = Draws(tree.draws.node, torch.zeros_like(tree.draws.kind), torch.full_like(tree.draws.law, -1))
    bare = replace(tree, draws=draws, laws=None)
    verification = Verification(scores=torch.zeros(2, tree.tokens.shape[1], V))
    acceptance = RejectionAcceptor().accept(bare, verification, CounterRng([1, 2]).round([0, 1], [5, 6], torch.device("cpu")))
    there, _, _, _, known = _read(bare, None, verification, acceptance)
    assert known is None and there.laws is None and torch.equal(there.parents, tree.parents)
