"""Scripts as processes that are forked with everything imported: a second each instead of eight.

Each starts as `python SCRIPT FLAGS` would, or as torchrun would start several ranks of it, and can be sent signals,
killed and waited for. What is about torchrun itself, or about how a process starts, is tested with tests.ranks.jobs.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.jobs import End

TESTS = Path(__file__).resolve().parent
PATHS = (str(TESTS.parent / "src"), str(TESTS.parent), str(TESTS), str(TESTS / "ranks"))
PRELOADED = [
    "torch",
    "transformers",
    "fsdprl.serve",
    "fsdprl.policy",
    "fsdprl.sampler",
    "torchdata.stateful_dataloader",
    "transformers.models.auto.tokenization_auto",
    "tests.warm",
]
GRACE_S = 15.0
"""Time that ranks have to follow one that failed."""


@cache
def context() -> Any:
    """Where processes are forked from: a server that has imported, and done nothing else. One a process."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # before 3.12 the server forgets our sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(PATHS))
        forkserver.ensure_running()
    return made


class WarmJob:
    """A running script; as tests.ranks.jobs.Job, without its search for leftovers."""

    def __init__(self, typed: Sequence[str], *, ranks: int = 0) -> None:
        """typed: the script and its arguments. ranks: 0 for a plain process, else as under torchrun."""
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self.processes = [Process(self.files, list(typed), given) for given in environments(ranks)]

    @property
    def process(self) -> "Process":
        """The controller's."""
        return self.processes[0]

    def end(self, timeout_s: float = 90.0) -> End:
        """Wait for the end. Without torchrun nobody ends the ranks that wait for one that failed: this does."""
        limit = time.monotonic() + timeout_s
        try:
            while None in (codes := [process.poll() for process in self.processes]):
                if any(codes):
                    limit = min(limit, time.monotonic() + GRACE_S)
                if time.monotonic() > limit:
                    break
                time.sleep(0.02)
        finally:
            for process in self.processes:
                process.kill()
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read())
        assert any(codes) or None not in codes, f"still running after {timeout_s} s\n{texts[1]}"
        return End(next((code for code in codes if code), 0), *texts)


def environments(ranks: int) -> list[dict[str, str]]:
    """torchrun's variables for each rank of one host; none for a plain process."""
    if not ranks:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return [shared | dict.fromkeys(("RANK", "LOCAL_RANK"), str(i)) for i in range(ranks)]


class Process:
    """What tests ask of subprocess.Popen."""

    def __init__(self, files: list[Any], typed: list[str], given: Mapping[str, str]) -> None:
        # Inherited by name: a fork server hands on no descriptors but by pickling them.
        names = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]
        self._process = context().Process(target=start, args=(typed, given, *names), daemon=False)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def start(typed: list[str], given: Mapping[str, str], out: str, err: str) -> None:
    """In the new process: be the script."""
    for number, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    os.environ.update(given)
    os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)
    sys.path[:0] = PATHS
    sys.argv = typed
    try:
        runpy.run_path(typed[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
