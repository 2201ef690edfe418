"""Trees of drafters that read the target, by the checks that any drafter passes: at T = 1 the law of the text is the target's, whatever
the head says."""

from __future__ import annotations

import pytest
from eagle_heads import config, filled, medusa, mtp

from specdec import EagleDrafter, MedusaDrafter, MTPDrafter
from specdec.drafters.grow import chain, dynamic, iid, mixed, points, static, without_replacement
from specdec.models.tiny import TinyTarget
from specdec.testing import parametrize_with_checks
from specdec.verifiers import TreeVerifier

pytestmark = pytest.mark.slow

TARGET = TinyTarget(4, seed=3)
FIRST, THIRD = (EagleDrafter, filled(config(1, TARGET))), (EagleDrafter, filled(config(3, TARGET)))
MTP, MEDUSA = (MTPDrafter, mtp(TARGET)), (MedusaDrafter, medusa(TARGET, heads=2))
TREES = [
    (THIRD, mixed(2, 1)), (FIRST, points(2)), (MTP, dynamic(2)), (MEDUSA, without_replacement(2)), (THIRD, iid(2, merge=True)),
    (MTP, static([(0,), (1,), (1, 1)])), (MEDUSA, mixed(2, 1)),
]  # fmt: skip


@parametrize_with_checks(
    [make(head, TARGET, grow=chain()) for make, head in (FIRST, THIRD, MTP, MEDUSA)], verifier=TreeVerifier(TARGET), plans=[(2, 2, 1)]
)
def test_chains(check):
    check()


@parametrize_with_checks(
    [make(head, TARGET, grow=shape) for (make, head), shape in TREES], verifier=TreeVerifier(TARGET), plans=[(3, 2, 2)]
)
def test_trees(check):
    check()
