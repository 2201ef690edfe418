"""A rule that fails is told of by the smallest example, in fractions that a person can check."""

from __future__ import annotations

import json
from fractions import Fraction as F
from typing import ClassVar

import pytest

from specdec.acceptors import BlockAcceptor, GreedyAcceptor, RejectionAcceptor
from specdec.base import Acceptor
from specdec.testing.counterexample import LAWS, examples, minimal
from specdec.testing.laws import hazard_defect, laws_after, one_round, target_law
from specdec.testing.mutant_acceptors import mutant_acceptors
from specdec.types import Kind

pytestmark = pytest.mark.slow


def mutant(name):
    return mutant_acceptors()[name].part


class Sampled(Acceptor):
    """Another rule, for iid draws alone."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset({Kind.IID})

    def __init__(self, inner):
        self.inner = inner

    def accept(self, tree, verification, source):
        return self.inner.accept(tree, verification, source)


def test_no_residual_by_hand():
    """Target (1/2, 1/2), the drafted token is 0: it passes with 1/2, and else the next token is 0 again with 1/2."""
    found = minimal(mutant("no residual"))
    assert (found.shape, found.proposal, found.target, found.prefix, found.token) == ("chain 1", "point", (F(1, 2), F(1, 2)), (), 0)
    assert (found.given, found.wanted) == (F(3, 4), F(1, 2))
    assert dict(found.law) == {(0,): F(1, 4), (0, 0): F(1, 4), (0, 1): F(1, 4), (1,): F(1, 4)}
    told = str(found).splitlines()
    assert len(told) == 3 and told[0] == "Recursive on chain 1, point: target (1/2, 1/2); draft the most likely of (1/2, 1/2)"
    assert told[2] == "  its text begins with 0 with probability 3/4; the target says 1/2"


def test_lenience_on_sampled_tokens_by_hand():
    """p = (1/2, 1/2), q = (1/3, 2/3), and the coins pass with 2 p / q = 3 and 3/2, capped at 1: everything that is drafted passes."""
    found = minimal(Sampled(mutant("lenience of 2")))
    assert (found.shape, found.proposal, found.target, found.draft) == ("chain 1", "iid", (F(1, 2), F(1, 2)), (F(1, 3), F(2, 3)))
    assert (found.prefix, found.token, found.given, found.wanted) == ((), 0, F(1, 3), F(1, 2))


def test_what_one_token_cannot_show_needs_two():
    found = minimal(mutant("block: the last ratio is not capped on its way (HSD)"))
    assert (found.shape, found.proposal, len(found.prefix)) == ("chain 2", "iid", 1)
    assert sum(p for _, p in found.law) == 1 and found.given != found.wanted
    going = sum(p for text, p in found.law if text[:1] == found.prefix and len(text) > 1)
    assert found.going == going
    assert found.given == sum(p for text, p in found.law if text[:2] == (*found.prefix, found.token)) / going
    assert f"begins with {found.prefix[0]} and goes on with probability {going}" in str(found)


def test_what_two_tokens_cannot_show_needs_three():
    found = minimal(mutant("block: residual of token rejection"))
    assert found.shape == "chain 2" and len(found.target) == 3


def test_a_coin_in_16_million():
    found = minimal(mutant("accepts with <=, so also at p = 0"))
    assert found.given == 1 - F(1, 2**24) and found.wanted == 1


def test_a_rule_that_raises():
    found = minimal(mutant("one coin for all siblings"))
    assert found.shape == "siblings 2" and found.error.startswith("AddressReuse: ") and found.law == () and "it raises" in str(found)
    assert found.as_json()["given"] is None


def test_json_is_json():
    told = json.loads(json.dumps(minimal(mutant("no residual")).as_json()))
    assert told["given"] == "3/4" and told["target"] == ["1/2", "1/2"] and told["law"][0] == [[0], "1/4"]


@pytest.mark.parametrize("rule", [BlockAcceptor(), GreedyAcceptor()])
def test_honest_rules_have_none(rule):
    assert minimal(rule) is None


@pytest.mark.parametrize("turned", [False, True])
def test_the_examples_are_what_they_say(turned):
    example = examples(3, ("i", "i"), turned=turned)
    assert len(example.pairs) == len(LAWS[3]) ** 2
    for prompt in list(example.pairs)[:10]:
        texts = [(), (2,), (0, 1)]
        asked = laws_after(example.verifier, [(*prompt, *text) for text in texts]).tolist()
        assert asked == [pytest.approx(law) for law in example.target(prompt, texts, False)]
    prompt = list(example.pairs)[-1]
    law = one_round(example.drafter, example.verifier, RejectionAcceptor(), [prompt], (2, 2, 1))[prompt]
    assert hazard_defect(law, target_law(example.verifier, prompt)) < 1e-12
