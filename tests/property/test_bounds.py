"""Bounds on what a lossless rule may accept: closed forms against brute force and against the linear program."""

from __future__ import annotations

import builtins
import math
from itertools import permutations, product

import pytest
import torch

from specdec.acceptors import TraversalAcceptor
from specdec.testing import certify
from specdec.testing.battery import _drafted, battery
from specdec.testing.bounds import iid_level, level_optimum, mixed_level, point_level, without_replacement_level
from specdec.testing.laws import tabulated
from specdec.testing.optimum import flow_optimum, round_optimum

pytestmark = pytest.mark.slow

KINDS = ("generic", "close", "zeros", "ties", "equal", "sharp")


def pair(seed: int, size: int):
    """Two laws of one of the kinds, in float64."""
    g, kind = torch.Generator().manual_seed(seed), KINDS[seed % len(KINDS)]
    p, q = torch.softmax((6 if kind == "sharp" else 1.5) * torch.randn(2, size, generator=g, dtype=torch.float64), -1)
    if kind == "close":
        q = (p + q) / 2
    if kind == "zeros":
        keep = torch.rand(2, size, generator=g) < 0.6
        keep[0, 0] = keep[1, -1] = True
        p, q = p * keep[0], q * keep[1]
    if kind == "ties":
        p, q = torch.randint(1, 3, (2, size), generator=g).double()
    if kind == "equal":
        q = p
    return p / p.sum(), q / q.sum()


def candidates(q, k, way):
    """Every set of candidates with its probability."""
    law, found = q.tolist(), {}
    top = sorted((x for x in range(len(law)) if law[x] > 0), key=lambda x: -law[x])
    if way == "iid":
        drawn = [(xs, math.prod(law[x] for x in xs)) for xs in product(range(len(law)), repeat=k)]
    elif way == "without replacement":
        can = [x for x in range(len(law)) if law[x] > 0]
        drawn = []
        for xs in permutations(can, min(k, len(can))):
            # summed over what is left, not over what is gone: small numbers keep their digits
            left = [math.fsum(law[x] for x in can if x not in xs[:i]) for i in range(len(xs))]
            drawn.append((xs, math.prod(law[x] / mass for x, mass in zip(xs, left, strict=True))))
    elif way == "point":
        drawn = [(tuple(top[:k]), 1.0)]
    else:
        rest = math.fsum(law[x] for x in top[k - 1 :])
        drawn = [((*top[: k - 1], x), law[x] / rest) for x in top[k - 1 :]] or [(tuple(top), 1.0)]
    for xs, probability in drawn:
        found[frozenset(xs)] = found.get(frozenset(xs), 0.0) + probability
    return list(found.items())


WAYS = {"iid": iid_level, "without replacement": without_replacement_level, "mixed": mixed_level, "point": point_level}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size, k", [(4, 1), (4, 2), (5, 2), (5, 3), (5, 5)])
def test_one_level_is_the_best_over_all_subsets(way, size, k):
    for seed in range(18):
        p, q = pair(seed, size)
        assert WAYS[way](p, q, k) == pytest.approx(level_optimum(candidates(q, k, way), p) - 1, abs=1e-12), seed


@pytest.mark.parametrize("way", WAYS)
def test_one_level_of_a_large_vocabulary(way):
    """The limits that every bound has to keep, where the subsets can't be counted; tokens that the target lacks change nothing."""
    p, q = pair(5, 4000)
    close = (p + q) / 2
    one, two, four = (WAYS[way](p, close, k) for k in (1, 2, 4))
    overlap = float(torch.minimum(p, close).sum())
    assert one == pytest.approx(float(p[close.argmax()]) if way == "point" else overlap, abs=1e-12)
    assert one <= two <= four <= 1 + 1e-12
    padded = [torch.cat([torch.zeros(100, dtype=torch.float64), law]) for law in (p, close)]
    assert WAYS[way](*padded, 2) == pytest.approx(two, abs=1e-12)


def test_less_is_accepted_of_repeated_samples_and_more_of_different_ones():
    for seed in range(12):
        p, q = pair(seed, 40)
        assert iid_level(p, q, 3) <= without_replacement_level(p, q, 3) + 1e-12
        assert point_level(p, q, 3) <= mixed_level(p, q, 4)


def test_a_peaked_law_keeps_its_digits():
    """q = (1 - 2e, e, e) leaves a coin between the others once its first token is drawn."""
    p, e = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), 1e-13
    q = torch.tensor([1 - 2 * e, e, e], dtype=torch.float64)
    # A = {0, 1}: they are both drawn with probability 1/2 but for terms of the order of e, and p(A) = 1; A = {0, 2}: 1/2 - 1/2
    assert without_replacement_level(p, q, 2) == pytest.approx(1, abs=1e-12)
    p = torch.tensor([0.1, 0.0, 0.9], dtype=torch.float64)
    assert without_replacement_level(p, q, 2) == pytest.approx(1 - (0.5 - 0.1), abs=1e-12)


CELLS = [cell for cell in battery() if cell.drafter.levels and cell.rounds == 1]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.shape} {cell.proposal}")
def test_closed_forms_are_what_the_linear_program_finds(cell):
    targets, drafted = tabulated(cell.verifier, cell.prompts, len(cell.drafter.levels)), _drafted(cell)
    for prompt in cell.prompts:
        assert round_optimum(drafted[prompt], targets[prompt]) == pytest.approx(flow_optimum(drafted[prompt], targets[prompt]), abs=1e-9)


@pytest.mark.slow
def test_no_lossless_rule_is_better_than_the_optimum_and_some_reach_it():
    share = {
        (row["shape"], row["proposal"]): row["efficiency"]
        for row in certify(
            TraversalAcceptor(), cells=[cell for cell in CELLS if cell.proposal != "without replacement" or cell.drafter.chains]
        )
    }
    assert all(0.5 < efficiency < 1 + 1e-9 for efficiency in share.values())
    reached = [("chain 3", way) for way in ("point", "iid", "without replacement", "mixed")] + [("uneven chain", "iid")]
    reached += [(shape, "point") for shape in ("tree (2,2)", "level 2", "level 3")] + [("level 2", "mixed"), ("level 3", "mixed")]
    assert all(share[cell] == pytest.approx(1, abs=1e-12) for cell in reached)
    assert share["tree (2,2)", "iid"] < 0.97 and share["merged samplers", "mixed"] < 0.95


def test_numbers_known_from_the_literature():
    """Two tokens drafted from q = (2/3, 1/3) for p = (1/3, 2/3): 11/9 can be accepted, not the 4/3 of a coupling of whole texts
    (Sun et al. 2024)."""
    drafted = {frozenset({(a,), (a, b)}): (2 - a) / 3 * (2 - b) / 3 for a in (0, 1) for b in (0, 1)}

    def target(texts):
        return torch.tensor([[1 / 3, 2 / 3]] * len(texts), dtype=torch.float64)

    assert flow_optimum(drafted, target) == pytest.approx(1 + 11 / 9, abs=1e-9)
    assert round_optimum(drafted, target) == pytest.approx(1 + 11 / 9, abs=1e-12)
    assert flow_optimum({frozenset(): 1.0}, target) == 1 == round_optimum({frozenset(): 1.0}, target)


def test_efficiency_is_unknown_without_scipy(monkeypatch):
    tree = {frozenset({(0,), (1,), (0, 0)}): 0.5, frozenset({(0,), (1,), (1, 0)}): 0.5}

    def target(texts):
        return torch.tensor([[0.5, 0.5]] * len(texts), dtype=torch.float64)

    assert round_optimum(tree, target) == pytest.approx(1 + 1 + 0.25 + 0.25, abs=1e-9)
    load = builtins.__import__

    def without_scipy(name, *args, **kwargs):
        if name.startswith("scipy"):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    assert round_optimum(tree, target) is None
