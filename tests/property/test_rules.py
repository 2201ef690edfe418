"""The lossless rules: exact in rational arithmetic, and the vectorised ones are them. What is known of who accepts more."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.acceptors import (
    BlockAcceptor,
    CoupledAcceptor,
    GreedyAcceptor,
    KSeqAcceptor,
    MatchAcceptor,
    RejectionAcceptor,
    TraversalAcceptor,
)  # fmt: skip
from specdec.rng import CounterRng
from specdec.testing.battery import battery
from specdec.testing.bounds import chain_optimum, mixed_level
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import expected_tokens, one_round, stand, tabulated, total_variation
from specdec.testing.reference import (
    RULES,
    Draw,
    Tree,
    defect,
    drafts,
    k_seq,
    match,
    outcomes,
    read,
    rejection,
    round_law,
    tokens_of_tree,
    traversal,
)
from specdec.testing.strategies import trees
from specdec.testing.tables import TableVerifier, law_pairs
from specdec.types import Budget, Kind, Verification

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"),
]

CLOSE = 1e-12


# ------------------------------------------------------------------------------------------------------- rational arithmetic


def rational(seed, vocab_size, zeros=False):
    """A model with a rational law after each text."""
    known = {}

    def law(path):
        if path not in known:
            r = Random(f"{seed}{path}")
            weights = [r.randint(0 if zeros else 1, 6) for _ in range(vocab_size)]
            weights = weights if any(weights) else [1] * vocab_size
            known[path] = [Fraction(w, sum(weights)) for w in weights]
        return known[path]

    return law


DRAWN = [
    (3, "iii", False), (3, "ipi", False), (3, "ppp", False), (3, ("ii", "i"), False), (3, ("ww", "w"), False), (3, ("rp", "r"), False),
    (3, ("pp", "pp"), False), (4, ("pii",), False), (4, ("ipw",), False), (4, ("rpp",), False), (4, ("www",), False),
    (3, ("ii", "i"), True), (4, ("iii",), True), (2, ("ii", "i", "i"), True),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size, levels, merge", DRAWN)
def test_a_rule_is_exact_and_not_only_to_the_last_digit(rule, vocab_size, levels, merge):
    apply = partial(k_seq, halvings=4) if rule == "k-seq" else RULES[rule]
    for zeros in (False, True):
        target, draft = rational(1, vocab_size, zeros), rational(2, vocab_size, zeros)
        law = round_law(apply, drafts(draft, levels, merge=merge), target)
        assert sum(law.values()) == 1 and defect(law, target) == 0


def grown(model, *below):
    """Trees that are drawn one token after the other, each below the node that a function of the tree so far names."""
    found = [(Fraction(1), Tree((0,), (-1,)))]
    for parent in below:
        more = []
        for weight, tree in found:
            law = model(tree.path(parent(tree)))
            more += [(weight * q, Tree((*tree.tokens, x), (*tree.parents, parent(tree)), (*tree.draws, Draw(len(tree.tokens), law))))
                     for x, q in enumerate(law) if q > 0]  # fmt: skip
        found = more
    return found


@pytest.mark.parametrize("rule", [rejection, traversal, match])
def test_what_is_drawn_next_may_depend_on_everything_drawn_before(rule):
    """Also the coins that are kept until a subtree was looked at: a subtree that may yet grow in any direction has the same chance."""
    for seed in range(3):
        target, draft = rational(seed, 3), rational(seed + 100, 3)

        def favourite(tree, draft=draft):
            return 1 if draft(())[tree.tokens[1]] >= draft(())[tree.tokens[2]] else 2

        def agreed(tree):
            return 3 if tree.tokens[3] == tree.tokens[1] else 0

        law = round_law(rule, iter(grown(draft, lambda tree: 0, lambda tree: 0, favourite, favourite, agreed)), target)
        assert defect(law, target) == 0


def test_a_law_that_was_not_drawn_from_has_a_defect():
    target, draft = rational(1, 4), rational(2, 4)
    declared = [(weight, replace(tree, draws=tuple(replace(draw, law=draft(())) for draw in tree.draws)))
                for weight, tree in drafts(draft, ["ww"])]  # fmt: skip
    for rule in (rejection, traversal):
        assert defect(round_law(rule, iter(declared), target), target) > Fraction(1, 100)


SHAPES = [("ii", "i"), ("ww", "w"), ("rp", "r"), ("pi", "i")]


def tokens(rule, tree, target):
    paths = [tree.path(node) for node in range(len(tree.tokens))]
    return sum(p * (1 + len(paths[node])) for (node, _), p in rule(tree, [target(path) for path in paths]).items())


@pytest.mark.slow
def test_traversal_accepts_at_least_what_recursive_rejection_does_on_fixed_shapes():
    """No theorem; so it is on these 200."""
    gains = defaultdict(list)
    for number in range(200):
        levels, zeros = SHAPES[number % len(SHAPES)], number % 3 == 0
        target, draft = rational(f"p{number}", 3, zeros), rational(f"q{number}", 3, zeros)
        target, draft = ((lambda text, model=model: [float(p) for p in model(text)]) for model in (target, draft))
        gains[levels].append(sum(weight * (tokens(traversal, tree, target) - tokens(rejection, tree, target))
                                 for weight, tree in drafts(draft, levels)))  # fmt: skip
    assert min(map(min, gains.values())) >= -CLOSE and sum(map(len, gains.values())) == 200
    assert all(max(gain) > 1e-3 for gain in gains.values())


def test_traversal_may_accept_less_where_the_shape_follows_what_was_drawn():
    """The example of docs/math/traversal.md. Two iid children; the target is sure of 0 below them. A fair coin below the first decides
    whether a sure chain of 8 hangs below the second."""
    target, draft, fair, sure = (
        (Fraction(2, 3), Fraction(1, 3)),
        (Fraction(1, 3), Fraction(2, 3)),
        (Fraction(1, 2), Fraction(1, 2)),
        (Fraction(1), Fraction(0)),
    )

    def worth(rule):
        total = Fraction(0)
        for a, b, y in product(range(2), repeat=3):
            grown = 0 if y else 8
            draws = (Draw(1, draft), Draw(2, draft), Draw(3, fair), *(Draw(4 + i, sure) for i in range(grown)))
            tree = Tree((0, a, b, y, *[0] * grown), (-1, 0, 0, 1, *[2, 4, 5, 6, 7, 8, 9, 10][:grown]), draws)
            found = rule(tree, [target if node == 0 else sure for node in range(len(tree.tokens))])
            total += draft[a] * draft[b] * fair[y] * sum(p * (1 + len(tree.path(node))) for (node, _), p in found.items())
        return total

    assert (worth(rejection), worth(traversal)) == (Fraction(23, 9), Fraction(41, 18))


# -------------------------------------------------------------------------------------------------- the vectorised acceptors

KINDS = {
    RejectionAcceptor: (rejection, tuple(Kind)), TraversalAcceptor: (traversal, tuple(Kind)), MatchAcceptor: (match, tuple(Kind)),
    CoupledAcceptor: (match, tuple(Kind)), KSeqAcceptor: (k_seq, (Kind.POINT, Kind.IID)), GreedyAcceptor: (match, tuple(Kind)),
}  # fmt: skip


def laws_at(tree, seed, vocab_size):
    """Laws that are functions of the token path, so that nodes that hold one path have one law; some zeros, some one-hot."""
    found = []
    for row in range(len(tree.tokens)):
        told, known = read(tree, row, vocab_size), {}
        for node, parent in enumerate(told.parents):
            path = told.path(node) if node == 0 or parent >= 0 else ("padding",)
            if path not in known:
                r = Random(f"{seed}{path}")
                weights = [r.choice((0, 0, 1, 2, 3, 5)) for _ in range(vocab_size)]
                known[path] = weights if any(weights) else [1] * vocab_size
            found.append(known[path])
    weights = torch.tensor(found, dtype=torch.float64)
    return (weights / weights.sum(-1, keepdim=True)).unflatten(0, tree.tokens.shape)


def merged(tree):
    """Whether two draws of a row landed on one node."""
    return any(len({n for n in row if n >= 0}) < sum(n >= 0 for n in row) for row in tree.draws.node.tolist())


def agree(acceptor, rule, tree, laws, rows=None):
    vocab_size = laws.shape[-1]
    if acceptor.greedy:
        laws = torch.nn.functional.one_hot(laws.argmax(-1), vocab_size).double()
    found = outcomes(acceptor, tree, Verification(laws.log()))
    for row in range(len(found)) if rows is None else rows:
        law = found[row]
        wanted = rule(read(tree, row, vocab_size), laws[row].tolist())
        assert all(abs(law.get(key, 0.0) - wanted.get(key, 0.0)) <= CLOSE for key in {*law, *wanted}), (row, law, dict(wanted))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_vectorised_rule_is_the_slow_one_on_any_tree(kind, data, seed):
    rule, kinds = KINDS[kind]
    tree = data.draw(trees(3, 2, nodes=5, kinds=kinds))
    agree(kind(), rule, tree, laws_at(tree, seed, 3))


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_block_verification_is_the_slow_rule_on_any_chain(data, seed):
    tree = data.draw(trees(3, 2, nodes=4))
    tree = replace(tree, parents=torch.where(tree.parents >= 0, torch.arange(tree.parents.shape[1]) - 1, tree.parents))
    if not merged(tree):
        agree(BlockAcceptor(), traversal, tree, laws_at(tree, seed, 3))


SEEDS = 4


def drafted(cell, seeds=SEEDS):
    """Trees that were really drawn, which draws without replacement from one law are."""
    prompts = [prompt for prompt in cell.prompts for _ in range(seeds)]
    at = stand(cell.drafter, cell.verifier, prompts)
    source = CounterRng(range(len(prompts))).round(range(len(prompts)), at.positions, torch.device("cpu"))
    tree = cell.drafter.propose(at.drafter, at.pending, Budget.of(*cell.plan, batch=len(prompts)), source)
    return tree, Verification(cell.verifier.verify(at.verifier, tree).logp)


@pytest.mark.parametrize("cell", [cell for cell in battery() if cell.drafter.levels], ids=lambda cell: f"{cell.shape} {cell.proposal}")
def test_a_vectorised_rule_is_the_slow_one_on_drafts(cell):
    tree, verification = drafted(cell)
    laws, kinds_of = verification.logp.exp(), dict(zip(cell.pairs.prompts, cell.pairs.names, strict=True))
    names = [kinds_of[prompt] for prompt in cell.prompts for _ in range(SEEDS)]
    for kind, (rule, kinds) in KINDS.items():
        if kind is GreedyAcceptor or not cell.drafter.draws <= set(kinds):
            continue
        # Where p = q the least threshold of K-SEQ, 1, is met up to rounding by every one near it, and either side may stop anywhere there.
        agree(kind(), rule, tree, laws, [row for row, name in enumerate(names) if kind is not KSeqAcceptor or name != "equal"])
    if cell.drafter.chains:
        agree(BlockAcceptor(), traversal, tree, laws)


@pytest.mark.parametrize(
    "levels, merge", [("ipi", False), (("rp", "w"), False), (("ww", "i"), False), (("ii", "i"), True), (("wpi",), True)]
)
def test_the_drafts_are_those_of_the_table_drafter(levels, merge):
    pairs = law_pairs(3, len(levels))
    drafter, verifier = TableDrafter(pairs.draft, levels, merge=merge), TableVerifier(pairs.target)
    laws = one_round(drafter, verifier, RejectionAcceptor(), pairs.prompts, (16, len(levels), 9))
    for prompt in pairs.prompts:
        target, draft = ((lambda text, model=model: model.law(torch.tensor([[*prompt, *text]]))[0].tolist())  # noqa: B023
                         for model in (pairs.target, pairs.draft))  # fmt: skip
        assert total_variation(laws[prompt], round_law(rejection, drafts(draft, levels, merge=merge), target)) <= CLOSE


# --------------------------------------------------------------------------------------------------------- who accepts more


def laws_of(levels, vocab_size, *acceptors):
    """The law of one round after each prompt under each acceptor."""
    pairs, plan = law_pairs(vocab_size, len(levels)), (16, len(levels), 4)
    drafter, verifier = TableDrafter(pairs.draft, levels), TableVerifier(pairs.target)
    return pairs, [one_round(drafter, verifier, acceptor, pairs.prompts, plan) for acceptor in acceptors]


@pytest.mark.parametrize("levels", ["iii", "www", "ipi", "pip"])
def test_on_a_chain_block_verification_accepts_the_most_and_traversal_is_it(levels):
    pairs, (token, block, tree) = laws_of(levels, 3, RejectionAcceptor(), BlockAcceptor(), TraversalAcceptor())
    gains = [expected_tokens(block[prompt]) - expected_tokens(token[prompt]) for prompt in pairs.prompts]
    assert min(gains) >= -CLOSE and max(gains) > 1e-3
    assert max(total_variation(block[prompt], tree[prompt]) for prompt in pairs.prompts) <= CLOSE
    if "p" not in levels:
        targets, draft = (tabulated(TableVerifier(model), pairs.prompts, 3) for model in (pairs.target, pairs.draft))
        for prompt in pairs.prompts:
            assert expected_tokens(block[prompt]) == pytest.approx(chain_optimum(3, targets[prompt], draft[prompt]), abs=CLOSE)


@pytest.mark.parametrize("levels", ["ppp", ("pp", "pp"), ("ppp", "p")])
def test_of_chosen_tokens_every_rule_makes_the_same(levels):
    acceptors = [MatchAcceptor(), RejectionAcceptor(), TraversalAcceptor(), KSeqAcceptor()]
    acceptors += [BlockAcceptor()] if levels == "ppp" else []
    pairs, (one, *others) = laws_of(levels, 3, *acceptors)
    assert max(total_variation(one[prompt], other[prompt]) for other in others for prompt in pairs.prompts) <= CLOSE


@pytest.mark.parametrize("letters", ["rp", "rpp"])
def test_the_sampled_child_first_and_then_the_likeliest_is_optimal(letters):
    pairs, (law,) = laws_of((letters,), 4, RejectionAcceptor())
    ids = torch.tensor(pairs.prompts)
    for prompt, p, q in zip(pairs.prompts, pairs.target.law(ids), pairs.draft.law(ids), strict=True):
        assert expected_tokens(law[prompt]) == pytest.approx(1 + mixed_level(p, q, len(letters)), abs=CLOSE)


@pytest.mark.parametrize("letters", ["ii", "iii"])
def test_k_seq_accepts_what_its_threshold_says(letters):
    pairs, (law,) = laws_of((letters,), 4, KSeqAcceptor())
    ids, k = torch.tensor(pairs.prompts), len(letters)

    def beta(p, q, rho):
        return min(1.0, float(torch.minimum(q, p / rho).sum()))

    for prompt, p, q in zip(pairs.prompts, pairs.target.law(ids), pairs.draft.law(ids), strict=True):
        low, high = 1.0, float(k)
        for _ in range(30):
            middle = (low + high) / 2
            one = 1 - (1 - beta(p, q, middle)) ** k
            low, high = (low, middle) if one <= middle * beta(p, q, middle) else (middle, high)
        assert expected_tokens(law[prompt]) == pytest.approx(2 - (1 - beta(p, q, high)) ** k, abs=CLOSE)


def test_tokens_of_a_tree_add_up_to_those_of_a_round():
    """On a tree of chosen tokens, of which there is one."""
    cell = next(cell for cell in battery() if (cell.shape, cell.proposal) == ("tree (2,2)", "point"))
    tree, verification = drafted(cell, 1)
    law = one_round(cell.drafter, cell.verifier, MatchAcceptor(), cell.prompts, cell.plan)
    assert tokens_of_tree(TraversalAcceptor(), tree, verification) == pytest.approx(
        [expected_tokens(law[prompt]) for prompt in cell.prompts], abs=CLOSE
    )
