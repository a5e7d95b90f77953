"""Processes and lifelines: how a rank says that it lives and moves, and learns of the controller's end.

A lifeline is one plain TCP connection per rank, served by threads on both ends. Its end of file is a
death, seen at once by both sides; watch.py, the controller's end, judges the rest.
"""

import contextlib
import ctypes
import hmac
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fsdprl.errors import UserError

BEAT_S = 1.0
"""Between two reports of a rank's pulse."""
FROZEN_S = 15.0
"""Silence after which a process is asked about; stopped for that long means frozen."""

VANISHED = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}
"""Socket options, in s, s, probes and ms: idle connections are probed, sent bytes must be received."""

_LENGTH = struct.Struct("<I")
_FRAME_LIMIT = 4 << 20


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` when the parent dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, int(signum))  # 1 = PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def process_state(pid: int) -> str | None:
    """The kernel's letter for a process of this host (R, S, D, T, Z, ...); None if it cannot tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def alive(pid: int) -> bool:
    """Whether a process of this host still runs (a zombie does not; nor does any where no /proc tells)."""
    return process_state(pid) not in (None, "Z", "X")


def tell_torchrun() -> None:
    """Fill the place in torchrun's own summary where it would advise how to get tracebacks."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {
            "message": "fsdprl says why, above",
            "extraInfo": {"timestamp": str(int(time.time()))},
        }
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))


def stacks(serving: int | None) -> dict[str, Any]:
    """Python stacks of all threads but the control plane's own, the serving thread's first.

    `where` is the serving thread's innermost line; `waiting` whether it, or a thread of autograd's,
    is inside torch.distributed, as a rank is that waits for another.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    where, waiting, parts = "not serving yet", False, []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != serving):
        name = names.get(ident, "native")
        if name in ("lifeline", "watch"):
            continue
        stack = traceback.extract_stack(frame)
        if ident == serving:
            where = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}"
        if ident == serving or name == "native":
            waiting |= any(f"torch{os.sep}distributed{os.sep}" in line.filename for line in stack)
        parts.append(f"Thread {name}:\n{''.join(stack.format())}")
    return {"text": "\n".join(parts)[:100_000], "where": where, "waiting": waiting}


class Channel:
    """One end of a lifeline: frames of length, token and msgpack body. Sending is thread-safe."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        sock.settimeout(10.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes sends no end of file: ask its kernel, and give up after 14 s.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in VANISHED.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.sock = sock
        self.token = token
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def send(self, kind: str, message: Any = None) -> None:
        body = self.token + msgspec.msgpack.encode((kind, message))
        with self._lock:
            self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> list[tuple[str, Any]]:
        """Messages that one read completes. EOFError at the end, ValueError for a stranger's bytes."""
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            given = bytes(self._buffer[_LENGTH.size : _LENGTH.size + len(self.token)])
            known = hmac.compare_digest(given, self.token[: len(given)])
            if length > _FRAME_LIMIT or length < len(self.token) or not known:
                raise ValueError("not a message of this run")
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size + len(self.token) : end])
            del self._buffer[:end]
            messages.append(msgspec.msgpack.decode(body))
        return messages


@dataclass
class Pulse:
    """What a rank's serving thread writes and its lifeline reports."""

    done: int = -1
    """Number of the last verb finished."""
    ticks: int = 0
    """Steps of progress inside the running verb."""
    thread: int | None = None


class Lifeline(threading.Thread):
    """Reports this rank's pulse to the controller, and ends the process when the controller is gone."""

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        hello: dict[str, Any],
        *,
        follow: bool,
        controller_pid: int | None = None,
    ) -> None:
        """follow: end with the controller (not on rank 0, which holds it). controller_pid: if local."""
        super().__init__(name="lifeline", daemon=True)
        self.pulse = Pulse()
        self._channel = Channel(socket.create_connection(address, timeout=60.0), token)
        self._follow = follow
        self._controller_pid = controller_pid
        self._left = False
        self._rank = hello["rank"]
        self._channel.send("hello", hello)
        self.start()

    def failed(self, error: BaseException, note: str = "") -> None:
        """Tell the controller that the running verb raised. note: what else to say about it."""
        text = "".join(traceback.format_exception(error))
        known = {"user": isinstance(error, UserError), "message": str(error)[:10_000]}
        self._send("failed", known | {"text": text[-100_000:], "note": note})

    def leave(self) -> None:
        """Announce a clean exit; the end of file that follows is no death."""
        self._left = True
        self._send("leave")

    def _send(self, kind: str, message: Any = None) -> None:
        try:
            self._channel.send(kind, message)
        except OSError:
            self._lost()

    def _lost(self) -> None:
        """Nobody is left to speak for the job: the first of the others does."""
        if self._follow and not self._left:
            if self._rank == 1:
                print("fsdprl: rank 0, the controller, is gone", file=sys.stderr, flush=True)
            os._exit(1)

    def run(self) -> None:
        stopped_since: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel.sock, selectors.EVENT_READ)
            while not self._left:
                readable = selector.select(BEAT_S)
                self._send("beat", (self.pulse.done, self.pulse.ticks))
                try:
                    for kind, message in self._channel.receive() if readable else ():
                        if kind == "stacks":
                            self._send("stacks", stacks(self.pulse.thread))
                        elif kind == "bye" and self._follow:
                            tell_torchrun()
                            os._exit(message)
                except (EOFError, OSError, ValueError):
                    return self._lost()
                stopped_since = self._controller_stopped(stopped_since)

    def _controller_stopped(self, since: float | None) -> float | None:
        """A stopped controller cannot end the job, so the ranks of its host do."""
        if self._controller_pid is None or process_state(self._controller_pid) != "T":
            return None
        now = time.monotonic()
        if since is not None and now - since > FROZEN_S:
            os.kill(self._controller_pid, signal.SIGKILL)
            if self._rank == 1:
                print("fsdprl: rank 0, the controller, is frozen: its process is stopped (state T)",
                      file=sys.stderr, flush=True)  # fmt: skip
            os._exit(1)
        return since if since is not None else now
