"""The exact law of texts that a draft model helped to write, every branch walked: it is the target's, whatever the draft model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from specdec import RejectionAcceptor
from specdec.drafters import EarlyExitDrafter, ModelDrafter
from specdec.models.tiny import TinyTarget
from specdec.testing import parametrize_with_checks
from specdec.testing.laws import hazard_defect, several_rounds, target_law
from specdec.testing.tolerances import ROUND_LAW
from specdec.verifiers import TreeVerifier

pytestmark = pytest.mark.slow


class Changed:
    """A model whose logits are something else."""

    def __init__(self, inner: TinyTarget, change: Any) -> None:
        self.inner, self.change, self.facts, self.new_cache = inner, change, inner.facts, inner.new_cache

    def forward(self, *args: Any, logits: bool, **kwargs: Any) -> Any:
        found, features = self.inner.forward(*args, logits=logits, **kwargs)
        return (self.change(found) if logits else found), features


def own_law(**settings: Any) -> ModelDrafter:
    return ModelDrafter(TinyTarget(3, hidden_size=16, num_layers=1, seed=6), **settings)


TINY = TinyTarget(3, hidden_size=16, seed=5)
KINDS = {
    "model": own_law(),
    "points": own_law(sample=False),
    "sharper": own_law(logits_processor=[TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)]),
    # logits of few digits, which rounding cannot make depend on the batch that a branch is walked in
    "float32": ModelDrafter(Changed(TinyTarget(3, hidden_size=16, num_layers=1, seed=6), lambda x: x.float().round(decimals=3))),
    "larger vocabulary": ModelDrafter(TinyTarget(5, hidden_size=16, num_layers=1, seed=6)),
    "smaller vocabulary": ModelDrafter(TinyTarget(2, hidden_size=16, num_layers=1, seed=6)),
    "smaller context": ModelDrafter(TinyTarget(3, hidden_size=16, num_layers=1, seed=6, max_positions=4)),
    "nonsense": ModelDrafter(Changed(TinyTarget(3, hidden_size=16, num_layers=1, seed=6), lambda x: x.where(x > 1.0, torch.nan))),
    "early exit": EarlyExitDrafter(TINY, 1),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_law_of_several_rounds_is_the_targets(name):
    verifier, prompt = TreeVerifier(TINY), (1, 2)
    law = several_rounds(KINDS[name], verifier, RejectionAcceptor(), [prompt], (2, 2, 1))[prompt]
    assert max(map(len, law)) == (4 if name == "smaller context" else 6)  # all that both rounds may draft is accepted now and then
    assert hazard_defect(law, target_law(verifier, prompt)) <= ROUND_LAW


@parametrize_with_checks([KINDS["model"], KINDS["points"], KINDS["early exit"]], verifier=TreeVerifier(TINY), plans=[(2, 2, 1)])
def test_checks(check):
    check()
