"""Recipes of one rank as processes that are forked with everything imported: a second each instead of eight.

A process starts as `python recipes/NAME.py FLAGS` would, and can be sent signals, killed and waited for like one.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from functools import cache
from typing import Any

from tests.ranks.jobs import End
from tests.recipes.processes import PATHS

PRELOADED = [
    "torch",
    "transformers",
    "fsdprl.serve",
    "fsdprl.policy",
    "fsdprl.sampler",
    "tests.recipes.warm",
]


@cache
def context() -> Any:
    """Where processes are forked from: a server that has imported, and done nothing else."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def become(typed: list[str], out: int, err: int) -> None:
    """In the new process: be the recipe."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ["PYTHONPATH"] = PATHS
    sys.argv = typed
    try:
        runpy.run_path(typed[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class WarmJob:
    """A running recipe; as tests.ranks.jobs.Job, without its search for leftovers."""

    def __init__(self, typed: list[str]) -> None:
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self.process = Process(self.files, typed)

    def end(self, timeout_s: float = 90.0) -> End:
        """Wait for the end."""
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.process.kill()
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read())
        return End(code, *texts)


class Process:
    """What tests ask of subprocess.Popen."""

    def __init__(self, files: list[Any], typed: list[str]) -> None:
        # Inherited by name: a fork server hands on no descriptors but by pickling them.
        names = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]
        self._process = context().Process(target=start, args=(typed, *names), daemon=False)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"still running after {timeout_s} s"
        return code


def start(typed: list[str], out: str, err: str) -> None:
    """The target of the process."""
    opened = [os.open(name, os.O_WRONLY | os.O_APPEND) for name in (out, err)]
    become(typed, *opened)
