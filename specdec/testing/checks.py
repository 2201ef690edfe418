"""One decorator that checks a drafter or an acceptor: `parametrize_with_checks([MyDrafter()])`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, singledispatch
from typing import Any

from ..base import Acceptor, Drafter, Verifier
from .acceptor_checks import acceptor_checks
from .battery import Cell
from .drafter_checks import drafter_checks
from .laws import Plan, Tokens
from .purity import RAISED
from .subject import LOSSLESS, subject

__all__ = ["check_acceptor", "check_drafter", "checks_for", "parametrize_with_checks"]

Check = tuple[str, Callable[[], None]]


@singledispatch
def checks_for(part: Any, **options: Any) -> Iterator[Check]:
    """The checks of a drafter or an acceptor, as names and functions without arguments that raise `AssertionError`.

    Args:
        options: the arguments of `check_drafter` or `check_acceptor`.
    """
    raise TypeError(f"checks are for a Drafter or an Acceptor, got {type(part).__name__}")


@checks_for.register
def _(part: Drafter, **options: Any) -> Iterator[Check]:
    world = subject(part, **options)
    return ((name, partial(check, world)) for name, check in drafter_checks(world))


@checks_for.register
def _(part: Acceptor, *, cells: Sequence[Cell] | None = None) -> Iterator[Check]:
    return ((name, partial(check, part)) for name, check in acceptor_checks(part, cells))


def check_drafter(drafter: Drafter, *, vocab_size: int = 4, verifier: Verifier | None = None, acceptors: Sequence[Acceptor] = LOSSLESS,
                  contexts: Sequence[Tokens] | None = None, plans: Sequence[Plan] = ((3, 3, 3), (3, 2, 2))) -> None:  # fmt: skip
    """Raise `AssertionError` naming every check that the drafter fails.

    The law that it draws from is computed by walking every branch, so the vocabulary has to be small: build a drafter of the same class
    on a model of a few tokens.

    Args:
        vocab_size: ids of the contexts lie below it, and a random target over so many tokens is used.
        verifier: the target instead, for a drafter that reads features or has a model of its own; float64.
        acceptors: lossless rules under which the law of the output is computed; those that do not take its draws are left out.
        contexts: token ids that drafting starts from, none empty; a few short ones with repetitions if left out.
        plans: budgets (nodes, depth, width) for which laws are computed.
    """
    _run(checks_for(drafter, vocab_size=vocab_size, verifier=verifier, acceptors=acceptors, contexts=contexts, plans=plans), drafter)


def check_acceptor(acceptor: Acceptor, *, cells: Sequence[Cell] | None = None) -> None:
    """Raise `AssertionError` naming every check that the acceptor fails. `certify` gives its numbers.

    Args:
        cells: of `specdec.testing.battery.battery()`, on which the law of a round is computed; all of them if left out.
    """
    _run(checks_for(acceptor, cells=cells), acceptor)


def _run(checks: Iterator[Check], part: Drafter | Acceptor) -> None:
    failed: list[tuple[str, BaseException]] = []
    for name, check in checks:
        try:
            check()
        except RAISED as error:  # the next check may still say more
            failed.append((name, error))
    if failed:
        told = "\n".join(f"  {name}: {type(error).__name__}: {error}" for name, error in failed)
        raise AssertionError(f"{type(part).__name__} fails {len(failed)} checks\n{told}") from failed[0][1]


def parametrize_with_checks(parts: Sequence[Drafter | Acceptor], **options: Any) -> Callable[[Callable], Callable]:
    """A pytest decorator that turns one function into a test per part and check.

        @parametrize_with_checks([MyDrafter()])
        def test_my_drafter(check):
            check()

    Args:
        parts: drafters or acceptors. Several of one class are told apart by their place.
        options: the arguments of `check_drafter` or `check_acceptor`.
    """
    import pytest  # only those who test need it

    names = [type(part).__name__ for part in parts]
    labels = [name if names.count(name) == 1 else f"{name}{place}" for place, name in enumerate(names)]
    found = [(label, check) for part, label in zip(parts, labels, strict=True) for check in checks_for(part, **options)]
    return pytest.mark.parametrize("check", [pytest.param(check, id=f"{label}-{name}") for label, (name, check) in found])
