"""The addressed source: its law is computed, not sampled; its draws depend on the address alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specdec.rng import CounterRng, CounterSource, Purpose, derive_seeds, uniform

CPU = torch.device("cpu")


def realised_law(weights: torch.Tensor) -> np.ndarray:
    """The exact law of `categorical` over the 2^53 values that its uniform takes, found from the boundaries between tokens."""
    cdf = weights.double().cumsum(-1)
    total = cdf[-1]
    below = torch.nextafter(total, torch.zeros_like(total))
    guess = (cdf / total * 2.0**53).floor().to(torch.int64)
    # first k whose u = k 2^-53 reaches a boundary: the quotient is right to a few units, so look around it
    around = guess[:, None] + torch.arange(-4, 5)
    reaches = torch.minimum(around.double() * 2.0**-53 * total, below) >= cdf[:, None]
    assert (~reaches[:, 0]).logical_or(guess <= 4).all()
    first = torch.where(reaches.any(-1), around.gather(1, reaches.to(torch.int64).argmax(-1, keepdim=True))[:, 0], 2**53).clamp(0, 2**53)
    first[-1] = 2**53
    return np.diff(first.numpy(), prepend=0) / 2.0**53


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_law_error_of_a_categorical_draw_is_below_1e_9_at_152k(spread: float) -> None:
    g = torch.Generator().manual_seed(0)
    weights = torch.softmax(spread * torch.randn(151_936, generator=g, dtype=torch.float64), -1)
    law = realised_law(weights)
    total = math.fsum(weights.tolist())
    assert abs(law.sum() - 1) < 1e-12
    assert 0.5 * np.abs(law - weights.numpy() / total).sum() < 1e-9


def test_realised_law_agrees_with_the_source() -> None:
    """The computation above speaks of the code that runs: the token of a given uniform is the one its interval says."""
    weights = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    bounds = np.cumsum(realised_law(weights))
    rows = 4_000
    source = CounterRng(range(rows)).round(range(rows), [7] * rows, CPU)
    u = source._uniform(Purpose.DRAFT, 3)
    token = source.categorical(weights.expand(rows, -1), Purpose.DRAFT, 3)
    assert token.tolist() == [int((bounds > x).argmax()) for x in u.tolist()]
    assert set(token.tolist()) == {1, 3, 4}


class Fixed(CounterSource):
    """A source whose uniform is given."""

    def __init__(self, u: float) -> None:
        self.u = torch.tensor([u], dtype=torch.float64)

    def _uniform(self, purpose: Purpose, number: int) -> torch.Tensor:
        return self.u


LARGEST = 1 - 2.0**-53


@pytest.mark.parametrize("u", [0.0, 0.5, LARGEST])
@pytest.mark.parametrize("total", [1e-30, 0.7, 1.0, 1.1, 1.9999999, 3e20])
def test_extreme_uniforms_never_draw_weight_zero(u: float, total: float) -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64) * total
    assert int(Fixed(u).categorical(weights, Purpose.NEXT, 0)) in (1, 3)


def test_coins_are_strict() -> None:
    one, zero = torch.ones(1), torch.zeros(1)
    assert not Fixed(0.0).accept(zero, one, 0)  # p = 0 is never accepted, not even at u = 0
    assert not Fixed(0.0).accept(zero, zero, 0)
    assert Fixed(LARGEST).accept(one, one, 0)  # p = q is never rejected
    assert Fixed(LARGEST).accept(torch.tensor([0.3]), torch.tensor([0.3]), 0)
    assert Fixed(0.5).accept(one, zero, 0)
    assert not Fixed(0.5).accept(torch.tensor([0.5]), one, 0)


def test_draws_depend_on_the_address_alone() -> None:
    rng = CounterRng([11, 22, 33])
    weights = torch.rand(3, 50, generator=torch.Generator().manual_seed(1))
    whole = rng.round([0, 1, 2], [5, 9, 9], CPU).categorical(weights, Purpose.DRAFT, 4)
    mixed = rng.round([2, 0, 1], [9, 5, 9], CPU).categorical(weights[[2, 0, 1]], Purpose.DRAFT, 4)
    assert mixed.tolist() == whole[[2, 0, 1]].tolist()
    for row, position in enumerate([5, 9, 9]):
        alone = CounterRng([[11, 22, 33][row]]).round([0], [position], CPU).categorical(weights[row : row + 1], Purpose.DRAFT, 4)
        assert alone.item() == whole[row]


def test_every_part_of_the_address_counts() -> None:
    values = [
        CounterRng([seed]).round([0], [position], CPU)._uniform(purpose, number).item()
        for seed in (0, 1, -1, 2**63, 2**64 - 2)
        for position in (0, 1, 100)
        for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.NEXT)
        for number in (0, 1, 63)
    ]
    source = CounterRng([0]).round([0], [0], CPU)
    values += [source.part(i).part(j)._uniform(Purpose.DRAFT, 0).item() for i in range(3) for j in range(3)]
    assert len(set(values)) == len(values)


def test_target_noise_belongs_to_the_absolute_position() -> None:
    rng = CounterRng([3])
    near, far = rng.round([0], [10], CPU), rng.round([0], [12], CPU)
    assert near._uniform(Purpose.TARGET, 2) == far._uniform(Purpose.TARGET, 0)
    assert near._uniform(Purpose.NEXT, 2) != far._uniform(Purpose.NEXT, 0)


def test_uniforms_are_uniform_and_unrelated() -> None:
    x = uniform(torch.arange(400_000))
    counts = torch.histc(x, 100, 0, 1).double()
    assert ((counts - 4_000) ** 2 / 4_000).sum() < 180  # chi-square with 99 degrees of freedom, p < 1e-6 beyond
    assert x.min() >= 0 and x.max() < 1
    assert abs(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]) < 5 / math.sqrt(400_000)


def test_seeds() -> None:
    assert derive_seeds([5, 6], 2) == [5, 6]
    assert derive_seeds(7, 3) == derive_seeds(7, 3) and len(set(derive_seeds(7, 3))) == 3
    assert derive_seeds(7, 2) == derive_seeds(7, 3)[:2]
    assert derive_seeds(None, 2) != derive_seeds(None, 2)
    assert all(0 <= seed < 2**63 for seed in derive_seeds(-1, 4))
    with pytest.raises(ValueError, match="2 seeds for a batch of 3"):
        derive_seeds([1, 2], 3)
