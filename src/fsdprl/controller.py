"""What rank 0's main thread holds: verbs to sets of ranks, and how long things took. No torch."""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from fsdprl.config import Flags
from fsdprl.errors import UserError
from fsdprl.phases import Phases
from fsdprl.watch import Job, Watch
from fsdprl.wire import Wire, decode, encode
from fsdprl.world import World

START_S = 1800.0
START_PHASES = ("import", "start", "load", "engine")
"""Phases that read and compile before they can tick; their deadline is at least START_S."""
CHANGES = ("model.optim_step", "model.blend")
"""Verbs after which the weights are no longer those the step began with."""


@dataclass(frozen=True)
class Span:
    """One stretch of time, in seconds of time.perf_counter()."""

    name: str
    start: float
    end: float


class Timeline:
    """Spans and counters of the current step. Thread-safe; the tracker drains it once a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._counts: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a block, recorded even when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter())

    def add(self, name: str, start: float, end: float) -> None:
        """Record a span measured elsewhere (time.perf_counter seconds of this process)."""
        with self._lock:
            self._spans.append(Span(name, start, end))

    def count(self, name: str, amount: float) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0.0) + amount

    def most(self, name: str, amount: float) -> None:
        """Raise a counter to `amount` if it is lower."""
        with self._lock:
            self._counts[name] = max(self._counts.get(name, amount), amount)

    def drain(self) -> tuple[list[Span], dict[str, float]]:
        """All spans and counters since the last drain, in the order they ended."""
        with self._lock:
            spans, self._spans = self._spans, []
            counts, self._counts = self._counts, {}
        return spans, counts


@dataclass
class Handle:
    """A verb under way on some ranks."""

    controller: "Controller"
    ranks: Sequence[int]
    seq: int
    verb: str
    phase: str
    metered: bool
    sent: float = field(default_factory=time.perf_counter)
    replies: dict[int, Any] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    received: int = 0

    def wait(self) -> list[Any]:
        """The replies in rank order, as the ranks were given.

        Raises RemoteError on the first failure anywhere in the job, with the rank's traceback;
        UserError if what a rank met was the user's mistake; Interrupted on Ctrl-C or SIGTERM.
        """
        while len(self.replies) < len(self.ranks):
            self.controller.pump()
        return [self.replies[rank] for rank in self.ranks]


class Controller:
    """Sends verbs to sets of ranks. Verbs run one at a time per rank, in the order of the calls."""

    def __init__(
        self,
        world: World,
        *,
        flags: Flags | None = None,
        config: dict[str, Any] | None = None,
        recipe: Path = Path("recipe.py"),
        stall_s: float = 600.0,
    ) -> None:
        """stall_s: deadline of phases that give none."""
        self.world, self.world_size = world, world.size
        self.flags, self.config, self.recipe = flags or Flags(), config or {}, recipe
        self.stall_s = stall_s
        self.timeline = Timeline()
        self.phases = Phases(self)
        self.device_type = "cpu"
        """The ranks' kind of device, known once they have started."""
        self.step = 0
        """The training step under way; for seeds and for the cause of a failure."""
        self.redrawn = 0
        """How often the run was resumed without its random numbers; for seeds."""
        self.report: list[tuple[str, list[str]]] = []
        """What --dry-run shows: titles and lines, appended by whoever knows something."""
        self.facts: dict[str, Any] = {}
        """What is only decided at run time (the engine's kind); goes to config.json."""
        self.pause_hooks: list[Callable[[bool], None]] = []
        """Called with True when someone sits down at a breakpoint, with False afterwards."""
        self.on_exit: list[Callable[[dict[str, Any]], None]] = []
        """Called once at the end with the cause: kind, rank, host, phase, step, message."""
        self.interrupt: BaseException | None = None
        """Set by a signal that came while messages were on their way; raised when they are through."""
        self.uninterruptible = False
        self.changed = False
        """The step under way has changed what a checkpoint holds: it must be finished before a save."""
        self.skipped, self.may_skip, self.log_entropy = 0, 0, False
        """Updates left out because they were not finite, and how many may be (--run.skip-nonfinite)."""
        self.leaving: BaseException | None = None
        """Set by a signal that came when `changed`; the run raises it once the step is saved."""
        self._wire: Wire | None = None
        self._watch: Watch | None = None
        self._poller = zmq.Poller()
        self._handles: dict[int, Handle] = {}
        self._seq = 0
        self._thread = threading.get_ident()
        self._slow: dict[str, tuple[int, int]] = {}

    def connect(self, wire: Wire, watch: Watch) -> None:
        """Give it the ranks. Without (dry run) there is nobody to call."""
        self._wire, self._watch = wire, watch
        self._poller.register(wire.socket, zmq.POLLIN)
        self._poller.register(watch.wake, zmq.POLLIN)

    def close(self) -> None:
        if self._wire and self._watch:
            self._watch.close()
            self._wire.close()

    def call(
        self,
        verb: str,
        payload: dict[str, Any] | Sequence[dict[str, Any]],
        *,
        ranks: Sequence[int] | None = None,
        phase: str | None = None,
        stall_s: float | None = None,
        metered: bool = True,
    ) -> Handle:
        """Tell ranks (None: all) to run a verb, and return at once.

        payload: keyword arguments, one dict for all or one per addressed rank; plain data, tensors
        and arrays. phase: for timings and messages (default: the verb). stall_s: seconds the verb may
        go without progress. metered: False counts the bytes as wire.peek, not wire.sent/received.
        Raises TypeError if a payload cannot travel, RemoteError if the job has already failed.
        """
        assert self._wire and self._watch, f"{verb} called in a dry run: there are no ranks"
        assert threading.get_ident() == self._thread, f"{verb} called from another thread than main"
        ranks = list(range(self.world_size)) if ranks is None else list(ranks)
        if isinstance(payload, dict):
            bodies = [encode(payload)] * len(ranks)
        else:
            assert len(payload) == len(ranks), (
                f"{verb}: {len(payload)} payloads, {len(ranks)} ranks"
            )
            bodies = [encode(one) for one in payload]
        if self._watch.failure:
            raise self._watch.failure
        self._seq += 1
        self.changed = self.changed or verb in CHANGES
        with self.whole():
            handle = self._expect(ranks, verb, phase or verb, stall_s, metered)
            amount = self._wire.send(ranks, self._seq, verb, bodies, step=self.step)
        self.timeline.count("wire.sent" if metered else "wire.peek", amount)
        return handle

    def ready(self) -> Handle:
        """The handle of what every rank does unasked: import its verbs."""
        return self._expect(range(self.world_size), "import", "import", None, True)

    def _expect(
        self, ranks: Sequence[int], verb: str, phase: str, stall_s: float | None, metered: bool
    ) -> Handle:
        assert self._watch
        if stall_s is None:
            stall_s = max(self.stall_s, START_S) if phase in START_PHASES else self.stall_s
        handle = Handle(self, ranks, self._seq, verb, phase, metered)
        self._handles[self._seq] = handle
        self._watch.expect(ranks, Job(self._seq, phase, stall_s))
        return handle

    def pump(self) -> None:
        """Wait for something to happen, and take in the replies that are here."""
        assert self._wire and self._watch
        self._poller.poll()
        if self._watch.failure:
            raise self._watch.failure
        with self.whole():
            while (reply := self._wire.receive()) is not None:
                self._take(*reply)

    def _take(self, rank: int, seq: int, seconds: float, body: memoryview) -> None:
        assert self._watch
        handle = self._handles[seq]
        handle.replies[rank] = decode(body)
        handle.seconds[rank] = seconds
        handle.received += len(body)
        self._watch.finished(rank, seq)
        if len(handle.replies) == len(handle.ranks):
            del self._handles[seq]
            kind = "wire.received" if handle.metered else "wire.peek"
            self.timeline.count(kind, handle.received)
            self.timeline.add(handle.phase, handle.sent, time.perf_counter())
            self._warn_of_slow_rank(handle)

    def _warn_of_slow_rank(self, handle: Handle) -> None:
        """Say once which rank took over 3 times the median in 3 calls of a verb in a row."""
        assert self._watch
        if len(handle.ranks) < 2:
            return
        rank, longest = max(handle.seconds.items(), key=lambda item: item[1])
        usual = statistics.median_low(handle.seconds.values())
        slow = longest > 3 * usual and longest - usual > 1.0
        last, times = self._slow.get(handle.verb, (rank, 0))
        times = times + 1 if slow and rank == last else int(slow)
        self._slow[handle.verb] = rank, times
        if times == 3:
            print(
                f"fsdprl: {self._watch.peers[rank]} is slow in {handle.phase}: "
                f"{longest:.1f} s, where others take {usual:.1f} s",
                file=sys.stderr,
            )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold a signal's exception back: half a message, or a verb to half of the ranks, is worse."""
        outer, self.uninterruptible = self.uninterruptible, True
        try:
            yield
        finally:
            self.uninterruptible = outer
            # After an error, too: what it is put off to may have begun to change the weights.
            if self.interrupt and not outer:
                interrupt, self.interrupt = self.interrupt, None
                raise interrupt

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No deadline runs and the live display is still, as long as someone sits at a breakpoint."""
        self._pause(True)
        try:
            yield
        finally:
            self._pause(False)

    def _pause(self, paused: bool) -> None:
        if self._watch:
            self._watch.pause(paused)
        for hook in self.pause_hooks:
            hook(paused)


_current: Controller | None = None


def current() -> Controller:
    """The controller of this process. Raises UserError outside of what launch() runs on rank 0."""
    if _current is None:
        raise UserError("this runs under launch(main, Config) only, in main on rank 0")
    return _current


def set_current(controller: Controller | None) -> None:
    """Called by launch, and by tests."""
    global _current
    _current = controller
