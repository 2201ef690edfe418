"""The kernel of the lossless rules on vectors as long as real ones: what passes and what is left over make up the law, in the dtype in
which decoding computes it."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.acceptors.residual import failing, passing
from specdec.testing.numerics import kernel_defect
from specdec.types import Verification

pytestmark = pytest.mark.slow

SIZES = (49152, 151936)
BUDGETS = (0.0, math.log(0.5), math.log(1e-3), math.log(1e-30), -math.inf)
LIMIT = {torch.float64: 1e-15, torch.float32: 1e-7}


def law(scores):
    """As acceptors get it."""
    return Verification(scores[None, None]).law(torch.zeros(1, dtype=torch.int64))


def cut(scores, k):
    return torch.where(scores >= scores.topk(k).values[-1], scores, -torch.inf)


def pairs(size, dtype):
    """Scores of a target and of a draft model."""
    g = torch.Generator().manual_seed(size)

    def noise(spread):
        return (spread * torch.randn(size, generator=g, dtype=torch.float64)).to(dtype)

    for spread in (0.1, 1, 4, 12):
        x = noise(spread)
        yield f"unrelated, spread {spread}", x, noise(spread)
        yield f"equal, spread {spread}", x, x.clone()
        yield f"nearly equal, spread {spread}", x, x + noise(1e-6)
        yield f"close, spread {spread}", x, x + noise(0.5)
    x, y, half = noise(3), noise(3), torch.arange(size) < size // 2
    yield "both cut", cut(x, 50), cut(x + y, 50)
    yield "target cut", cut(x, 50), x
    yield "draft cut", x, cut(x, 50)
    yield "one token", cut(x, 1), y
    yield "disjoint", x.masked_fill(half, -torch.inf), y.masked_fill(~half, -torch.inf)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_what_passes_and_what_is_left_over_make_up_the_law(size, dtype):
    """q(x) alpha(x) + F a' r'(x) = a r(x) with F = 1 - sum q alpha, in float64 around the numbers of the dtype."""
    for name, x, y in pairs(size, dtype):
        r, q = law(x), law(y)
        for budget in BUDGETS:
            a = torch.tensor([budget], dtype=torch.float64)
            less, left = failing(a, r, q)
            assert (less.dtype, left.dtype) == (torch.float64, dtype) and float(less) <= 0 and abs(float(left.double().sum()) - 1) < 1e-6
            found = kernel_defect(a, r, q)
            assert found.defect <= LIMIT[dtype], (name, budget)
            assert found.total <= 3 * LIMIT[dtype], (name, budget)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_laws_sum_to_one_in_their_own_dtype(dtype):
    """A float32 softmax alone is off by 1e-5 on large vocabularies, and what is left after a rejection would be off by as much."""
    for _, x, _ in pairs(SIZES[1], dtype):
        assert abs(float(law(x).double().sum()) - 1) <= 5 * LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_a_budget_too_small_for_a_number_comes_back(dtype):
    """Down a path on which the draft was first far too sure, and then the target is: only the logarithm can hold exp(-200) in float32."""
    tiny = math.exp(-70)
    r, q = torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([[tiny, 1.0]], dtype=dtype)
    step = math.log(float(q[0, 0]))  # as the dtype rounds it
    budget, token = torch.tensor([-200.0], dtype=torch.float64), torch.tensor([0])
    for wanted in (-200 - step, -200 - 2 * step, 0.0, 0.0):
        budget = passing(budget, r, q, token)
        assert float(budget) == pytest.approx(wanted, abs=1e-12)
    for _ in range(3):
        budget = passing(budget, q, r, token)
    assert float(budget) == pytest.approx(3 * step, abs=1e-12)


def test_edges_of_a_weight():
    """r(x) > 0 = q(x) passes, r(x) = 0 does not, and nothing passes without a budget."""
    r, q = torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    for budget, wanted in ((0.0, [0.0, math.log(0.5), -math.inf, -math.inf]), (-math.inf, [-math.inf] * 4)):
        found = [float(passing(torch.tensor([budget], dtype=torch.float64), r, q, torch.tensor([x]))) for x in range(4)]
        assert found == pytest.approx(wanted)


def test_where_nothing_is_left_over_the_old_law_stands():
    law = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    less, left = failing(torch.tensor([-1.0], dtype=torch.float64), law, law)
    assert float(less) == -math.inf and torch.equal(left, law)
