"""What the rules say of themselves, what they refuse, and what they do where the target has no law."""

from __future__ import annotations

import warnings

import pytest
import torch

import specdec
from specdec import acceptors, grow
from specdec.generation import default_acceptor
from specdec.models.tiny import TinyTarget
from specdec.rng import CounterRng
from specdec.testing.drafters import TableDrafter
from specdec.testing.tables import law_pairs
from specdec.tree import check, check_answer, from_lists, padded_chain
from specdec.types import Budget, Verification, probabilities

V = 5
TARGET = TinyTarget(V, seed=3)
CPU = torch.device("cpu")
SAMPLED = {"do_sample": True, "seed": 1, "max_new_tokens": 12}


def source(batch: int = 1):
    return CounterRng(range(batch)).round(range(batch), [4] * batch, CPU)


@pytest.mark.parametrize(
    "levels, merge, wanted",
    [("ppp", False, "Match"), ("iii", False, "Block"), (["ii", "i"], False, "Traversal"), (["ii", "i"], True, "Traversal")],
)
def test_the_default_follows_what_is_drafted(levels, merge, wanted):
    drafter = TableDrafter(law_pairs(3, 3).draft, levels, merge=merge)
    assert type(default_acceptor(drafter, greedy=False)).__name__ == f"{wanted}Acceptor"
    assert type(default_acceptor(drafter, greedy=True)).__name__ == "GreedyAcceptor"


def test_block_verification_refuses_a_drafter_of_trees_before_anything_is_decoded():
    drafter = TableDrafter(law_pairs(3, 3).draft, ["ii"])
    with pytest.raises(ValueError, match="BlockAcceptor verifies chains, and TableDrafter may draft trees"):
        specdec.stream(TARGET, [[1]], drafter=drafter, acceptor=specdec.BlockAcceptor(), **SAMPLED)


def test_who_says_chains_drafts_chains():
    fork = from_lists([([1, 2, 3], [-1, 0, 0])])
    check(fork, torch.tensor([1]), Budget.of(4), V)
    with pytest.raises(ValueError, match="row 0, node 2 .* is a second child, but the drafter says that it drafts chains"):
        check(fork, torch.tensor([1]), Budget.of(4), V, chain=True)


def test_only_lossy_rules_warn_and_show_in_the_statistics():
    drafter = specdec.NGramDrafter()
    with pytest.warns(UserWarning, match=r"TypicalAcceptor\(epsilon=0.09, delta=0.3; lossy\) is lossy"):
        lossy = specdec.generate(TARGET, [[1, 2, 1]], drafter=drafter, acceptor=specdec.TypicalAcceptor(), **SAMPLED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = specdec.generate(TARGET, [[1, 2, 1]], drafter=drafter, acceptor=specdec.MatchAcceptor(), **SAMPLED)
    assert exact.stats.lossless and not lossy.stats.lossless
    assert not (exact.stats + lossy.stats).lossless and (exact.stats + exact.stats).lossless
    assert [name for name in acceptors.__all__ if not getattr(acceptors, name).lossless] == ["TypicalAcceptor"]


@pytest.mark.parametrize("given", [{"epsilon": 1.5}, {"epsilon": float("nan")}, {"delta": -0.1}])
def test_typical_acceptance_refuses_what_is_no_probability(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}: got .*, allowed is 0 to 1"):
        specdec.TypicalAcceptor(**given)


def test_typical_acceptance_takes_the_deepest_path_and_of_those_the_most_likely():
    # below the root 1 and 2, below each of them 3; token 4 is unlikely everywhere
    tree = from_lists([([0, 1, 2, 3, 3, 4], [-1, 0, 0, 1, 2, 3])])
    law = torch.tensor([0.05, 0.25, 0.35, 0.3, 0.05], dtype=torch.float64)
    got = specdec.TypicalAcceptor(0.2).accept(tree, Verification(law.log().expand(1, 6, -1)), source())
    assert got.path[0, : int(got.count[0])].tolist() == [0, 2, 4]


@pytest.mark.parametrize("rule", [specdec.BlockAcceptor(), specdec.TraversalAcceptor()], ids=["block", "traversal"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_node_without_a_law_is_accepted_and_so_found_out(rule, value):
    """Under late coins a node that lost its law would else be passed over without a word, and its prefix accepted too often."""
    law = torch.full((64, 4, V), 1 / V, dtype=torch.float64)
    tree = padded_chain(torch.zeros(64, 4, dtype=torch.int64), [3] * 64, law[:, :3])
    scores = law.log()
    scores[:, 2] = value
    got = rule.accept(tree, Verification(scores=scores), source(64))
    assert got.count.tolist() == [3] * 64  # the draft's law is the target's: all is accepted as far as there is a law


SHAPES = {"chain": grow.iid(1), "tree": grow.iid(2, 2), "merged": grow.iid(3, 2, merge=True), "exhausted": grow.without_replacement(3, 2)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(set(acceptors.__all__) - {"GreedyAcceptor"}))
def test_what_the_target_excludes_is_never_emitted(name, shape):
    """In float32, with laws in which half of the tokens have no mass, drafted all the same."""
    acceptor, batch, vocab_size = getattr(acceptors, name)(), 256, 32
    if not SHAPES[shape].draws <= acceptor.takes or (acceptor.chains and not SHAPES[shape].chains):
        assert name in ("BlockAcceptor", "KSeqAcceptor")
        return
    growth = SHAPES[shape].begin(torch.zeros(batch, dtype=torch.int64), Budget.of(9, 2, batch=batch))
    while growth.more:
        scores = torch.randn(batch, growth.last.stop - growth.last.start, vocab_size)
        if shape == "exhausted":
            scores[..., 2:] = -torch.inf
        growth.level(probabilities(scores), source(batch))
    tree = growth.tree()
    scores = torch.randn(*tree.tokens.shape, vocab_size)
    scores[..., ::2] = -torch.inf
    got = acceptor.accept(tree, Verification(scores=scores), source(batch))
    check_answer(tree, got, vocab_size)
    accepted = tree.tokens.gather(1, got.path.clamp_min(0))[:, 1:][got.path[:, 1:] > 0]
    assert bool((accepted % 2 == 1).all()) and bool((got.next_token % 2 == 1).all()) and int(got.count.max()) > 1
