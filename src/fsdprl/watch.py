"""Who is alive, who moves, who is stopped: three different things, told apart over the lifelines.

Death is a lifeline's end of file. Stall is a verb whose counter of progress does not move before the
verb's deadline. Frozen is silence of a process that the kernel calls stopped. Whatever comes first
becomes the one failure of the job.
"""

import os
import re
import selectors
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdprl import liveness
from fsdprl.errors import RemoteError, UserError
from fsdprl.liveness import BEAT_S, Channel, alive, process_state
from fsdprl.world import World

GRACE_S = 5.0
"""Time the main thread has to notice a failure before the watch ends the process."""
ANSWER_S = 3.0
"""Time the ranks have to answer with their stacks, and a dead connection to show who died."""

_ECHO = re.compile(
    r"clos(ed|ing) by peer|connection (reset|closed|refused)|broken pipe|gloo|nccl|hccl|"
    r"processgroup|distbackend|connectfull",
    re.IGNORECASE,
)
"""Errors that a rank meets because a peer died: its death is the cause, not they."""


@dataclass
class Job:
    """A verb that a rank was told to run."""

    seq: int
    phase: str
    stall_s: float


@dataclass
class Peer:
    """What the watch knows of a rank."""

    rank: int
    host: str
    pid: int
    files: dict[str, str]
    channel: Channel
    local: bool
    jobs: deque[Job] = field(default_factory=deque)
    done: int = -1
    ticks: int = 0
    moved: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    left: bool = False
    answer: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def phase(self) -> str:
        return self.jobs[0].phase if self.jobs else "idle"

    def stalled(self, now: float) -> bool:
        return bool(self.jobs) and now - self.moved > self.jobs[0].stall_s


class Watch(threading.Thread):
    """The controller's thread that listens to all lifelines and finds the job's one failure."""

    def __init__(self, address: str, token: bytes, world: World, *, relaxed: bool = False) -> None:
        """Bind a free port of `address`. relaxed: no deadline runs (--debug)."""
        super().__init__(name="watch", daemon=True)
        self.failure: RemoteError | UserError | None = None
        self.failed = threading.Event()
        self.dropped = 0
        self.paused = 0
        self.taken = False
        """Set by who ends the job, so that the watch need not."""
        self.peers: dict[int, Peer] = {}
        self.on_neglect: Callable[[], None] = lambda: os._exit(1)
        """Called when the main thread has not taken up a failure within GRACE_S."""
        self._token, self._world, self._relaxed = token, world, relaxed
        self._listener = socket.create_server((address, 0), backlog=4096)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.RLock()
        self._joined = threading.Condition(self._lock)
        self._held: tuple[float, RemoteError] | None = None
        self._asked: float | None = None
        self._failed_at = 0.0
        self._closed = False
        self.start()

    # ---- called by the main thread

    def gather(self, timeout_s: float) -> None:
        """Wait until every rank has said hello, the time is up, or something has failed."""
        end = time.monotonic() + timeout_s
        with self._joined:
            while self.missing and not self.failure and time.monotonic() < end:
                self._joined.wait(BEAT_S)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank not in self.peers]

    def absence(self, when: str) -> RemoteError:
        """The failure of ranks that never came."""
        ranks, host = self.missing, "its host" if self._world.size > self._world.local_size else ""
        named = ", ".join(map(str, ranks))
        what = f"rank {named} had not connected {when}"
        return RemoteError(what, rank=ranks[0], host=host, phase="connect", kind="died")

    def fail_first_rank(self, error: BaseException) -> None:
        """Rank 0 could not even start to serve."""
        host, text = self._world.host, "".join(traceback.format_exception(error))
        what = f"rank 0 on {host} raised in connect"
        with self._lock:
            self._fail(
                RemoteError(what, rank=0, host=host, phase="connect", kind="raised", text=text)
            )

    def expect(self, ranks: Iterable[int], job: Job) -> None:
        """Note that these ranks were told to run a verb."""
        now = time.monotonic()
        with self._lock:
            for rank in ranks:
                peer = self.peers[rank]
                if not peer.jobs:
                    peer.moved = now
                peer.jobs.append(job)

    def finished(self, rank: int, seq: int) -> None:
        """Note that a rank's reply to a verb is here."""
        with self._lock:
            peer = self.peers[rank]
            if seq > peer.done:  # else the beats have said so already
                self._advance(peer, seq, 0)

    @property
    def idle(self) -> bool:
        with self._lock:
            return not any(peer.jobs for peer in self.peers.values())

    def pause(self, paused: bool) -> None:
        """No deadline runs while someone sits at a breakpoint."""
        with self._lock:
            self.paused += 1 if paused else -1
            for peer in self.peers.values():
                peer.moved = time.monotonic()
            self._failed_at = time.monotonic()

    def dismiss(self, code: int, timeout_s: float = 3.0) -> None:
        """Tell every other rank to exit with `code`; kill those of this host that do not."""
        with self._lock:
            others = [peer for peer in self.peers.values() if peer.rank != self._world.rank]
        for peer in others:
            self._tell(peer, "bye", code)
        end = time.monotonic() + timeout_s
        local = [peer for peer in others if peer.local]
        while time.monotonic() < end and any(alive(peer.pid) for peer in local):
            time.sleep(0.05)
        for peer in local:
            if alive(peer.pid):
                os.kill(peer.pid, signal.SIGKILL)

    def close(self) -> None:
        self._closed = True

    # ---- the thread

    def run(self) -> None:
        next_check = 0.0
        while not self._closed:
            for key, _ in self._selector.select(BEAT_S / 2):
                with self._lock:
                    self._accept() if key.data is None else self._read(key.data)
            now = time.monotonic()
            if now < next_check:
                continue
            next_check = now + BEAT_S / 2
            with self._lock:
                self._check(now)
            neglected = self.failure and not (self.taken or self.paused)
            if neglected and now - self._failed_at > GRACE_S:
                self.on_neglect()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        self._selector.register(sock, selectors.EVENT_READ, Channel(sock, self._token))

    def _read(self, source: "Channel | Peer") -> None:
        channel = source.channel if isinstance(source, Peer) else source
        try:
            for kind, message in channel.receive():
                if isinstance(source, Peer):
                    self._hear(source, kind, message)
                else:
                    source = self._admit(channel, kind, message)
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            self._selector.unregister(channel.sock)
            channel.sock.close()
            if isinstance(source, Peer):
                self._lost(source)
            elif not isinstance(error, EOFError):
                self.dropped += 1

    def _admit(self, channel: Channel, kind: str, message: dict[str, Any]) -> Peer:
        rank = message["rank"]
        if kind != "hello" or rank not in range(self._world.size) or rank in self.peers:
            raise ValueError(f"{kind} of rank {rank} out of turn")
        local = rank < self._world.local_size  # torchrun numbers the ranks of a host in a row
        peer = Peer(rank, message["host"], message["pid"], message["files"], channel, local)
        self.peers[rank] = peer
        self._selector.modify(channel.sock, selectors.EVENT_READ, peer)
        self._joined.notify_all()
        return peer

    def _hear(self, peer: Peer, kind: str, message: Any) -> None:
        peer.heard = time.monotonic()
        if kind == "beat":
            self._advance(peer, *message)
        elif kind == "stacks":
            peer.answer = message
        elif kind == "leave":
            peer.left = True
        elif kind == "failed":
            self._raised(peer, message)

    def _advance(self, peer: Peer, done: int, ticks: int) -> None:
        if done < peer.done or (done, ticks) == (peer.done, peer.ticks):
            return
        peer.done, peer.ticks, peer.moved = done, ticks, time.monotonic()
        while peer.jobs and peer.jobs[0].seq <= done:
            peer.jobs.popleft()

    # ---- verdicts

    def _raised(self, peer: Peer, message: dict[str, Any]) -> None:
        if message["user"]:
            return self._fail(UserError(message["message"]))
        what = f"raised in {peer.phase}" + (f": {message['note']}" if message["note"] else "")
        error = self._error(peer, "raised", what, message["text"])
        if _ECHO.search(message["message"]):
            self._held = self._held or (time.monotonic(), error)
        else:
            self._fail(error)

    def _lost(self, peer: Peer) -> None:
        if not peer.left:
            doing = "while idle" if peer.phase == "idle" else f"in {peer.phase}"
            why = "its process is gone (killed, out of memory or crashed"
            why += "; torchrun's own lines give its exit code)" if self._world.torchrun else ")"
            self._fail(self._error(peer, "died", f"died {doing}: {why}"))

    def _check(self, now: float) -> None:
        if self.failure:
            return
        if self._held and now - self._held[0] > ANSWER_S:
            return self._fail(self._held[1])
        if self._relaxed or self.paused:
            return
        for peer in self.peers.values():
            silent = now - peer.heard > liveness.FROZEN_S
            if silent and peer.local and process_state(peer.pid) == "T":
                return self._frozen(peer, now)
        late = [peer for peer in self.peers.values() if peer.stalled(now)]
        if late and self._asked is None:
            self._asked = now
            for peer in self.peers.values():
                peer.answer = None
                self._tell(peer, "stacks")
        elif not late:
            self._asked = None
        elif all(p.answer for p in self.peers.values()) or now - (self._asked or now) > ANSWER_S:
            self._stalled(late, now)

    def _frozen(self, peer: Peer, now: float) -> None:
        what = f"is frozen in {peer.phase}" if peer.jobs else "is frozen while idle"
        why = f"its process is stopped (state T) and silent for {now - peer.heard:.0f} s"
        self._fail(self._error(peer, "frozen", f"{what}: {why}"))

    def _stalled(self, late: Sequence[Peer], now: float) -> None:
        """Blame the rank that waits for nobody; among equals the one that is behind."""
        stopped = [peer for peer in late if peer.local and process_state(peer.pid) == "T"]
        if stopped:
            return self._frozen(stopped[0], now)

        def blame(peer: Peer) -> tuple[bool, int, int, float]:
            waiting = bool(peer.answer and peer.answer["waiting"])
            return waiting, peer.jobs[0].seq, peer.ticks, peer.moved

        first, *others = sorted(late, key=blame)
        what = (
            f"stalled in {first.phase}: no progress for {now - first.moved:.0f} s after "
            f"{first.ticks} steps (deadline {first.jobs[0].stall_s:g} s, --run.stall-timeout-s)"
        )
        silent = "no stacks: its interpreter does not answer"
        for peer in others:
            where = peer.answer["where"] if peer.answer else silent
            what += f"\n  {peer} does not move either, after {peer.ticks} steps: {where}"
        text = first.answer["text"] if first.answer else silent
        error = self._error(first, "stalled", what, text)
        for peer in self.peers.values():
            error.stacks[str(peer)] = peer.answer["text"] if peer.answer else silent
        self._fail(error)

    def _error(self, peer: Peer, kind: str, what: str, text: str = "") -> RemoteError:
        return RemoteError(
            f"{peer} {what}", rank=peer.rank, host=peer.host, phase=peer.phase, kind=kind, text=text
        )

    def _fail(self, failure: RemoteError | UserError) -> None:
        if self.failure is None and not self._closed:
            self.failure, self._failed_at = failure, time.monotonic()
            self.failed.set()
            self._waker.send(b"!")
            self._joined.notify_all()

    def _tell(self, peer: Peer, kind: str, message: Any = None) -> None:
        try:
            peer.channel.send(kind, message)
        except OSError:
            return  # its end of file tells the rest
