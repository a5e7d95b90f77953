"""Reward processes as their rank sees them: the fork server's handle, and one record per child."""

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field

from fsdprl.errors import UserError
from fsdprl.functions import FunctionRef
from fsdprl.reward_server import Answer, Order, Recipe, ask

START_S = 120.0
"""Seconds to import a reward's module, or to fork a process and find the function in it."""

_HIDDEN = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_SINGLE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class RewardError(RuntimeError):
    """A reward function raised, returned something that is no reward, or failed too often."""


@dataclass(eq=False)
class Child:
    """A reward process as the grader sees it."""

    pid: int
    socket: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    chunk: tuple[int, ...] = ()
    """Batch ordinals of the samples last sent."""
    work: deque[int] = field(default_factory=deque)
    """Those of them still without an outcome, in order; empty when idle."""
    started: bool = False
    """Whether it found the function, so that the samples' deadlines run."""
    ordered: bool = True
    deadline: float = 0.0


class ForkServer:
    """The fork server, started with accelerators hidden and one thread per library."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        source = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from fsdprl.reward_server import serve; serve({theirs.fileno()}, {os.getpid()})"
        )
        environment = os.environ | dict.fromkeys(_HIDDEN, "") | dict.fromkeys(_SINGLE, "1")
        self._socket = ours
        self._loaded: set[tuple[str, str]] = set()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", source],
                env=environment | {"FSDPRL_REWARD_PROCESS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def alive(self) -> bool:
        return self._process.poll() is None

    def load(self, ref: FunctionRef) -> bool:
        """Import the function's module in the server, once; whether that was now."""
        if (ref.module, ref.qualname) in self._loaded:
            return False
        error = self._ask(Order("load", ref=ref, recipe=_recipe())).error
        if error:
            raise UserError(f"reward {ref} cannot be loaded in a reward process:\n{error}")
        self._loaded.add((ref.module, ref.qualname))
        return True

    def fork(self) -> Child:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        with theirs:
            return Child(self._ask(Order("fork"), pass_fd=theirs.fileno()).code, ours)

    def end(self, pid: int) -> int:
        """Kill a reward process with all it started; returns how it died."""
        return self._ask(Order("end", pid=pid)).code

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, order: Order, pass_fd: int | None = None) -> Answer:
        try:
            return ask(self._socket, order, pass_fd)
        except TimeoutError:
            self._process.kill()
            what = f"importing {order.ref.module}" if order.ref else order.verb
            raise RewardError(
                f"the reward server gave no answer within {START_S:g} s ({what})"
            ) from None
        except (EOFError, OSError):
            code = self._process.wait()
            raise RewardError(f"the reward server died: {exit_text(code)}") from None


def _recipe() -> Recipe:
    """How this process's `__main__` was started, so that the server can import the same file."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return Recipe(module=spec.name)
    path = getattr(main, "__file__", None)
    return Recipe(path=os.path.abspath(path) if path else "")


def exit_text(code: int) -> str:
    """How a process ended, in words; negative codes are signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name} (out of memory?)" if -code == signal.SIGKILL else name
