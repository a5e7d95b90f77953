"""import fsdprl: quick, lazy, and the same names for people, for type checkers and at run time."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fsdprl


def test_type_checkers_see_the_names_that_exist_at_run_time():
    tree = ast.parse(Path(fsdprl.__path__[0], "__init__.py").read_text())
    seen: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdprl"):
            for alias in node.names:
                assert alias.asname == alias.name, "only `x as x` is a public name"
                seen[alias.name] = f"{node.module}.{alias.name}".removeprefix("fsdprl.")
    modules = {name: name for name in fsdprl.MODULES}
    assert seen == modules | {name: f"{module}.{name}" for name, module in fsdprl.NAMES.items()}
    assert dir(fsdprl) == sorted(seen)


@pytest.mark.parametrize("name", [*fsdprl.NAMES, *fsdprl.MODULES])
def test_every_name_resolves(name: str):
    value = getattr(fsdprl, name)
    module = importlib.import_module(f"fsdprl.{fsdprl.NAMES.get(name, name)}")
    assert value is (getattr(module, name) if name in fsdprl.NAMES else module)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="fsdprl has no name 'Trainer'"):
        fsdprl.Trainer  # noqa: B018  # pyright: ignore


def test_importing_it_loads_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import fsdprl; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["fsdprl"]
