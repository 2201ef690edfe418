"""EAGLE's trees by the checks that any drafter passes: at T = 1 the law of the text is the target's, whatever the head says."""

from __future__ import annotations

import pytest
from eagle_heads import config, filled

from specdec import EagleDrafter
from specdec.drafters.grow import chain, dynamic, iid, mixed, points, static, without_replacement
from specdec.models.tiny import TinyTarget
from specdec.testing import parametrize_with_checks
from specdec.verifiers import TreeVerifier

pytestmark = pytest.mark.slow

TARGET = TinyTarget(4, seed=3)
FIRST, THIRD = filled(config(1, TARGET)), filled(config(3, TARGET))
TREES = [mixed(2, 1), points(2), dynamic(2), without_replacement(2), iid(2, merge=True), static([(0,), (1,), (1, 1)])]


@parametrize_with_checks(
    [EagleDrafter(head, TARGET, grow=chain()) for head in (FIRST, THIRD)], verifier=TreeVerifier(TARGET), plans=[(2, 2, 1)]
)
def test_eagle_in_chains(check):
    check()


@parametrize_with_checks(
    [EagleDrafter(head, TARGET, grow=shape) for head, shape in zip([THIRD, FIRST] * 3, TREES, strict=True)],
    verifier=TreeVerifier(TARGET), plans=[(3, 2, 2)],
)  # fmt: skip
def test_eagle_in_trees(check):
    check()
