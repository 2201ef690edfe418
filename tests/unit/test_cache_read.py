"""Text that is read into a cache: rows of their own lengths, and what stands behind them."""

from __future__ import annotations

import pytest
import torch

from specdec.cache import read
from specdec.models.tiny import TinyTarget
from specdec.testing.tolerances import TREE_PASS

V = 11
EXACT = TREE_PASS[torch.float64]


def test_what_lies_behind_a_row_is_read_where_the_model_has_a_position():
    """A row with nothing to read may be full; an id may be none of the model's."""
    model = TinyTarget(V, num_layers=1, max_positions=4, seed=4)
    cache = model.new_cache(3)
    read(model, cache, torch.tensor([[1, 2, 3, 4], [5, V + 9, -1, V], [6, 7, 8, V]]), torch.tensor([4, 1, 0]), logits=False)
    logits, features = read(model, cache, torch.tensor([[V, V], [V + 1, 3], [2, V]]), torch.tensor([0, 2, 1]), logits=True)
    assert features is None and cache.lengths == [4, 3, 1]
    torch.testing.assert_close(logits[1, 1], model(torch.tensor([[5, 0, 3]]))[0], atol=EXACT, rtol=0)
    torch.testing.assert_close(logits[2, 0], model(torch.tensor([[2]]))[0], atol=EXACT, rtol=0)
    with pytest.raises(ValueError, match="position"):  # a token that counts is not moved
        read(model, cache, torch.tensor([[1], [1], [1]]), torch.tensor([1, 0, 0]), logits=False)
