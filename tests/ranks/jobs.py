"""Start a script as a job of real processes, and see how it ends and that it leaves nothing."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class End:
    """How a job ended."""

    code: int
    out: str
    err: str


class Job:
    """A running job. Its processes are known by a marker in their environment."""

    def __init__(self, words: list[str], *, ranks: int = 0, stdin: str | None = None, **env: str):
        """words: the script and its arguments. ranks: 0 for plain python, else under torchrun."""
        self.marker = uuid.uuid4().hex
        self.before = shared_memory()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {
            "FSDPRL_TEST_JOB": self.marker,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(SOURCE), str(HERE))),
            **env,
        }
        self.process = subprocess.Popen(
            [sys.executable, *(torchrun if ranks else []), *words],
            env=environment,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stdin, self.ranks = stdin, ranks

    def end(self, timeout_s: float = 90.0) -> End:
        """Wait for the end; nothing may be left 15 seconds later. Kills what is left before failing."""
        try:
            out, err = self.process.communicate(self.stdin, timeout=timeout_s)
            limit = time.monotonic() + 15
            while (left := self.processes()) and time.monotonic() < limit:
                time.sleep(0.1)
            assert not left, f"left behind: {left}\n{err}"
            left = unmapped(shared_memory().keys() - self.before)
            assert not left, f"left in shared memory: {left}\n{err}"
        finally:
            for pid in self.processes():
                os.kill(pid, 9)
        return End(self.process.returncode, out, err)

    def processes(self) -> dict[int, str]:
        """Processes of this job that still run: pid -> command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                if f"FSDPRL_TEST_JOB={self.marker}".encode() in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = words
            except OSError:
                continue
        return found

    def until(self, path: Path, timeout_s: float = 90.0) -> str:
        """The content of a file that the job writes, once it is there and not empty."""
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit and self.process.poll() is None:
            if path.exists() and (text := path.read_text()):
                return text
            time.sleep(0.05)
        raise AssertionError(f"{path.name} never came\n{self.end(5.0)}")


def shared_memory() -> dict[str, int]:
    """Names in shared memory -> their inodes."""
    found = {}
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            found[path.name] = path.stat().st_ino
    return found


def unmapped(names: set[str]) -> set[str]:
    """Those that no process has in its memory for two seconds: who made them is gone. Others are of other jobs.

    A mapping is known by its inode: who makes a semaphore maps it under a passing name, which its maps go on showing.
    """
    limit = time.monotonic() + 2
    while (there := shared_memory().keys() & names) and time.monotonic() < limit:
        inodes = mapped()
        names = {name for name in there if shared_memory().get(name) not in inodes}
        time.sleep(0.2)
    return there


def mapped() -> set[int]:
    """Inodes of shared memory that a process has mapped."""
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            lines = (folder / "maps").read_text().splitlines() if folder.name.isdigit() else []
            found |= {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return found
