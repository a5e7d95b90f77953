"""Python programs that nobody has read, written by a model, run where they can do no harm.

A program runs in a process of its own, in new namespaces (no network, its own process numbers, its own small root
with read-only system folders and an empty /tmp), as nobody, with an empty environment and hard limits of memory,
processor time, disk, processes and output. Needs Linux with namespaces; where they are missing, `run_python` refuses,
unless it is told to run unsandboxed, with the limits alone.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fsdprl.errors import UserError

_CELL = Path(__file__).with_name("sandbox_cell.py")
_OUTPUT_BYTES = 1 << 20
_EXIT_S = 2.0


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    timeout_s: float = 10.0
    """Seconds by the clock."""
    cpu_s: int = 10
    """Seconds of processor time of each process."""
    memory_mb: int = 512
    """Address space of each process."""
    disk_mb: int = 16
    """Of /tmp in all, and of one file."""
    processes: int = 16


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    code: int
    """Exit code; 128 + N for signal N."""
    out: str
    err: str
    timed_out: bool = False


def run_python(
    program: str,
    stdin: str = "",
    limits: Limits | None = None,
    *,
    allow_unsandboxed: bool = False,
) -> Ran:
    """Run a Python program (standard library only) and wait for its end. Output beyond 1 MiB ends it.

    allow_unsandboxed: where this machine has no namespaces, run with limits and an empty environment alone: the
    program then sees the file system and the network. Raises UserError where that is needed and not allowed.
    """
    limits = limits or Limits()
    if sys.platform == "linux":
        ran = _attempt(program, stdin, limits, jail=True)
        if isinstance(ran, Ran):
            return ran
        reason = ran
    else:
        reason = f"no namespaces on {sys.platform}"
    if not allow_unsandboxed:
        raise UserError(
            f"programs cannot be sandboxed on this machine ({reason}), so they are not run: allow user namespaces "
            f"(sysctl kernel.unprivileged_userns_clone=1; in a container --security-opt seccomp=unconfined), or "
            f"accept what a model may write with allow_unsandboxed=True"
        )
    ran = _attempt(program, stdin, limits, jail=False)
    if isinstance(ran, str):
        raise UserError(f"programs cannot be run on this machine: {ran}")
    return ran


def _attempt(program: str, stdin: str, limits: Limits, *, jail: bool) -> Ran | str:
    """How it ended, or why it could not be started."""
    with (
        tempfile.TemporaryDirectory(prefix="fsdprl-cell-") as folder,
        tempfile.TemporaryFile() as text,
    ):
        text.write(program.encode("utf-8", "replace"))
        text.seek(0)
        status_read, status_write = os.pipe()
        asked = {
            "jail": jail,
            "program": text.fileno(),
            "status": status_write,
            "folder": folder,
            "python": os.path.realpath(sys.executable),
            "prefix": os.path.realpath(sys.base_prefix),
            "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20,
            "cpu_s": limits.cpu_s,
            "processes": limits.processes,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CELL), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[text.fileno(), status_write],
            env={"LANG": "C.UTF-8"},
            start_new_session=True,
        )
        os.close(status_write)
        try:
            out, err, timed_out = _converse(process, stdin.encode(), limits.timeout_s)
        finally:
            _end(process)
            with os.fdopen(status_read) as status:
                said = status.read(1000)
    if said != "ready":
        return said.removeprefix("ready") or err or f"exit code {process.returncode}"
    code = process.returncode
    return Ran(code if code >= 0 else 128 - code, out, err, timed_out)


def _converse(
    process: subprocess.Popen[bytes], stdin: bytes, timeout_s: float
) -> tuple[str, str, bool]:
    """Feed and read a process until it closes its output, says too much or runs out of time."""
    assert process.stdin and process.stdout and process.stderr
    deadline = time.monotonic() + timeout_s
    said = {process.stdout: bytearray(), process.stderr: bytearray()}
    rest = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        os.set_blocking(process.stdin.fileno(), False)
        if rest:
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        for pipe in said:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and sum(map(len, said.values())) <= _OUTPUT_BYTES:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(left):
                pipe = key.fileobj
                if pipe is process.stdin:
                    rest = _feed(process.stdin, rest)
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif chunk := os.read(key.fd, 1 << 16):
                    said[pipe] += chunk  # type: ignore[index]
                else:
                    selector.unregister(pipe)
    if sum(map(len, said.values())) <= _OUTPUT_BYTES:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    texts = [bytes(said[pipe][:_OUTPUT_BYTES]).decode("utf-8", "replace") for pipe in said]
    return texts[0], texts[1], process.poll() is None


def _feed(pipe: object, rest: memoryview) -> memoryview:
    """What is left to write; nothing, if nobody reads."""
    try:
        return rest[os.write(pipe.fileno(), rest[: 1 << 16]) :]  # type: ignore[attr-defined]
    except BlockingIOError:
        return rest
    except OSError:
        return rest[:0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left: the cell's process 1 dies with its parent, and everything else with it."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(OSError):
                pipe.close()
