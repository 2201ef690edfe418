"""The lossless rules once more: slow, and as exact as the numbers that go in.

Everything is a walk over one tree by recursion, with every coin replaced by its probability. Given `fractions.Fraction`s the law of what is
emitted comes out without rounding, so a rule that is lossless has a defect of 0 and not of 1e-16; given floats it is the oracle of the
vectorised acceptors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from ..base import Acceptor
from ..tree import depths
from ..types import DraftTree, Int64, Kind, Verification
from .enumerate import EnumeratingRng, branches
from .laws import Tokens

__all__ = ["RULES", "Draw", "Tree", "defect", "drafts", "k_seq", "outcomes", "read", "round_law", "tokens_of_tree"]

Number = Any
"""A `Fraction`, or a float."""
Law = Sequence[Number]
Outcome = dict[tuple[int, int], Number]
"""Probability of each last accepted node and the token after it."""


@dataclass(frozen=True)
class Draw:
    """One draw, in draw order among those of its tree."""

    node: int
    law: Law
    """What the token followed, given the draws before it."""
    alike: Any = None
    """The same for iid siblings of one law."""


@dataclass(frozen=True)
class Tree:
    """A draft tree of one row."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draws: tuple[Draw, ...] = ()

    def below(self, node: int) -> list[Draw]:
        return [draw for draw in self.draws if self.parents[draw.node] == node]

    def path(self, node: int) -> Tokens:
        return () if node == 0 else (*self.path(self.parents[node]), self.tokens[node])


# ----------------------------------------------------------------------------------------------------------------- the rules


def passing(a: Number, r: Law, q: Law, x: int) -> Number:
    """The weight of a child, as in `specdec.acceptors.residual`."""
    return min(1, a * r[x] / q[x]) if q[x] > 0 else 1 if a * r[x] > 0 else 0


def failing(a: Number, r: Law, q: Law) -> tuple[Number, Law]:
    """What the node goes on with if the child fails."""
    left = [max(a * rx - qx, 0) for rx, qx in zip(r, q, strict=True)]
    mass = sum(left)
    return (mass / (mass + (1 - a)), [x / mass for x in left]) if mass > 0 else (0, r)


def _mix(into: Outcome, weight: Number, what: Outcome) -> Number:
    for key, probability in what.items():
        into[key] += weight * probability
    return sum(what.values())


def rejection(tree: Tree, laws: Sequence[Law], node: int = 0) -> Outcome:
    """Coins at once, in draw order."""
    found: Outcome = defaultdict(int)
    here, r = 1, laws[node]
    for draw in tree.below(node):
        weight = passing(1, r, draw.law, tree.tokens[draw.node])
        if weight > 0:
            _mix(found, here * weight, rejection(tree, laws, draw.node))
        here, r = here * (1 - weight), failing(1, r, draw.law)[1]
    for token, probability in enumerate(r):
        found[node, token] += here * probability
    return found


def traversal(tree: Tree, laws: Sequence[Law], node: int = 0, a: Number = 1) -> Outcome:
    """Coins from the leaves to the root: what is found sums to the probability that something at or below the node is accepted."""
    found: Outcome = defaultdict(int)
    here, r = 1, laws[node]
    for draw in tree.below(node):
        weight = passing(a, r, draw.law, tree.tokens[draw.node])
        if weight > 0:
            here *= 1 - _mix(found, here, traversal(tree, laws, draw.node, weight))
        a, r = failing(a, r, draw.law)
    for token, probability in enumerate(r):
        found[node, token] += here * a * probability
    return found


def match(tree: Tree, laws: Sequence[Law], nodes: Sequence[int] = (0,)) -> Outcome:
    """Draw the target's token and go to the nodes that hold it."""
    found: Outcome = defaultdict(int)
    for token, probability in enumerate(laws[nodes[0]]):
        below = sorted({draw.node for node in nodes for draw in tree.below(node) if tree.tokens[draw.node] == token})
        _mix(found, probability, match(tree, laws, below) if below and probability > 0 else {(nodes[0], token): 1})
    return found


def k_seq(tree: Tree, laws: Sequence[Law], node: int = 0, halvings: int = 30) -> Outcome:
    """One threshold for all iid siblings of one law. Any that satisfies the inequality is exact; halving comes near the least one."""
    found: Outcome = defaultdict(int)
    here, r = 1, laws[node]
    for _, group in groupby(enumerate(tree.below(node)), lambda at: at[0] if at[1].alike is None else (at[1].alike,)):
        draws = [draw for _, draw in group]
        q, k, unit = draws[0].law, len(draws), sum(r) / sum(r)
        low, rho = unit, k * unit
        for _ in range(halvings):
            middle = (low + rho) / 2
            beta, one = _some(middle, r, q, k)
            low, rho = (low, middle) if one <= middle * beta else (middle, rho)
        for draw in draws:
            weight = passing(1 / rho, r, q, tree.tokens[draw.node])
            if weight > 0:
                _mix(found, here * weight, k_seq(tree, laws, draw.node, halvings))
            here *= 1 - weight
        beta, one = _some(rho, r, q, k)
        left = [max(rx - (min(qx, rx / rho) * one / beta if beta > 0 else 0), 0) for qx, rx in zip(q, r, strict=True)]
        r = [x / sum(left) for x in left] if sum(left) > 0 else r
    for token, probability in enumerate(r):
        found[node, token] += here * probability
    return found


def _some(rho: Number, r: Law, q: Law, k: int) -> tuple[Number, Number]:
    """The probability that one sample passes, and that one of k does."""
    beta = min(1, sum(min(qx, rx / rho) for qx, rx in zip(q, r, strict=True)))
    return beta, 1 - (1 - beta) ** k


Rule = Callable[[Tree, Sequence[Law]], Outcome]
RULES: Mapping[str, Rule] = {"rejection": rejection, "traversal": traversal, "match": match, "k-seq": k_seq}


# --------------------------------------------------------------------------------------------------------- drafts and defects


def drafts(model: Callable[[Tokens], Law], levels: Sequence[str], *, merge: bool = False) -> Iterator[tuple[Number, Tree]]:
    """Every tree that `TableDrafter` with these levels may draw, and its probability.

    Args:
        model: the draft law after each continuation of the prompt.
        levels, merge: as there, without capitals.
    """
    grown: list[tuple[Number, Tree, list[int]]] = [(1, Tree((0,), (-1,)), [0])]
    for letters in levels:
        slots = range(len(grown[0][2]))
        # The nodes that the draws of the level above landed on, and behind them those of this level.
        for slot in slots:
            for child in range(len(letters)):
                grown = [(weight * p, more, [*landed, node]) for weight, tree, landed in grown
                         for p, more, node in _drawn(tree, landed[slot], letters, landed[len(landed) - child :], model, merge)]  # fmt: skip
        grown = [(weight, tree, landed[len(slots) :]) for weight, tree, landed in grown]
    return ((weight, tree) for weight, tree, _ in grown)


def _drawn(tree: Tree, parent: int, letters: str, elder: Sequence[int], model: Callable[[Tokens], Law],
           merge: bool) -> Iterator[tuple[Number, Tree, int]]:  # fmt: skip
    """One more draw below `parent`, after those that landed on `elder`: every outcome. Node -1 where nothing was drawn."""
    law, letter = [], letters[len(elder)]
    if parent >= 0:
        law = list(model(tree.path(parent)))
        ranked = sorted((x for x, q in enumerate(law) if q > 0), key=lambda x: -law[x])
        if letter == "p":
            rank = letters[: len(elder)].count("p")
            law = [int(x in ranked[rank : rank + 1]) for x in range(len(law))]
        elif letter == "r":
            law = [0 if x in ranked[: letters.count("p")] else q for x, q in enumerate(law)]
        elif letter == "w":
            gone = [tree.tokens[node] for node, other in zip(elder, letters, strict=False) if other == "w" and node >= 0]
            law = [0 if x in gone else q for x, q in enumerate(law)]
    mass = sum(law)
    if mass == 0:
        yield 1, tree, -1
        return
    law = [q / mass if letter != "p" else q for q in law]
    alike = len(tree.draws) - len(elder) if letter == "i" else None
    for token, probability in enumerate(law):
        if probability > 0:
            same = [n for n, above in enumerate(tree.parents) if merge and above == parent and tree.tokens[n] == token]
            node = same[0] if same else len(tree.tokens)
            draws = (*tree.draws, Draw(node, law, alike))
            grown = (tree.tokens, tree.parents) if same else ((*tree.tokens, token), (*tree.parents, parent))
            yield probability, Tree(*grown, draws), node


def round_law(rule: Rule, found: Iterator[tuple[Number, Tree]], target: Callable[[Tokens], Law]) -> dict[Tokens, Number]:
    """The law of the text that one round emits."""
    law: dict[Tokens, Number] = defaultdict(int)
    for weight, tree in found:
        for (node, token), probability in rule(tree, [target(tree.path(n)) for n in range(len(tree.tokens))]).items():
            law[(*tree.path(node), token)] += weight * probability
    return law


def defect(law: Mapping[Tokens, Number], target: Callable[[Tokens], Law]) -> Number:
    """The largest |Pr(text begins with s, x) - P(x | s) Pr(text begins with s and goes on)|: 0 exactly where `hazard_defect` is."""
    begins: dict[Tokens, Number] = defaultdict(int)
    going: dict[Tokens, Number] = defaultdict(int)
    for text, probability in law.items():
        for n in range(len(text)):
            begins[text[: n + 1]] += probability
            going[text[:n]] += probability
    return max(abs(begins.get((*s, x), 0) - p * mass) for s, mass in list(going.items()) for x, p in enumerate(target(s)))


# ------------------------------------------------------------------------------------------- beside the vectorised acceptors


def outcomes(acceptor: Acceptor, tree: DraftTree, verification: Verification) -> list[Outcome]:
    """What an acceptor does with the given tree of each row: exactly, by walking every branch of its own coins."""

    def run(rng: EnumeratingRng) -> list[tuple[int, int]]:
        at = torch.tensor(rng.roots, device=tree.tokens.device)
        best = None if verification.best is None else verification.best[at]
        source = rng.round(range(len(at)), [0] * len(at), at.device)
        got = acceptor.accept(_rows(tree, at), Verification(verification.logp[at], best), source)
        return list(zip(got.path.gather(1, got.count[:, None] - 1)[:, 0].tolist(), got.next_token.tolist(), strict=True))

    found: list[Outcome] = [defaultdict(float) for _ in tree.tokens]
    for branch in branches(run, range(len(found))):
        found[branch.root][branch.result] += branch.probability
    return found


def tokens_of_tree(acceptor: Acceptor, tree: DraftTree, verification: Verification) -> list[float]:
    """The mean number of tokens that an acceptor makes of the given tree of each row, exactly."""
    depth = depths(tree.parents).tolist()
    found = outcomes(acceptor, tree, verification)
    return [math.fsum(p * (1 + depth[row][node]) for (node, _), p in law.items()) for row, law in enumerate(found)]


def _rows(tree: DraftTree, at: Int64[torch.Tensor, " R"]) -> DraftTree:
    draws = replace(tree.draws, node=tree.draws.node[at], kind=tree.draws.kind[at], law=tree.draws.law[at])
    return DraftTree(tree.tokens[at], tree.parents[at], draws, None if tree.laws is None else tree.laws[at], tree.height)


def read(tree: DraftTree, row: int, vocab_size: int) -> Tree:
    """One row of a tree of the library."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    table = [] if tree.laws is None else tree.laws[row].tolist()
    draws: list[Draw] = []
    gone: dict[tuple[int, int], list[int]] = defaultdict(list)
    for node, kind, law in zip(*(part[row].tolist() for part in (tree.draws.node, tree.draws.kind, tree.draws.law)), strict=True):
        if node < 0:
            continue
        if kind == Kind.POINT:
            draws.append(Draw(node, [float(x == tokens[node]) for x in range(vocab_size)]))
            continue
        q, elder = table[law], gone[parents[node], law] if kind == Kind.WITHOUT_REPLACEMENT else []
        q = [0.0 if x in elder else y for x, y in enumerate(q)]
        draws.append(Draw(node, [y / sum(q) for y in q] if elder else q, law if kind == Kind.IID else None))
        elder.append(tokens[node])
    return Tree(tuple(tokens), tuple(parents), tuple(draws))
