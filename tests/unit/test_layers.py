"""The house rules that a reader of the files could check: who imports whom, how long a file is, which words are used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import specdec
from specdec.tree import depths

PACKAGE = Path(specdec.__file__).parent
REPOSITORY = Path(__file__).parents[2]
FILES = sorted(PACKAGE.rglob("*.py"))
HOUSES = [REPOSITORY / "tests", PACKAGE]

# From the ground up. A module imports from lower floors and from its own package; never from a neighbour on its floor.
FLOORS = [
    {"types"},
    {"tree"},
    {"ragged", "rng", "stats"},
    {"warp", "stops"},
    {"cache", "ops", "heads"},
    {"checkpoints"},
    {"base"},
    {"session"},
    {"drafters", "acceptors", "planning"},
    {"verifiers"},
    {"models"},
    {"options"},
    {"loop"},
    {"generation"},
    {"custom"},
    {"bench", "training", "testing"},
    {"cli"},
    {"__main__", "__init__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
USERS_OF_MODELS = ("models/", "bench/", "testing/", "cli/", "__init__.py")
TRANSFORMERS_INSIDE = ("models/hf.py", "models/mtp.py")


def inside(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


@cache
def syntax(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(tree: ast.AST, types_too: bool = True) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements at any depth; without those that only a type checker sees, if so asked."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not types_too and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (found for part in node.orelse for found in imports(ast.Module([part], []), types_too))
        else:
            yield from imports(node, types_too)


def own_imports(file: Path) -> set[str]:
    """Top-level names of `specdec` that this file imports, however it writes that."""
    package = ["specdec", *file.relative_to(PACKAGE).parts[:-1]]
    found: set[str] = set()
    for node in imports(syntax(file)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            start = package[: len(package) - node.level + 1] if node.level else []
            module = [*start, *(node.module.split(".") if node.module else [])]
            targets = [".".join([*module, alias.name]) for alias in node.names]
        found |= {target.split(".")[1] for target in targets if target.startswith("specdec.")}
    return found


def home(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("file", FILES, ids=inside)
def test_imports_go_downwards(file: Path) -> None:
    me = home(file)
    assert me in FLOOR, f"{inside(file)}: give {me!r} a place in FLOORS"
    for other in own_imports(file) - {me}:
        if other in FLOOR:
            assert FLOOR[other] < FLOOR[me], f"{inside(file)} may not import {other}: it is no lower than {me}"


@pytest.mark.parametrize("file", FILES, ids=inside)
def test_models_are_imported_where_users_enter_alone(file: Path) -> None:
    if "models" in own_imports(file):
        assert inside(file).startswith(USERS_OF_MODELS)


@pytest.mark.parametrize("file", FILES, ids=inside)
def test_two_files_know_the_inside_of_transformers(file: Path) -> None:
    for node in imports(syntax(file), types_too=False):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        deep = [name for name in names if name.startswith("transformers.")]
        assert not deep or inside(file) in TRANSFORMERS_INSIDE, f"{inside(file)}: {deep}; only names of transformers' top level are public"


def test_the_rules_see_every_way_of_importing(tmp_path, monkeypatch) -> None:
    (tmp_path / "drafters").mkdir()
    file = tmp_path / "drafters" / "bad.py"
    file.write_text(
        "import specdec.loop\nimport torch\nfrom specdec import testing\nfrom .. import acceptors\n"
        "from ..planning.planner import FixedPlanner\nfrom .null import NullDrafter\n"
        "def later():\n    from ..models import load\nif TYPE_CHECKING:\n    from ..warp import Warper\n"
    )
    monkeypatch.setattr("test_layers.PACKAGE", tmp_path)
    assert own_imports(file) == {"loop", "testing", "acceptors", "planning", "drafters", "models", "warp"}
    assert len(list(imports(syntax(file)))) == 8 and len(list(imports(syntax(file), types_too=False))) == 7


@pytest.mark.parametrize("house", HOUSES, ids=lambda path: path.name)
def test_files_stay_short(house: Path) -> None:
    lengths = {str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in house.rglob("*.py")}
    assert not {name: lines for name, lines in lengths.items() if lines > 400}


def test_test_files_have_names_of_their_own() -> None:
    names = [file.name for file in (REPOSITORY / "tests").rglob("*.py")]
    assert sorted(names) == sorted(set(names))


# ----------------------------------------------------------------------------------------------------------- names and docs


def declared(tree: ast.Module) -> list[str]:
    """`__all__` of a module, empty if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "__main__.py"], ids=inside)
def test_what_is_public_is_documented(file: Path) -> None:
    tree = syntax(file)
    names = declared(tree)
    assert not tree.body or ast.get_docstring(tree), f"{inside(file)} does not say what it is for"
    assert len(names) == len(set(names))
    here = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bare = [name for name in names if name in here and not ast.get_docstring(here[name])]
    assert not bare, f"{inside(file)}: no docstring on {bare}"
    bound = here.keys() | {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    imported = {alias.asname or alias.name for node in imports(tree) for alias in node.names}
    assert set(names) <= bound | imported, f"{inside(file)}: __all__ names what is not there"


def forbidden() -> set[str]:
    """The last column of the table in docs/vocabulary.md."""
    rows = [
        line.split("|")[1:-1]
        for line in (REPOSITORY / "docs" / "vocabulary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    return {word for row in rows[2:] for word in re.findall(r"`(\w+)`", row[-1])}


@pytest.mark.parametrize("file", [file for file in FILES if inside(file) not in TRANSFORMERS_INSIDE], ids=inside)
def test_one_word_for_one_thing(file: Path) -> None:
    words = forbidden()
    assert {"assistant", "proposer", "speculator", "judge", "crop", "gamma"} <= words
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME:
            parts = set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", token.string).lower().split("_"))
            assert not parts & words, f"{inside(file)}, line {token.start[0]}: {token.string}; docs/vocabulary.md has another word for it"


def test_annotations_are_executed_in_tests() -> None:
    with pytest.raises(Exception, match="(?i)type.*check"):
        depths(torch.zeros(3))  # a vector of float32 where a matrix of int64 is declared
