"""The source that walks every branch: exact probabilities, addresses that may not recur, and what it notices."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specdec.rng import CounterRng, Purpose
from specdec.testing import AddressReuse, Irreproducible, branches
from specdec.testing.enumerate import EnumeratingRng
from specdec.testing.purity import other_seed
from specdec.testing.races import second_race

CPU = torch.device("cpu")


def source(rng, position=5):
    rows = len(rng.roots)
    return rng.round(range(rows), [position] * rows, CPU)


def full(rng, value):
    return torch.full((len(rng.roots),), value, dtype=torch.float64)


def weights(rng, *values):
    return torch.tensor(values, dtype=torch.float64).expand(len(rng.roots), -1)


def law(found):
    out = {}
    for branch in found:
        out[branch.result] = out.get(branch.result, 0) + branch.probability
    return out


def test_every_branch_once_with_its_probability():
    def run(rng):
        s = source(rng)
        x = s.categorical(weights(rng, 2, 0, 6), Purpose.DRAFT, 0)
        passed = s.accept(full(rng, 0.3), full(rng, 1.2), 0, x == 2)
        return list(zip(x.tolist(), passed.tolist(), strict=True))

    found = branches(run)
    assert law(found) == {(0, False): 0.25, (2, True): pytest.approx(0.1875), (2, False): pytest.approx(0.5625)}
    assert len(found) == 3


COINS = [(0.0, 1.0, False), (-1.0, 1.0, False), (0.0, 0.0, False), (1.0, 1.0, True), (2.0, 1.0, True), (1e-300, 0.0, True)]


@pytest.mark.parametrize(("num", "den", "passes"), COINS)
def test_certain_coins_do_not_branch(num, den, passes):
    found = branches(lambda rng: source(rng).accept(full(rng, num), full(rng, den), 0).tolist())
    assert [(b.probability, b.result) for b in found] == [(1.0, passes)]


def test_coins_agree_with_the_source_that_decoding_uses():
    """Strict on both sides: p = 0 never passes, p = q always does."""
    num, den, passes = (torch.tensor(column, dtype=torch.float64) for column in zip(*COINS, strict=True))
    got = CounterRng([3] * 6).round(range(6), range(6), CPU).accept(num, den, 0)
    assert got.tolist() == passes.bool().tolist()


def test_inactive_rows_consume_nothing():
    def run(rng):
        s = source(rng)
        first = s.categorical(weights(rng, 1, 1), Purpose.DRAFT, 0, torch.zeros(len(rng.roots), dtype=torch.bool))
        again = s.categorical(weights(rng, 1, 1), Purpose.DRAFT, 0)  # the same address, not used before
        coin = s.accept(full(rng, 0.5), full(rng, 1.0), 0, torch.zeros(len(rng.roots), dtype=torch.bool))
        return list(zip(first.tolist(), again.tolist(), coin.tolist(), strict=True))

    assert law(branches(run)) == {(0, 0, False): 0.5, (0, 1, False): 0.5}


def test_roots_are_walked_side_by_side_in_waves():
    def run(rng):
        sides = torch.tensor(rng.roots)
        assert len(sides) <= 5
        x = source(rng).categorical((torch.arange(4) < sides[:, None]).double(), Purpose.DRAFT, 0)
        return x.tolist()

    found = branches(run, roots=(1, 2, 4), wave=5)
    assert sorted((b.root, b.result, b.probability) for b in found) == [(n, x, 1 / n) for n in (1, 2, 4) for x in range(n)]


def rounds(rng, positions, draw):
    for position in positions:
        draw(source(rng, position))
    return [None] * len(rng.roots)


def test_an_address_used_twice_in_a_round_raises():
    def twice(s):
        s.accept(torch.tensor([0.5]), torch.tensor([1.0]), 3)
        s.accept(torch.tensor([0.5]), torch.tensor([1.0]), 3)

    with pytest.raises(AddressReuse, match="row 0, position 5, purpose ACCEPT, number 3 was drawn before"):
        branches(lambda rng: rounds(rng, [5], twice))


def test_an_address_used_twice_over_rounds_raises_and_other_positions_do_not():
    def once(s):
        s.categorical(torch.ones(1, 2), Purpose.NEXT, 0)

    run = EnumeratingRng([()])
    assert rounds(run, [5, 6, 7], once) == [None]
    with pytest.raises(AddressReuse, match="position 5, purpose NEXT"):
        rounds(EnumeratingRng([()]), [5, 6, 5], once)


def test_target_noise_is_addressed_by_absolute_position():
    def ahead(s):
        s.categorical(torch.ones(1, 2), Purpose.TARGET, 0)
        s.categorical(torch.ones(1, 2), Purpose.TARGET, 2)

    assert rounds(EnumeratingRng([()]), [5, 6], ahead) == [None]  # 5, 7, 6, 8
    with pytest.raises(AddressReuse, match="position 7, purpose TARGET"):
        rounds(EnumeratingRng([()]), [5, 7], ahead)


def test_a_used_address_counts_even_if_nothing_was_left_to_chance():
    s = source(EnumeratingRng([()]))
    s.accept(torch.tensor([1.0]), torch.tensor([1.0]), 0)
    with pytest.raises(AddressReuse):
        s.accept(torch.tensor([0.5]), torch.tensor([1.0]), 0)


def test_purposes_and_parts_are_streams_of_their_own():
    s = source(EnumeratingRng([()]))
    for purpose in (Purpose.DRAFT, Purpose.NEXT, Purpose.TARGET):
        s.categorical(torch.ones(1, 2), purpose, 0)
    s.accept(torch.tensor([0.5]), torch.tensor([1.0]), 0)
    for part in (s.part(0), s.part(1), s.part(0).part(1)):
        part.categorical(torch.ones(1, 2), Purpose.DRAFT, 0)
    with pytest.raises(AddressReuse, match=r"part \(0, 1\)"):
        s.part(0).part(1).categorical(torch.ones(1, 2), Purpose.DRAFT, 0)


def test_shared_noise_keeps_its_value():
    """What `CounterRng` does with one address: one uniform variable, cut by each reading's own distribution function."""
    p, q = (0.5, 0.2, 0.3), (0.1, 0.6, 0.3)
    exact = pair_law(p, q, Purpose.DRAFT)
    assert exact == {(0, 0): pytest.approx(0.1), (0, 1): pytest.approx(0.4), (1, 1): pytest.approx(0.2), (2, 2): pytest.approx(0.3)}
    agrees_with_decoding(exact, p, q, Purpose.DRAFT)


@pytest.mark.parametrize("p, q", [((0.5, 0.2, 0.3), (0.1, 0.6, 0.3)), ((0.5, 0.0, 0.5), (0.3, 0.7, 0.0)), ((0.4, 0.6), (0.7, 0.3))])
def test_shared_noise_of_the_target_runs_a_race(p, q):
    """Both laws are as they should be, and one token is drawn with probability sum_i 1 / sum_k max(p_k / p_i, q_k / q_i)."""
    exact = pair_law(p, q, Purpose.TARGET)
    for which, wanted in enumerate((p, q)):
        assert [sum(w for pair, w in exact.items() if pair[which] == x) for x in range(len(p))] == pytest.approx(wanted, abs=1e-15)
    same = sum(1 / sum(max(a / p[i], b / q[i]) for a, b in zip(p, q, strict=True)) for i in range(len(p)) if p[i] and q[i])
    assert sum(w for (x, y), w in exact.items() if x == y) == pytest.approx(same, abs=1e-15)
    agrees_with_decoding(exact, p, q, Purpose.TARGET)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_law_of_a_second_race_adds_up(size):
    """Random weights, zeros among them: given the first, a law; over the first, the second's own."""
    draw = random.Random(size)
    for _ in range(50):
        a, b = ([draw.choice([0.0, draw.random()]) for _ in range(size - 1)] + [draw.random()] for _ in range(2))
        rows = [second_race(a, i, b) for i in range(size) if a[i]]
        assert all(sum(row) == pytest.approx(1, abs=1e-12) for row in rows)
        first = [x / sum(a) for x in a if x]
        mixed = [sum(x * row[j] for x, row in zip(first, rows, strict=True)) for j in range(size)]
        assert mixed == pytest.approx([y / sum(b) for y in b], abs=1e-12)


def test_a_third_race_has_no_law():
    def run(rng):
        s = source(rng)
        return [s.categorical(torch.ones(len(rng.roots), 3), Purpose.TARGET, 1).tolist() for _ in range(3)]

    with pytest.raises(ValueError, match="a third race"):
        branches(run, shared=frozenset({Purpose.TARGET}))


def pair_law(p, q, purpose):
    def run(rng):
        s = source(rng)
        x, y = (s.categorical(weights(rng, *w), purpose, 1) for w in (p, q))
        return list(zip(x.tolist(), y.tolist(), strict=True))

    return law(branches(run, shared=frozenset({purpose})))


def agrees_with_decoding(exact, p, q, purpose):
    s = CounterRng(range(20_000)).round(range(20_000), [5] * 20_000, CPU)
    x, y = (s.categorical(torch.tensor(w).double().expand(20_000, -1), purpose, 1) for w in (p, q))
    counts = torch.bincount(len(p) * x + y, minlength=len(p) ** 2).tolist()
    for pair in range(len(p) ** 2):
        share = exact.get(divmod(pair, len(p)), 0.0)
        assert abs(counts[pair] / 20_000 - share) <= 5 * math.sqrt(share * (1 - share) / 20_000)


def test_a_draw_past_the_source_is_noticed():
    with pytest.raises(Irreproducible, match="torch's global generator moved"):
        branches(lambda rng: torch.rand(len(rng.roots)).tolist())


def test_python_randomness_is_noticed_by_the_replay():
    with pytest.raises(Irreproducible, match="gave|Python's"):
        branches(lambda rng: [random.random() for _ in rng.roots])


def test_memory_is_noticed_by_the_replay():
    calls = []

    def run(rng):
        calls.append(None)
        return [len(calls)] * len(rng.roots)

    with pytest.raises(Irreproducible, match="in a replay among other rows"):
        branches(run)


def test_batch_mates_are_noticed_by_the_replay():
    def run(rng):
        x = source(rng).categorical(weights(rng, 1, 1, 1), Purpose.DRAFT, 0)
        return x.roll(1).tolist()

    with pytest.raises(Irreproducible, match="in a replay among other rows"):
        branches(run)


def test_options_that_vanish_are_noticed():
    calls = []

    def run(rng):
        calls.append(None)
        x = source(rng).categorical(weights(rng, 1, len(calls) == 1), Purpose.DRAFT, 0)
        return x.tolist()

    with pytest.raises(Irreproducible, match="option 1 was open"):
        branches(run)


def test_the_replay_gives_python_its_generator_back():
    random.seed(1)
    with other_seed():
        inside = random.getstate()
    expected = random.Random(1).getstate()
    assert random.getstate() == expected != inside


def test_weights_that_are_no_law_raise():
    for bad in ((0.0, 0.0), (float("nan"), 1.0), (-0.1, 1.0), (float("inf"), 1.0)):
        with pytest.raises(ValueError, match="row 0, position 5, purpose DRAFT, number 0: weights"):
            source(EnumeratingRng([()])).categorical(torch.tensor([bad]), Purpose.DRAFT, 0)
    with pytest.raises(ValueError, match="a coin of probability nan"):
        source(EnumeratingRng([()])).accept(torch.tensor([float("nan")]), torch.tensor([1.0]), 0)


def test_too_many_trajectories_are_refused_with_advice():
    def run(rng):
        s = source(rng)
        x = [s.categorical(weights(rng, 1, 1, 1, 1), Purpose.DRAFT, n) for n in range(6)]
        return torch.stack(x, 1).tolist()

    with pytest.raises(ValueError, match="more than 100 trajectories; use a smaller vocabulary or budget"):
        branches(run, limit=100)
