"""What every acceptor must pass: the battery, cell by cell, and what an exact law of one round cannot see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ..base import Acceptor
from ..loop import treats
from ..rng import CounterRng
from ..tree import check_answer
from ..types import Acceptance, Budget, DraftTree, Draws, Verification
from .battery import Cell, battery, certify
from .laws import Standing, emitted, shown, stand

__all__ = ["acceptor_checks"]


def one_cell(acceptor: Acceptor, cell: Cell) -> None:
    """The law of a round on one cell of the battery; kinds of draw that the acceptor does not take must be refused."""
    (row,) = certify(acceptor, cells=[cell])
    taken = treats(acceptor, cell.drafter)
    assert (row["verdict"] != "refused") == taken, f"takes {sorted(acceptor.takes)}, but draws {sorted(cell.drafter.draws)}: {row}"
    assert row["verdict"] != "fail", f"{row['shape']}, {row['proposal']}: defect {row['defect']}; {row['reason']}"


def _round(cell: Cell, rows: list[int]) -> tuple[Standing, DraftTree, Verification]:
    """A drafted and verified round of these of the cell's prompts, each with the noise of its own."""
    at = stand(cell.drafter, cell.verifier, [cell.prompts[row] for row in rows])
    source = CounterRng(rows).round(range(len(rows)), at.positions, torch.device("cpu"))
    tree = cell.drafter.propose(at.drafter, at.pending, Budget.of(*cell.plan, batch=len(rows)), source)
    return at, tree, shown(cell.verifier.verify(at.verifier, tree))


def _accept(acceptor: Acceptor, cell: Cell, rows: list[int]) -> tuple[DraftTree, Acceptance]:
    at, tree, verification = _round(cell, rows)
    return tree, acceptor.accept(tree, verification, CounterRng(rows).round(range(len(rows)), at.positions, torch.device("cpu")))


def answer(acceptor: Acceptor) -> None:
    """The path starts at the root, goes down over nodes on which a draw landed, and has -1 behind its count."""
    for cell in _some(acceptor):
        tree, got = _accept(acceptor, cell, list(range(len(cell.prompts))))
        try:
            check_answer(tree, got, cell.verifier.facts.vocab_size)
        except ValueError as error:
            raise AssertionError(f"{cell.shape}, {cell.proposal}: {error}") from None


def batch_invariance(acceptor: Acceptor) -> None:
    """A row's answer is the same among other rows, in another order, and alone."""
    for cell in _some(acceptor):
        order = [3, 1, 0, 2]
        for row, text in zip(order, emitted(*_accept(acceptor, cell, order)), strict=True):
            (alone,) = emitted(*_accept(acceptor, cell, [row]))
            assert text == alone, f"{cell.shape}, {cell.proposal}, row {row}: {text} in the batch {order}, {alone} alone"


def probes(acceptor: Acceptor) -> None:
    """A node on which no draw landed is never accepted, whatever the target says."""
    cell = next(_taken(acceptor), None)
    if cell is None:  # it takes nothing, so there is nothing that it might accept
        return
    at, tree, verification = _round(cell, list(range(len(cell.prompts))))
    nothing = torch.full((len(tree.tokens), 0), -1)
    bare = DraftTree(tree.tokens, tree.parents, Draws(nothing, nothing, nothing, frozenset()), tree.laws, tree.height)
    source = CounterRng(range(len(tree.tokens))).round(range(len(tree.tokens)), at.positions, torch.device("cpu"))
    count = acceptor.accept(bare, verification, source).count.tolist()
    assert count == [1] * len(tree.tokens), f"accepted {count} nodes a row, the root among them, of trees on which no draw landed"


def _taken(acceptor: Acceptor) -> Iterator[Cell]:
    return (cell for cell in battery() if treats(acceptor, cell.drafter) and cell.drafter.levels)


def _some(acceptor: Acceptor) -> Iterator[Cell]:
    """One cell for each shape in which rows may differ."""
    shapes = ("tree (2,2)", "merged samplers", "uneven rows", "uneven chain")
    return iter({cell.shape: cell for cell in _taken(acceptor) if cell.shape in shapes}.values())


def acceptor_checks(acceptor: Acceptor, cells: Sequence[Cell] | None = None) -> Iterator[tuple[str, Callable[[Acceptor], None]]]:
    """The named checks of an acceptor."""
    for cell in battery() if cells is None else cells:
        yield f"law-{cell.shape}-{cell.proposal}".replace(" ", "-"), partial(one_cell, cell=cell)
    yield from {"answer": answer, "batch-invariance": batch_invariance, "probes": probes}.items()
