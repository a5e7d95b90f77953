"""Trackers and plots: they get every number, and nothing they do or suffer reaches training."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdprl.plots import Plots, distinct, draw
from fsdprl.sidecar import Sidecar
from fsdprl.tracker import Trackers


def trackers(folder: Path, warnings: list[str], *kinds: str, first_step: int = 0) -> Trackers:
    opened = Trackers(kinds, folder, warnings.append)
    opened.start({"lr": 1.0}, "abc", first_step)
    return opened


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start a sidecar that runs this source."""

    def start(source: str, warnings: list[str]) -> Sidecar:
        (tmp_path / "sidecar_child.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return Sidecar("child", "sidecar_child", tmp_path / "child.log", warnings.append)

    return start


ECHO = """
import os
from fsdprl.sidecar import messages
assert "RANK" not in os.environ
for message in messages():
    assert os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev, "libraries could eat the messages"
    print(message, flush=True)
"""


def test_a_child_gets_every_message_and_is_no_rank(
    tmp_path: Path, child, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "0")
    warnings: list[str] = []
    sidecar = child(ECHO, warnings)
    for number in range(3):
        sidecar.send({"n": number})
    assert sidecar.close(20.0)
    assert (tmp_path / "child.log").read_text() == "{'n': 0}\n{'n': 1}\n{'n': 2}\n"
    assert warnings == []


def test_a_killed_child_is_told_once_and_costs_nothing(child):
    warnings: list[str] = []
    sidecar = child(ECHO, warnings)
    pid = sidecar._process.pid
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: sidecar.send({"n": 1}) or sidecar.failed)
    for number in range(5):
        sidecar.send({"n": number})
    assert not sidecar.close(5.0)
    assert len(warnings) == 1
    assert "child stopped: ended with code -9. Training goes on." in warnings[0]
    assert gone(pid)


def test_a_hung_child_is_killed_with_its_children(tmp_path: Path, child):
    warnings: list[str] = []
    pids = tmp_path / "pids"
    sidecar = child(
        f"""
import os, subprocess, time
sleeper = subprocess.Popen(["sleep", "600"])
open({str(pids)!r} + ".part", "w").write(f"{{os.getpid()}} {{sleeper.pid}}")
os.rename({str(pids)!r} + ".part", {str(pids)!r})
time.sleep(600)
""",
        warnings,
    )
    assert wait_until(pids.exists)
    for _ in range(2000):  # more than the pipe and the queue hold: nothing blocks
        sidecar.send({"text": "x" * 1000})
    sidecar.close(0.5)
    assert len(warnings) == 1
    assert all(wait_until(lambda pid=pid: gone(int(pid))) for pid in pids.read_text().split())


def test_a_child_that_fails_gives_its_reason(child):
    warnings: list[str] = []
    sidecar = child("import sys; sys.exit('no such project')", warnings)
    assert not sidecar.close(20.0)
    assert len(warnings) == 1
    assert "child stopped: no such project" in warnings[0]


def test_a_child_ends_with_its_parent(tmp_path: Path):
    code = f"""
import os, time
from pathlib import Path
from fsdprl.tracker import Trackers
folder = Path({str(tmp_path)!r})
trackers = Trackers(("tensorboard",), folder, print)
trackers.start({{}}, "a", 0)
print(trackers._sidecars[0]._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.returncode == -signal.SIGKILL
    assert wait_until(lambda: gone(int(done.stdout)))


def test_tensorboard_has_the_numbers(tmp_path: Path):
    pytest.importorskip("tensorboard")
    warnings: list[str] = []
    first = trackers(tmp_path, warnings, "tensorboard")
    for step in range(4):
        first.log(step, {"actor/loss": step / 2, "nan": None})
    first.close()
    again = trackers(tmp_path, warnings, "tensorboard", first_step=2)
    again.log(2, {"actor/loss": 7.0})
    again.close()
    assert warnings == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["actor/loss"]
    assert [(event.step, event.value) for event in events.Scalars("actor/loss")] == [
        (0, 0.0), (1, 0.5), (2, 7.0),
    ]  # fmt: skip


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wandb.py").write_text("raise ImportError('no wandb here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    warnings: list[str] = []
    tracker = trackers(tmp_path, warnings, "wandb")
    tracker.log(0, {"a": 1.0})
    tracker.close()
    assert len(warnings) == 1
    assert (
        "tracker wandb stopped: wandb is not installed: pip install 'fsdprl[wandb]'" in warnings[0]
    )
    assert "metrics.jsonl" in warnings[0]


WANDB = """
import json
from types import SimpleNamespace

class Api:
    def __init__(self): raise RuntimeError("No API key configured")

def init(**given):
    out = open({path!r}, "a")
    def log(metrics, step): out.write(json.dumps([step, metrics]) + "\\n")
    out.write(json.dumps(given) + "\\n")
    return SimpleNamespace(log=log, finish=out.close)
"""


def test_wandb_is_offline_without_a_key_and_keeps_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Against a stand-in with wandb's signatures: the package is an extra."""
    got = tmp_path / "got"
    (tmp_path / "wandb.py").write_text(WANDB.format(path=str(got)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:  # a server answers, and there is no key
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        wandb_offline(tmp_path, got)


def test_wandb_is_offline_without_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    got = tmp_path / "got"
    online = WANDB.replace('raise RuntimeError("No API key configured")', 'self.api_key = "k"')
    (tmp_path / "wandb.py").write_text(online.format(path=str(got)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    wandb_offline(tmp_path, got)


def wandb_offline(tmp_path: Path, got: Path) -> None:
    warnings: list[str] = []
    tracker = trackers(tmp_path, warnings, "wandb")
    tracker.log(3, {"a": 1.0, "nan": None})
    tracker.close()
    assert warnings == []
    start, logged = map(json.loads, got.read_text().splitlines())
    assert (start["mode"], start["id"], start["resume"]) == ("offline", "abc", "allow")
    assert start["config"] == {"lr": 1.0}
    assert logged == [3, {"a": 1.0}]


def test_plots_are_drawn_beside_the_metrics(tmp_path: Path):
    pytest.importorskip("matplotlib")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(5):
            row = {
                "step": step,
                "critic/score/mean": step / 5,
                "timing/all": 1.0,
                "actor/loss": None,
            }
            file.write(json.dumps(row) + "\n")
    warnings: list[str] = []
    plots = Plots(tmp_path, warnings.append)
    for _ in range(3):
        plots.draw()
    assert plots.close() == tmp_path / "plots" / "reward.png"
    assert warnings == []
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "reward.png",
        "timing.png",
    ]
    assert (tmp_path / "plots" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_number_with_two_names_is_drawn_once():
    curves = {
        "reward": ([0, 1], [2.0, 3.0]),
        "reward/mean": ([0, 1], [2.0, 3.0]),
        "eval/reward": ([0], [2.0]),
    }
    assert distinct(curves) == {name: curves[name] for name in ("reward", "eval/reward")}


def test_of_what_only_has_losses_the_loss_is_looked_at(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [{"step": step, "actor/loss": 2.0 - step, "val/loss": 3.0 - step} for step in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert draw(tmp_path) == [tmp_path / "plots" / "loss.png"]


def test_plots_that_are_not_wanted_start_nothing(tmp_path: Path):
    """--run.plots False"""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1}\n{"step": 1, "reward": 2}\n')
    plots = Plots(tmp_path, print, wanted=False)
    plots.draw()
    assert plots.close() is None
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_too_few_points_draw_nothing(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0}\n')
    plots = Plots(tmp_path, print)
    plots.draw()
    assert plots.close() is None


def test_closing_what_was_never_used(tmp_path: Path):
    plots = Plots(tmp_path, print)
    plots.kill()
    assert plots.close() is None
    Trackers(("wandb",), tmp_path, print).close()
    assert list(tmp_path.iterdir()) == []
