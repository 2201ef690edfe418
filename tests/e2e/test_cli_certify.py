"""`specdec certify` for a reader's own classes: rows, reasons, counterexamples, mutants, and errors that say what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specdec
from specdec.cli import certify, main
from specdec.testing import mutant_report
from specdec.testing.battery import battery

pytestmark = pytest.mark.slow

KEYS = {"acceptor", "drafter", "proposal", "shape", "lossless", "defect", "expected_tokens", "efficiency", "verdict", "reason"}

MINE = """
from dataclasses import replace

import torch

from specdec.acceptors import MatchAcceptor
from specdec.base import Acceptor, ContextDrafter
from specdec.types import Kind


class Good(MatchAcceptor):
    pass


class Bad(Acceptor):
    lossless, takes = True, frozenset(Kind)

    def accept(self, tree, verification, source):
        got = MatchAcceptor().accept(tree, verification, source)
        return replace(got, next_token=torch.where(got.count > 1, torch.zeros_like(got.next_token), got.next_token))


class Raises(Acceptor):
    lossless, takes = True, frozenset(Kind)

    def accept(self, tree, verification, source):
        raise RuntimeError("not written yet")


class Quits(Acceptor):
    lossless, takes = True, frozenset(Kind)

    def accept(self, tree, verification, source):
        raise SystemExit(0)


class Silent(Acceptor):
    def accept(self, tree, verification, source):
        return MatchAcceptor().accept(tree, verification, source)


class Unfinished(Acceptor):
    lossless, takes = True, frozenset(Kind)


class Needs(Good):
    def __init__(self, strength):
        self.strength = strength


class Repeat(ContextDrafter):
    def guess(self, ids, budget):
        return [[int(row[-1])] * 2 for row in ids]


class Peeks(ContextDrafter):
    def guess(self, ids, budget):
        return [[int(ids[0][-1])] for _ in ids]


class Neither:
    pass
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    """A folder with a reader's module."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_rules.py").write_text(MINE, encoding="utf-8")
    yield folder
    sys.modules.pop("my_rules", None)


@pytest.fixture
def call(module, monkeypatch, capsys):
    """Run the command in the reader's folder, on the cells of one shape."""
    monkeypatch.chdir(module)
    monkeypatch.setattr(certify, "battery", lambda: [cell for cell in battery() if cell.shape == "level 2"])

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(["certify", *argv]), *capsys.readouterr()

    return run


def test_acceptors_of_one_s_own_beside_the_library_s(call):
    status, out, err = call("RejectionAcceptor", "--acceptor", "my_rules:Good", "--acceptor", "BlockAcceptor", "--json")
    rows = [row for row in json.loads(out) if row["proposal"] != "any"]
    assert (status, err) == (0, "") and [row["acceptor"] for row in rows] == ["RejectionAcceptor"] * 4 + ["Good"] * 4 + [
        "BlockAcceptor"
    ] * 4
    assert all(row.keys() == KEYS for row in rows)
    assert {row["verdict"] for row in rows if row["acceptor"] != "BlockAcceptor"} == {"pass"}
    assert {row["verdict"] for row in rows if row["acceptor"] == "BlockAcceptor"} == {"refused"}


def test_a_rule_that_fails_is_told_by_hand(call):
    status, out, err = call("my_rules:Bad", "--json")
    rows = [row for row in json.loads(out) if row["proposal"] != "any"]
    assert (
        status == 1
        and [row["verdict"] for row in rows] == ["fail"] * 4
        and ["counterexample" in row for row in rows] == [True, *[False] * 3]
    )
    assert err.startswith("specdec certify: 4 claims of losslessness do not hold; first Bad on level 2, point: worst for the pair of laws")
    example = rows[0]["counterexample"]
    assert (example["shape"], example["prefix"], example["token"], example["given"], example["wanted"]) == ("chain 1", [0], 0, "1", "1/2")
    told = call("my_rules:Bad")[1]
    assert (
        "    its text begins with 0 and goes on with probability 1/2; the next token is then 0 with probability 1; the target says 1/2"
        in told
    )


def test_a_rule_that_raises(call):
    status, out, _ = call("my_rules:Raises", "--json")
    row = json.loads(out)[0]
    assert status == 1 and re.fullmatch(r"RuntimeError: not written yet \(my_rules.py, line \d+\)", row["reason"])
    assert row["counterexample"]["error"] == "RuntimeError: not written yet"


def test_a_rule_that_ends_the_program_has_failed(call):
    status, out, _ = call("my_rules:Quits", "--json")
    rows = json.loads(out)
    assert status == 1 and {row["verdict"] for row in rows} == {"fail"} and rows[0]["reason"].startswith("SystemExit: 0")
    assert rows[0]["counterexample"]["error"] == "SystemExit: 0"


def test_the_table_has_a_column_for_efficiency(call):
    _, out, _ = call("RejectionAcceptor")
    head, point, *_ = out.splitlines()
    assert head.split() == ["acceptor", "shape", "drawn", "defect", "tokens", "of", "best", "verdict"] and point.split()[-2:] == [
        "1.000",
        "pass",
    ]


def test_rows_come_as_they_are_known(call, monkeypatch, capsys):
    seen = []

    def certified(acceptor, *, cells):
        seen.append(capsys.readouterr().out.count("\n"))
        return honest(acceptor, cells=cells)

    honest = certify.testing.certify
    monkeypatch.setattr(certify.testing, "certify", certified)
    assert call("MatchAcceptor")[0] == 0 and seen == [1, 1, 1, 1]  # the head before the first row, then one row each


# ------------------------------------------------------------------------------------------------------------------ drafters


@pytest.mark.slow
def test_a_drafter_of_one_s_own(call):
    status, out, err = call("--drafter", "my_rules:Repeat", "--json")
    rows = json.loads(out)
    assert (status, err) == (0, "") and all(
        row.keys() == KEYS and row["drafter"] == "Repeat" and row["proposal"] == "point" for row in rows
    )
    assert {row["acceptor"] for row in rows} == {type(rule).__name__ for rule in certify.LOSSLESS} and {
        row["efficiency"] for row in rows
    } == {None}
    assert all(row["verdict"] == ("refused" if row["acceptor"] == "BlockAcceptor" else "pass") for row in rows)


def test_a_drafter_that_fails_a_check_fails_every_row(call):
    status, out, err = call("--drafter", "my_rules:Peeks", "--acceptor", "MatchAcceptor", "--json")
    rows = json.loads(out)
    assert status == 1 and len(rows) == 2 and all(row["verdict"] == "fail" and "batch-invariance: " in row["reason"] for row in rows)
    assert rows[0]["defect"] < 1e-12 and "first MatchAcceptor on budget 3,3,3, point: " in err


def test_a_drafter_of_the_library(call):
    rows = json.loads(call("--drafter", "NullDrafter", "--acceptor", "MatchAcceptor", "--json")[1])
    assert {row["verdict"] for row in rows} == {"pass"} and {row["expected_tokens"] for row in rows} == {1.0}


# ------------------------------------------------------------------------------------------------------------------- mutants


@pytest.fixture
def few_mutants(monkeypatch):
    for part, names in (("drafters", ["torch.rand"]), ("acceptors", ["no residual", "accepts probes"])):
        every = getattr(mutant_report, f"mutant_{part}")()
        monkeypatch.setattr(mutant_report, f"mutant_{part}", lambda every=every, names=names: {name: every[name] for name in names})


@pytest.mark.slow
def test_mutants_and_what_weaker_tests_say(call, few_mutants):
    status, out, _ = call("--mutants", "--json")
    rows = json.loads(out)
    assert status == 0 and [(row["mutant"], row["rejected"]) for row in rows] == [
        ("torch.rand", True),
        ("no residual", True),
        ("accepts probes", True),
    ]
    assert rows[0]["weaker"] is None and rows[1]["weaker"]["draft equal to target"] and not rows[1]["weaker"]["one drafted token"]
    assert all(rows[2]["weaker"].values()) and "no draw landed" in rows[2]["reason"]
    told = call("--mutants")[1]
    assert (
        "acceptor no residual" in told
        and "  rejected by law-chain-3-iid: AssertionError" in told
        and told.endswith("3 of 3 faulty parts are rejected\n")
    )


@pytest.mark.slow
def test_a_mutant_that_gets_through_fails(call, few_mutants, monkeypatch):
    monkeypatch.setattr(mutant_report, "_said", lambda part, check: None)
    status, out, err = call("--mutants", "--json")
    assert status == 1 and not any(row["rejected"] for row in json.loads(out))
    assert (
        err == "specdec certify: 3 faulty parts are not rejected: drafter 'torch.rand', acceptor 'no residual', acceptor 'accepts probes'\n"
    )


# -------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--acceptor", "Nope"], "ACCEPTOR: Nope unknown; allowed are BlockAcceptor"),
        (["--drafter", "Nope"], "--drafter: Nope unknown; allowed are "),
        (["no_such_module:Class"], "ACCEPTOR: cannot import 'no_such_module' from "),
        (["my_rules.py:Good"], "give module:Class, without .py"),
        (["my_rules:Better"], "ACCEPTOR: my_rules has no Better; its classes are Good, Bad, Raises"),
        (["my_rules:Neither"], "give a subclass of specdec.base.Acceptor"),
        (["my_rules:Repeat"], "give a subclass of specdec.base.Acceptor"),
        (["--drafter", "my_rules:Good"], "give a subclass of specdec.base.Drafter"),
        (["my_rules:Needs"], "missing 1 required positional argument: 'strength'); name a class that defines every abstract method"),
        (["my_rules:Unfinished"], "my_rules:Unfinished cannot be made (Can't instantiate abstract class Unfinished"),
        (["my_rules:Silent"], "set lossless and takes on the class"),
        (["--mutants", "MatchAcceptor"], "--mutants: it has parts of its own"),
    ],
)
def test_errors_take_one_line(call, argv, said):
    status, out, err = call(*argv)
    assert status == 1 and out == "" and err.count("\n") == 1 and err.startswith("specdec certify: ") and said in err, err


@pytest.mark.slow
def test_python_dash_m_finds_a_module_of_the_current_folder(module):
    env_path = str(Path(specdec.__file__).parents[1])
    argv = [sys.executable, "-m", "specdec", "certify", "--drafter", "my_rules:Repeat", "--acceptor", "my_rules:Good", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=module, env={"PYTHONPATH": env_path, "PATH": ""}, check=False)
    assert done.returncode == 0, done.stderr
    assert {row["verdict"] for row in json.loads(done.stdout)} == {"pass"}
