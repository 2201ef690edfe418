"""Every negative control, what rejects it and why, and which weaker tests it would have passed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from ..base import Acceptor
from .checks import checks_for
from .mutant_acceptors import mutant_acceptors
from .mutants import Mutant, mutant_drafters
from .purity import RAISED
from .weaker import weaker_tests

__all__ = ["mutant_rows", "rejection"]


def rejection(mutant: Mutant) -> str | None:
    """What its check says of a faulty part; `None` if the check lets it through."""
    return _said(mutant.part, mutant.check)


def mutant_rows() -> Iterator[dict[str, Any]]:
    """One row per mutant: `mutant` (its name), `part` ("drafter" or "acceptor"), `check` (that must reject it), `rejected` (for its own
    fault, while its honest sibling is not), `reason`, and for acceptors `weaker`: whether each weaker test would have let it through."""
    for part, mutants in (("drafter", mutant_drafters()), ("acceptor", mutant_acceptors())):
        for name, mutant in mutants.items():
            reason, unjust = rejection(mutant), _said(mutant.honest, mutant.check)
            rejected = reason is not None and re.search(mutant.says, reason) is not None and unjust is None
            weaker = weaker_tests(cast(Acceptor, mutant.part)) if part == "acceptor" else None
            if unjust is not None:
                reason = f"its honest sibling is rejected too: {unjust}"
            yield {"mutant": name, "part": part, "check": mutant.check, "rejected": rejected, "reason": reason, "weaker": weaker}


def _said(part: Any, check: str) -> str | None:
    try:
        dict(checks_for(part))[check]()
    except RAISED as error:
        return f"{type(error).__name__}: {error}"
    return None
