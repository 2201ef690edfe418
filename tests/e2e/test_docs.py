"""What the pages print is what the commands say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec import acceptors
from specdec.acceptors import TypicalAcceptor
from specdec.cli.certify import _line
from specdec.testing import certify
from specdec.testing.battery import battery
from specdec.testing.laws import autoregressive, extended, one_round, tabulated, total_variation
from specdec.testing.mutant_acceptors import mutant_acceptors
from specdec.testing.mutants import mutant_drafters

pytestmark = pytest.mark.slow

MATH = Path(__file__).parents[2] / "docs" / "math"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in MATH.glob("*.md")}
CELLS = {(cell.shape, cell.proposal): cell for cell in battery()}
CHEAP = [cell for cell in battery() if cell.shape in ("level 2", "uneven chain", "two rounds")]


def told(line: str) -> tuple[str, ...]:
    """A line of a certificate without its defect, which is rounding."""
    return tuple(re.sub(r"\d\.\de[-+]\d\d", "", line).split())


@pytest.mark.slow
@pytest.mark.parametrize("name", acceptors.__all__)
def test_every_rule_has_a_page_with_its_certificate(name):
    (printed,) = [page for page in PAGES.values() if f"<!-- certificate: {name} -->" in page]
    lines = {told(line) for line in printed.splitlines() if line.startswith(name)}
    assert len(lines) == len(battery()) + 3  # and what no law can see
    for row in certify(getattr(acceptors, name)(), cells=CHEAP):
        assert told(_line(row)) in lines, f"run: specdec certify --acceptor {name}"


def test_every_fault_is_in_the_table():
    """`test_adequacy` compares the columns of the weaker tests."""
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in PAGES["mutants.md"].splitlines()]
    told = {row[0].replace("\\", ""): row[1] for row in cells if len(row) > 1}
    assert {name: f"`{mutant.check}`" for name, mutant in {**mutant_acceptors(), **mutant_drafters()}.items()}.items() <= told.items()


def test_links_lead_somewhere():
    for name, page in PAGES.items():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page):
            assert (MATH / link).exists(), f"{name}: {link}"


def test_the_distance_of_a_lossy_rule():
    """Total variation of the first three tokens, over the pairs of laws."""
    columns = [("chain 3", "iid"), ("chain 3", "point"), ("tree (2,2)", "iid"), ("tree (2,2)", "point")]
    found = []
    for cell in (CELLS[column] for column in columns):
        laws = one_round(cell.drafter, cell.verifier, TypicalAcceptor(), cell.prompts, cell.plan)
        targets = tabulated(cell.verifier, cell.prompts, 3)
        found.append([total_variation(extended(laws[p], targets[p], 3), autoregressive(targets[p], 3)) for p in cell.prompts])
    for words, number in (("mean over the pairs", lambda off: sum(off) / len(off)), ("worst", max)):
        wanted = " | ".join(f"{number(off):.2f}" for off in found)
        assert re.search(rf"\| .*{words}.* \| {re.escape(wanted)} \|", PAGES["lossy.md"]), f"{words}: {wanted}"
