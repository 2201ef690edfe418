"""The README and the docs hold what they promise: code runs, commands are the ones that CI runs, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.real
def test_the_example_runs(smollm2, capsys) -> None:
    names: dict = {}
    exec(compile(blocks("python")[0], "README.md", "exec"), names)
    text, figure = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert "quick brown fox" in text
    assert float(figure.split()[0]) > 1.5
    exec(compile(blocks("python")[1], "README.md", "exec"), names)
    read, whole = map(int, re.findall(r"\d+", capsys.readouterr().out))
    assert 0 < read < whole / 2
    exec(compile(blocks("python")[2], "README.md", "exec"), names)
    assert float(capsys.readouterr().out.split()[0]) > 1.5


def test_a_drafter_of_the_readers_own_passes_its_checks(tmp_path) -> None:
    code = blocks("python")[3]
    body = re.search(r"^class .*?(?=^\S*@)", code, re.M | re.S)
    assert body and len([line for line in code.splitlines() if line]) <= 10
    (tmp_path / "test_mine.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([str(Path(specdec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9]\d* passed", done.stdout) and "skipped" not in done.stdout


def test_a_rule_and_a_drafter_of_the_readers_own_are_certified(tmp_path) -> None:
    """What docs/extend.md shows, through the commands that it names."""
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "mine.py").write_text(code)
    path = os.pathsep.join([str(Path(specdec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    for words in re.findall(r"`specdec (certify [^`]*)`", page):
        command = [sys.executable, "-m", "specdec", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == 0 and done.stdout.count("pass") > 10, done.stdout + done.stderr


def test_two_commands_set_up_everything_and_ci_runs_them() -> None:
    lines = [block.strip() for block in blocks("bash")][:2]
    assert not any("\n" in line for line in lines)
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^commands\(\).*$", script, re.M)
    assert function
    found = subprocess.run(["bash", "-c", f"{function[0]}; commands"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == lines
    for variable in ("$demo", "$tests"):
        assert f'bash -euo pipefail -c "{variable}"' in script
    assert "pip install torch" not in script


def anchors(page: Path) -> set[str]:
    """The ids that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {link}"


def test_every_public_name_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [name for name in specdec.__all__ if not re.search(rf"`(specdec\.)?{name}\b", text)]
    assert not missing, f"docs/index.md: {missing}"
