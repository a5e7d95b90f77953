"""The house keeps its floors: imports point down, vendors and pickle stay out, files stay small.

A new file under src/fsdprl gets its place in the table of ARCHITECTURE.md.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fsdprl"
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
MODULES = sorted(SOURCE.rglob("*.py"))


def floors_of_the_table() -> dict[str, set[str]]:
    """Floor -> modules, from the table in ARCHITECTURE.md: what people read is what is tested."""
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ") and "`" in line]
    return {row[0].split()[0]: set(re.findall(r"`(\w+)/?`", row[2])) for row in rows}


FLOORS = floors_of_the_table()

MAY_IMPORT = {
    "0": {"0"},
    "1": {"0", "1"},
    "2": {"0", "1", "2"},
    "3": {"0", "1", "2", "3", "data", "rewards"},
    "4": {"0", "1", "4", "data", "rewards"},  # floors 2 and 3 are reached by the name of a verb
    "data": {"0", "1", "data"},
    "rewards": {"0", "1", "rewards"},
    "tasks": {"0", "1", "tasks"},
    "recipes": {"0", "4", "data", "rewards", "tasks"},
}

LAZY = {("joining", "serve"), ("joining", "worker")}
"""Inside a function: rank 0's process starts serving, as every rank's does."""

FIRST = (
    "fsdprl",
    "fsdprl.options",
    "fsdprl.sample",
    "fsdprl.config",
    "fsdprl.world",
    "fsdprl.errors",
)
"""What a recipe has imported when it parses its command line: help and mistakes answer at once."""

Import = tuple[str, int, bool]
"""Imported module, line, and whether the import runs when the file is imported."""


def name_of(path: Path) -> str:
    """src/fsdprl/engines/vllm.py -> engines.vllm"""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str | None:
    """Floor of a dotted name below fsdprl; a package has the floor of its folder."""
    top = module.split(".")[0]
    return next((floor for floor, members in FLOORS.items() if top in members), None)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it runs on import (not in a function, not for type checkers)."""
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, runs = pending.pop()
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            if isinstance(child, ast.stmt):
                yield child, runs
            pending.append((child, runs and not lazy))


def imports_of(path: Path) -> list[Import]:
    """Imports of fsdprl's own modules, as names below fsdprl."""
    found: list[Import] = []
    for node, runs in statements(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            full = [f"{absolute(path, node)}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        else:
            continue
        for name in full:
            if name.startswith("fsdprl."):
                found.append((own_module(name), node.lineno, runs))
    return found


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """The dotted name after `from`, relative ones resolved against the importing file."""
    if not node.level:
        return node.module or ""
    folder = path.parents[node.level - 1].relative_to(SOURCE.parent)
    return ".".join([*folder.parts, *([node.module] if node.module else [])])


def own_module(full: str) -> str:
    """fsdprl.errors.UserError -> errors; the longest prefix that is a file of ours."""
    parts = full.split(".")[1:]
    while len(parts) > 1 and not (
        SOURCE.joinpath(*parts).with_suffix(".py").exists() or SOURCE.joinpath(*parts).is_dir()
    ):
        parts.pop()
    return ".".join(parts)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_module_has_one_floor():
    for path in MODULES:
        name = name_of(path)
        if not name:
            continue
        top = name.split(".")[0]
        homes = [floor for floor, members in FLOORS.items() if top in members]
        assert len(homes) == 1, (
            f"{path.relative_to(ROOT)}: on floors {homes}; name it once in ARCHITECTURE.md's table"
        )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path) or "__init__")
def test_imports_point_down(path):
    name = name_of(path)
    if not name:  # the public names, resolved lazily from everywhere
        return
    floor = floor_of(name)
    assert floor, f"{name} is on no floor: name it once in ARCHITECTURE.md's table"
    for target, line, runs in imports_of(path):
        if (name, target) in LAZY and not runs:
            continue
        assert floor_of(target) in MAY_IMPORT[floor], (
            f"{where(path, line)}: floor {floor} imports {target} of floor {floor_of(target)}"
        )


def test_no_cycles_among_imports():
    graph = {
        name_of(path): {target for target, _, runs in imports_of(path) if runs} for path in MODULES
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " imports ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


LONGER = {"ppo": 170}
"""Lines of recipes that may have more than 152: of two networks."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_import_only_what_a_reader_should_meet(path):
    public = {target: floor_of(target) for target, _, _ in imports_of(path)}
    # `from fsdprl import Policy` names no module of ours: it is the public interface.
    modules = {t: f for t, f in public.items() if (SOURCE / t.replace(".", "/")).exists() or f}
    for target, floor in modules.items():
        assert floor in MAY_IMPORT["recipes"], f"{path.name} imports {target} of floor {floor}"
    assert len(path.read_text().splitlines()) <= LONGER.get(path.stem, 152)


def test_options_are_parsed_before_torch_is_imported():
    code = f"import sys, {', '.join(FIRST)}; print(*({{'torch', 'transformers'}} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout.split()) == (0, []), shown.stderr


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_help_of_a_recipe_imports_no_torch(path):
    command = [sys.executable, "-X", "importtime", str(path), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "fsdprl" in imported
    assert not {"torch", "transformers"} & imported


VENDORS = re.compile(r"torch\.(cuda|npu)\b")
PICKLES = re.compile(
    r"(cloud)?pickle\b|marshal\b|shelve\b|torch\.(load|save)$|.*\.(send|recv)_pyobj$"
    r"|(.*\.)?(broadcast|all_gather|gather|scatter)_object(_list)?$"
)


@pytest.mark.parametrize("path", [*MODULES, *RECIPES], ids=lambda path: path.stem)
def test_no_vendor_no_pickle_no_remote_code(path):
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.Attribute | ast.Name):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            source = getattr(node, "module", None)
            names = [".".join(filter(None, (source, alias.name))) for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), (
                f"{where(path, node.lineno)}: {node.func.id}"
            )
        for name in names:
            line = getattr(node, "lineno", 0)
            assert path.name == "device.py" or not VENDORS.match(name), (
                f"{where(path, line)}: {name}"
            )
            assert not PICKLES.match(name), f"{where(path, line)}: {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path) or "__init__")
def test_small_files_and_functions(path):
    assert len(path.read_text().splitlines()) <= 420
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{where(path, node.lineno)}: {node.name} has {length} lines"


def test_what_other_files_import_has_a_docstring():
    shared = {
        f"{own_module(f'{absolute(path, node)}.{alias.name}')}.{alias.name}"
        for path in [*MODULES, *RECIPES]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and absolute(path, node).startswith("fsdprl")
        for alias in node.names
    }
    silent = [
        f"{where(path, node.lineno)} {node.name}"
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and f"{name_of(path)}.{node.name}" in shared
        and not ast.get_docstring(node)
    ]
    assert not silent, silent


def test_the_table_names_nothing_that_is_gone():
    there = {path.stem for path in SOURCE.iterdir()}
    assert {name for members in FLOORS.values() for name in members} <= there
