"""A run without processes: `launch`, a model and a recipe in miniature."""

import errno
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdprl import run as run_module
from fsdprl.comparing import repeatable
from fsdprl.config import Flags
from fsdprl.console import Console
from fsdprl.controller import Controller, set_current
from fsdprl.options import RunOptions
from fsdprl.plan import Plan
from fsdprl.records import read_lines
from fsdprl.run import Run
from fsdprl.world import World

CONFIG = {"model": "m", "lr": 0.5, "steps": 6, "sharding": {"replicate": 1}}


class Model:
    """Saves and loads like Policy: files in a folder."""

    def __init__(self) -> None:
        self.value = 0.0
        self.full = 0
        """Saves that still fail for want of disk."""
        self.tokenizer: Any = None

    def save(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text(repr(self.value))
        if self.tokenizer:
            self.tokenizer.save_pretrained(folder)
        if self.full:
            self.full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        (folder / "trainer").mkdir()
        (folder / "trainer" / "adam.safetensors").write_text(repr(self.value * 2))

    def load(self, folder: Path) -> None:
        self.value = float((folder / "model.safetensors").read_text())
        assert float((folder / "trainer" / "adam.safetensors").read_text()) == self.value * 2


class Count:
    """Small state, as of a KL controller."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.n = state["n"]


class Job:
    """One process's worth of a run, made without processes: `launch` and a recipe in miniature."""

    def __init__(
        self, out: Path, *, config: dict[str, Any] | None = None, dry: bool = False, **options: Any
    ) -> None:
        recipe = out.parent / "grpo.py"
        if not recipe.exists():
            recipe.write_text("print('recipe')\n")
        self.controller = Controller(
            World(size=2, local_size=2),
            flags=Flags(dry_run=dry),
            config=dict(CONFIG if config is None else config),
            recipe=recipe,
        )
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.controller.call = self._call  # pyright: ignore[reportAttributeAccessIssue]
        set_current(self.controller)
        self.options = RunOptions(out=str(out), **({"save_every": 2} | options))
        self.said = io.StringIO()
        run_module.Console = lambda every: Console(every, stream=self.said)  # pyright: ignore
        self.run: Any = None
        self.model, self.count = Model(), Count()

    def _call(self, verb: str, payload: dict[str, Any], **_: Any) -> Any:
        self.calls.append((verb, payload))
        return type("Handle", (), {"wait": lambda self: [None]})()

    def open(self) -> "Job":
        self.run = Run(self.options)
        return self

    def train(
        self, steps: int = 6, *, during: Callable[[int], None] = lambda step: None, end: bool = True
    ) -> "Job":
        """The loop of a recipe. `during` may raise: then this job is left as a killed process is."""
        run = self.run or self.open().run
        run.track(policy=self.model, count=self.count)
        plan = Plan(rows=100, prompts_per_step=4, group_size=2, minibatches=2, steps=steps)
        for step in run.steps(plan):
            self.model.value += 1.0
            self.count.n += 10
            run.log({"critic/score/mean": self.model.value})
            self.complete(step)
            during(step)
            run.log({"critic/score/mean": self.model.value + 1.0})
        if end:
            self.end()
        return self

    def complete(self, step: int) -> None:
        """What each rank's write_completions does."""
        for rank in range(2):
            path = self.run.folder.completions / f"rank-{rank:05d}.jsonl"
            with path.open("a") as file:
                file.write(json.dumps({"step": step, "response": f"{step}"}) + "\n")

    def end(self, kind: str = "finished", message: str = "", **cause: Any) -> None:
        for hook in self.controller.on_exit:
            hook({"kind": kind, "message": message} | cause)
        self.abandon()

    def abandon(self) -> None:
        """Drop what a dead process drops: its lock and its children."""
        if self.run is not None and not self.controller.flags.dry_run:
            self.run.folder._lock.close()


class Killed(BaseException):
    pass


def kill_at(step: int) -> Callable[[int], None]:
    def during(now: int) -> None:
        if now == step:
            raise Killed

    return during


def killed_at(out: Path, step: int, **options: Any) -> Job:
    job = Job(out, **options)
    with pytest.raises(Killed):
        job.train(during=kill_at(step))
    job.abandon()
    return job


@contextmanager
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test of runs is wrapped in: no plots, and no controller left behind."""
    monkeypatch.setattr(run_module, "Console", Console)
    monkeypatch.setattr(run_module, "Plots", Undrawn)
    yield
    set_current(None)


class Undrawn:
    """Plots have their own test; here they would only take time."""

    def __init__(self, folder: Path, warn: Callable[[str], None], *, wanted: bool) -> None:
        self.folder = folder

    def draw(self) -> None:
        (self.folder / "plots").mkdir(exist_ok=True)

    def close(self) -> Path:
        return self.folder / "plots" / "reward.png"

    def kill(self) -> None:
        pass


def without_times(path: Path) -> list[dict[str, Any]]:
    return [repeatable(row) for row in read_lines(path / "metrics.jsonl")]


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_lines(path)]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())
