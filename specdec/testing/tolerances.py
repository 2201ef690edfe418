"""How far two numbers that ought to be equal may lie apart in a test, and why. Integers and token ids are compared exactly."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["CACHE", "DUST", "LAW", "ROUND_LAW", "TOTAL", "TREE_PASS"]

DUST = 1e-14
"""A share of probability that stands for an exact zero: what is left of p - q in float64 where p and q are equal. Dropping such a
branch moves a law by as much, two orders below `ROUND_LAW`."""

TOTAL = 1e-12
"""Sum of the probabilities of all branches against 1: rounding of at most 10^5 products in float64, and the dust."""

ROUND_LAW = 1e-12
"""Hazard of an emitted token against the target's law, float64 throughout. The identity is exact; what is left is the rounding of some
tens of operations, and honest rules stay below 1e-14 here. A fault shows at 1e-8 (one coin in 2^24) or above."""

LAW: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""A declared draft law against the law drawn from, by the dtype of the declared law: the declared numbers are the weights drawn from,
so they differ by the renormalisation alone, which is as good as the sum of a law in that dtype."""

TREE_PASS: Mapping[torch.dtype, float] = {torch.float64: 1e-10, torch.float32: 2e-4}
"""Log-probabilities of one tree pass against one pass per node. Both sum the same terms in another order. Hugging Face models in
float64 compute rotary embeddings, norms and softmax in float32 and need 1e-6."""

CACHE = TREE_PASS
"""The next law after any sequence of rounds against a fresh prefill of the committed tokens."""
