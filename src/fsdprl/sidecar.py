"""A child process fed JSON lines through a pipe: it may hang, fail or die without training noticing.

Parent: `Sidecar(...)`, `send`, `close`. Child: `for message in messages(): ...`.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A child that believed itself a rank would try to join the job.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
MOST_WAITING = 1000


class Sidecar:
    """One child process. Never blocks, never raises; whatever goes wrong is warned of once."""

    def __init__(
        self, name: str, module: str, log: Path, warn: Callable[[str], None], remedy: str = ""
    ) -> None:
        """module: run as `python -m module`. log: file for its output. remedy: added to the warning."""
        self.name, self.log, self._warn, self._remedy = name, log, warn, remedy
        self.failed = False
        self._queue: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._process = self._start(module)
        self._feeder = threading.Thread(target=self._feed, name=f"{name}-feeder", daemon=True)
        self._feeder.start()

    def _start(self, module: str) -> subprocess.Popen[bytes] | None:
        env = {
            key: value for key, value in os.environ.items() if not key.startswith(RANK_VARIABLES)
        }
        source = str(Path(__file__).resolve().parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH", "")]))
        try:
            with self.log.open("ab") as output:
                return subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=env,
                    start_new_session=True,  # Ctrl-C is for the run; it ends this child in its turn
                )
        except OSError as error:
            self._fail(str(error))
            return None

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. A child that has fallen far behind loses messages rather than time."""
        if self.failed:
            return
        try:
            self._queue.put_nowait(json.dumps(message, default=str).encode() + b"\n")
        except queue.Full:
            self._fail("is too far behind")

    def close(self, timeout_s: float) -> bool:
        """Let the child finish what it was sent; kill it after timeout_s. True if it ended well."""
        if self._process is None:
            return False
        if self.failed:
            self.kill()
            return False
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._feeder.join(timeout_s)
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._fail(f"did not finish in {timeout_s:g} s")
            self.kill()
            return False
        if code:
            self._fail(self._last_words() or f"ended with code {code}")
        return not self.failed

    def kill(self) -> None:
        """End the child and what it started, now."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _feed(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            while (line := self._queue.get()) is not None:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            self._process.stdin.close()
        except (OSError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            self._fail(self._last_words() or f"ended with code {self._process.returncode}")

    def _last_words(self) -> str:
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:300] if lines else ""

    def _fail(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            self._warn(f"{self.name} stopped: {reason}. Training goes on. {self._remedy}".rstrip())


def messages() -> Iterator[dict[str, Any]]:
    """What the parent sends, until it closes the pipe or is gone. Runs in the child."""
    threading.Thread(target=leave_with_parent, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(5)  # training comes first on a busy machine
    # A library that reads standard input, or starts a process that does, must not eat the messages.
    pipe = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    with pipe:
        for line in pipe:
            yield json.loads(line)


def leave_with_parent(parent: int, grace_s: float = 20.0) -> None:
    """End this process some time after its parent is gone: a copy of the pipe may outlive it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(grace_s)
    os._exit(1)
