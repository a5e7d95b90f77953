"""The injector itself: what it reads, when it strikes, and that a job without it has none of it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fsdprl.moments import Moment
from tests.faults.trial import PLUGIN, ROOT


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("FSDPRL_FAULT", raising=False)
    monkeypatch.delenv("FSDPRL_FAULT_ONCE", raising=False)
    spec = importlib.util.spec_from_file_location("injector", PLUGIN / "sitecustomize.py")
    assert spec and spec.loader
    module = sys.modules["injector"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_faults_are_read(plugin: ModuleType):
    first, second = plugin.parse(
        "phase=generate,rank=1,step=2,kind=sigkill;phase=save,kind=slow,seconds=0.5"
    )
    assert (first.phase, first.rank, first.step, first.kind) == ("generate", 1, 2, "sigkill")
    assert (second.rank, second.step, second.seconds, second.delay) == (None, None, 0.5, 0.0)
    with pytest.raises(KeyError, match="implode"):
        plugin.parse("phase=generate,kind=implode")


@pytest.mark.parametrize(
    ("name", "rank", "step", "meets"),
    [
        ("engine.generate", 1, 2, True),
        ("engine.generate", 0, 2, False),
        ("engine.generate", 1, 3, False),
        ("engine.pull", 1, 2, False),
    ],
)
def test_a_fault_meets_its_moment_only(
    plugin: ModuleType, name: str, rank: int, step: int, meets: bool
):
    (fault,) = plugin.parse("phase=generate,rank=1,step=2,kind=raise")
    assert fault.meets(Moment(name, rank, step)) == meets
    (whole,) = plugin.parse("phase=engine.generate,kind=raise")
    assert whole.meets(Moment("engine.generate", rank, step))


def test_the_nth_time(plugin: ModuleType):
    (fault,) = plugin.parse("phase=save,nth=1,kind=raise")
    assert [fault.meets(Moment("model.save", 0, 0)) for _ in range(3)] == [False, True, True]


def test_once_over_all_attempts(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FSDPRL_FAULT_ONCE", str(tmp_path))
    moment = Moment("model.save", 0, 0)
    for expected in (True, False):
        (fault,) = plugin.parse("phase=save,kind=raise")
        assert fault.meets(moment) == expected


@pytest.mark.parametrize("fault", ["", "phase=x,kind=raise"])
def test_only_a_job_that_asks_for_it_has_listeners(fault: str):
    path = os.pathsep.join((str(PLUGIN), str(ROOT / "src")))
    source = "from fsdprl import moments; print(len(moments.listeners))"
    env = os.environ | {"PYTHONPATH": path, "FSDPRL_FAULT": fault}
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, timeout=60)
    assert done.stdout.decode().strip() == str(int(bool(fault))), done.stderr.decode()


def test_the_product_knows_no_faults():
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert "FSDPRL_FAULT" not in text and "sitecustomize" not in text, path
        writes = "listeners.append" in text or "listeners +=" in text
        assert not writes, path
