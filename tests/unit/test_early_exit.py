"""A target with its first layers alone, as a draft model."""

from __future__ import annotations

import pytest
import torch

from specdec.drafters import EarlyExitDrafter
from specdec.models.tiny import TinyTarget

TARGET = TinyTarget(11, seed=3)


class Whole:
    """A target that can't be shortened."""

    def __init__(self) -> None:
        self.facts, self.new_cache, self.forward = TARGET.facts, TARGET.new_cache, TARGET.forward


def test_a_target_with_its_first_layers_alone():
    shorter = TARGET.first(1)
    assert shorter.facts.num_layers == 1 and TARGET.facts.num_layers == 2 and shorter.net is TARGET.net
    ids = torch.tensor([[1, 2, 3]])
    state = TARGET.net.hidden(ids, torch.arange(3)[None], torch.ones(3, 3, dtype=torch.bool).tril(), None, 2)[1]
    torch.testing.assert_close(shorter(ids), TARGET.net.logits(state[:, -1]))
    assert TARGET.first(2)(ids).equal(TARGET(ids)) and not shorter(ids).equal(TARGET(ids))
    with pytest.raises(ValueError, match="layers"):
        shorter.first(2)


def test_what_cannot_exit_early_is_refused():
    for layers in (0, 3, -1):
        with pytest.raises(ValueError, match=rf"layers: got {layers}; allowed are 1 to 2"):
            EarlyExitDrafter(TARGET, layers)
    with pytest.raises(TypeError, match="Whole cannot be run with its first layers alone"):
        EarlyExitDrafter(Whole(), 1)
