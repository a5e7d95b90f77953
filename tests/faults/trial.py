"""A run of a recipe that something befalls, what is left of it, and the run that continues it."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fsdprl.comparing import run_differences
from fsdprl.records import read_json, read_lines
from fsdprl.run_checkpoints import folder_name
from tests.faults.crowd import factor, watch
from tests.ranks.jobs import End, Job
from tests.recipes.processes import ROOT, task, words
from tests.warm import WarmJob

PLUGIN = Path(__file__).parent / "plugin"
STEPS = 3
FLAGS: dict[str, Any] = {
    "steps": STEPS, "eval-every": 0, "run.save-every": 1, "prompts-per-step": 4, "group-size": 4,
    "minibatches": 2, "max-new-tokens": 4, "run.deterministic": True,
}  # fmt: skip
"""Of all trials, unless they say otherwise: three steps of four groups, each saved."""

HANDED_ON = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""As torchrun --signals-to-handle: by itself it leaves SIGUSR1 out, and dies of it."""


@dataclass
class Ended:
    """How a job ended, and what it left."""

    code: int
    seconds: float
    """From the strike, or from the start where nothing struck, to the end."""
    crowd: float
    """How much longer that took for what else the machine did."""
    out: str
    err: str
    status: dict[str, Any]
    folder: Path

    @property
    def said(self) -> str:
        return f"{self.out}\n{self.err}"


@cache
def shop() -> Path:
    """A folder for models, data and undisturbed runs, which outlives this session but not the code."""
    digest = hashlib.sha256(str(torch.__version__).encode())
    folders = ("src", "recipes", "tests/recipes")
    for path in (Path(__file__), *(p for f in folders for p in sorted((ROOT / f).rglob("*.py")))):
        digest.update(path.read_bytes())
    user = f"fsdprl-faults-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / user / digest.hexdigest()[:16]
    for older in folder.parent.glob("*"):
        if older != folder and time.time() - older.stat().st_mtime > 86_400:
            shutil.rmtree(older, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def alone(name: str) -> Iterator[None]:
    """One process at a time, of all that run these tests."""
    with (shop() / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def files() -> dict[str, str]:
    """The task's models and data, made once."""
    folder = shop() / "task"
    with alone("task"):
        known = read_json(folder / "files.json")
        if known is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            known = task(folder)
            (folder / "files.json").write_text(json.dumps(known))
    return known


def begin(
    out: Path,
    ranks: int,
    *,
    recipe: str = "grpo",
    fault: str = "",
    environment: dict[str, str] | None = None,
    **flags: Any,
) -> tuple[Job, float]:
    """Start the recipe on `ranks` processes (1: plain python), with a fault, and the time it began."""
    chosen = (FLAGS if recipe == "grpo" else {"steps": STEPS}) | flags
    typed = words(recipe, files(), out, **chosen)
    struck = out.parent / f"{out.name}-struck"
    struck.mkdir(exist_ok=True)
    path = os.pathsep.join(map(str, (PLUGIN, ROOT / "src", ROOT)))
    given = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "FSDPRL_FAULT": fault}
    given |= {"FSDPRL_FAULT_ONCE": str(struck), "PET_SIGNALS_TO_HANDLE": HANDED_ON}
    given |= environment or {}
    watch()
    return Job(typed, ranks=ranks if ranks > 1 else 0, **given), time.time()


def end(job: Job, began: float, out: Path, timeout_s: float = 150.0) -> Ended:
    """Wait for the end. Nothing of the job may be there 15 s later: no process, so no port, and no shared memory."""
    ended = job.end(timeout_s)
    now = time.time()
    strikes = [path.stat().st_mtime for path in (out.parent / f"{out.name}-struck").glob("*")]
    status = read_json(out / "status.json") or {}
    crowd = factor(began, max(1, job.ranks))
    return Ended(ended.code, now - max([began, *strikes]), crowd, ended.out, ended.err, status, out)


def run(out: Path, ranks: int, **given: Any) -> Ended:
    """Start and wait."""
    job, began = begin(out, ranks, **given)
    return end(job, began, out)


def calm(out: Path, ranks: int, *, recipe: str = "grpo", **flags: Any) -> End:
    """Start where nothing is to strike, and wait. Forked with all imports done, but for vLLM: see recipes.processes."""
    if flags.get("engine.kind") == "vllm":
        ended = run(out, ranks, recipe=recipe, **flags)
        return End(ended.code, ended.out, ended.err)
    chosen = (FLAGS if recipe == "grpo" else {"steps": STEPS}) | flags
    return WarmJob(words(recipe, files(), out, **chosen), ranks=ranks if ranks > 1 else 0).end(150)


def undisturbed(ranks: int, **flags: Any) -> Path:
    """The run folder of the same command when nothing goes wrong: computed once."""
    given = hashlib.sha256(repr(sorted(flags.items())).encode()).hexdigest()[:8]
    out = shop() / f"whole-{ranks}{'-' + given if flags else ''}"
    with alone(out.name):
        if (read_json(out / "status.json") or {}).get("state") != "finished":
            shutil.rmtree(out, ignore_errors=True)
            ended = calm(out, ranks, **flags)
            assert ended.code == 0, ended.err
    return out


def check_identical(ours: Path, theirs: Path) -> None:
    """Metrics, answers and every byte of the last checkpoint: as if nothing had been."""
    assert run_differences(ours, theirs) == []
    assert folder_name(STEPS) == (ours / "checkpoints" / "latest").resolve().name
    for path in sorted((theirs / "completions").glob("rank-*.jsonl")):
        assert read_lines(ours / "completions" / path.name) == read_lines(path), path.name
