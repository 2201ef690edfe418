"""Exactness proved by computation: the law of a round is enumerated, not sampled."""

from .battery import certify
from .checks import check_acceptor, check_drafter, checks_for, parametrize_with_checks
from .enumerate import AddressReuse, EnumeratingRng, Irreproducible, branches
from .laws import hazard_defect, one_round, several_rounds

__all__ = [
    "AddressReuse", "EnumeratingRng", "Irreproducible", "branches", "certify", "check_acceptor", "check_drafter", "checks_for",
    "hazard_defect", "one_round", "parametrize_with_checks", "several_rounds",
]  # fmt: skip
