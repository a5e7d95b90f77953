"""What no module may do, read from its syntax tree: run code that came as data, or ask a shell."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path
    for folder in ("src", "recipes", "scripts")
    for path in (ROOT / folder).rglob("*")
    if path.suffix == ".py" or (path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python"))
)  # fmt: skip
SANDBOX = "src/fsdprl/sandbox_cell.py"
"""Runs programs that models wrote, in a cell of their own."""
ONE_PLACE = "src/fsdprl/checkpoint_files.py"
"""The only file that says whether a checkpoint's own code may run: no."""

BUILTINS = ("eval", "exec", "compile", "__import__")
FORBIDDEN = re.compile(
    r"(cloud)?pickle\b|dill\b|marshal\b|shelve\b|joblib\b|torch\.(load|save)$|.*\.(send|recv)_pyobj$"
    r"|(.*\.)?(broadcast|all_gather|gather|scatter)_object(_list)?$"
    r"|os\.(system|popen|spawn\w*)$|subprocess\.(getoutput|getstatusoutput)$|yaml\.(unsafe_)?load$"
)


def offences(source: str, name: str = "x.py") -> Iterator[str]:
    """Every line that a reviewer would have to stop at."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        for said in _names(node):
            if FORBIDDEN.match(said):
                yield f"{name}:{line}: {said}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BUILTINS and name != SANDBOX:
                yield f"{name}:{line}: {called}()"
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            for option in ("shell", "allow_pickle", "trust_remote_code"):
                if option in given:
                    yield f"{name}:{line}: {option}={given[option]}"
            loads = not name.startswith("scripts/") and called.rpartition(".")[2] in (
                "from_pretrained",
                "from_config",
            )
            if loads and called.lower().startswith("auto") and given.get(None) != "NO_CODE":
                yield f"{name}:{line}: {called} without **NO_CODE"
        if isinstance(node, ast.Dict) and name != ONE_PLACE:
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if "trust_remote_code" in keys:
                yield f"{name}:{line}: trust_remote_code"


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute | ast.Name):
        return [ast.unparse(node)]
    if isinstance(node, ast.Import | ast.ImportFrom):
        source = getattr(node, "module", None)
        return [".".join(filter(None, (source, alias.name))) for alias in node.names]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_came_as_data(path: Path):
    name = str(path.relative_to(ROOT))
    assert [*offences(path.read_text(), name)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "exec(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path)",
        "options = {'trust_remote_code': True}",
        "dist.broadcast_object_list(values)",
        "socket.send_pyobj(value)",
        "yaml.load(text)",
    ],
)
def test_the_reviewer_sees(line: str):
    assert [*offences(line)] != []


def test_remote_code_is_off_in_its_one_place():
    from fsdprl.checkpoint_files import NO_CODE

    assert NO_CODE == {"trust_remote_code": False}
