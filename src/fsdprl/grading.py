"""Rewards in processes that can be killed: a reward that hangs or crashes costs its own sample.

Each rank has one Grader. It starts a fork server (reward_server.py) and keeps `workers` children of
it busy with chunks of samples. A child sends one outcome per sample as it goes, so the grader knows
which sample is in work, kills the child when that sample's deadline passes, replaces it, and goes
on with the rest. Everything is msgpack over private socket pairs; functions travel by name.
"""

import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fsdprl.errors import UserError
from fsdprl.functions import FunctionRef, resolve
from fsdprl.options import RewardOptions
from fsdprl.reward_calls import Outcome, grade_chunk
from fsdprl.reward_processes import START_S, Child, ForkServer, RewardError, exit_text
from fsdprl.reward_server import Job, send, split_frames
from fsdprl.sample import Sample

CHUNK = 64
"""Most samples sent to a process at once."""
PAUSE_S = 0.001
"""Rest after hearing from processes: quick rewards then come in by the dozen, not one by one."""

LOGGED = ("metric", "extra")
"""Outcomes that come beside a sample's own."""

_outcome = msgspec.msgpack.Decoder(Outcome)


@dataclass(frozen=True)
class Failure:
    """A sample whose reward process hung or died."""

    index: int
    """Ordinal in the batch given to `grade`."""
    row: int
    """Row id."""
    cause: str


@dataclass(frozen=True)
class Graded:
    """What `grade` returns: a score per sample (None: not applicable, or failed), and failures."""

    scores: list[float | None]
    failures: list[Failure]
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """What the function logged by TRL's log_metric, call by call."""
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By ordinal of the sample, what it logged by log_extra."""


class Grader:
    """Grades samples in killable processes; in this process when `debug`, so that breakpoints work.

    A function may carry an attribute `warm_up`, called without arguments before its first sample in
    a process (or in the server it is forked from): slow imports belong there, where no sample's
    deadline runs.
    """

    def __init__(self, options: RewardOptions, *, debug: bool = False) -> None:
        if options.workers < 1 or options.timeout_s <= 0 or not 0 <= options.max_failed_share <= 1:
            raise UserError(
                f"--reward.workers {options.workers} must be at least 1, --reward.timeout-s "
                f"{options.timeout_s} above 0, --reward.max-failed-share "
                f"{options.max_failed_share} between 0 and 1"
            )
        self.options = options
        self.debug = debug
        self._server: ForkServer | None = None
        self._children: list[Child] = []

    def warm_up(self, ref: FunctionRef) -> None:
        """Start the processes and import the function's module, before the first batch needs it.

        Raises UserError if the function is not found or its module does not import.
        """
        if self.debug:
            resolve(ref)
            return
        self._load(ref)
        while len(self._children) < self.options.workers:
            self._add_child()

    def grade(
        self,
        ref: FunctionRef,
        samples: Sequence[Sample],
        progress: Callable[[], None] = lambda: None,
        *,
        allowed: int | None = None,
    ) -> Graded:
        """Score every sample, in order. progress is called whenever something moved.

        allowed: how many may hang or crash (None: options.failures_allowed of these samples; the rank
        of a larger batch is told). Raises RewardError naming function, row and text if more do, or
        if the function raises or returns anything but a finite number or None; UserError if it cannot
        be found.
        """
        if not samples:
            return Graded([], [])
        batch = _Batch(ref, list(samples), self.options, allowed)
        if self.debug:
            grade_chunk(
                resolve(ref), batch.samples, lambda o: batch.settle(o.index, o), timeout_s=None
            )
            return batch.result()
        self._load(ref)
        try:
            self._run(batch, progress)
        except BaseException:
            self._end_children()
            raise
        return batch.result()

    def close(self) -> None:
        """End the reward processes and their server. Safe to call twice."""
        if self._server is not None:
            self._end_children()
            self._server.close()
            self._server = None

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, batch: "_Batch", progress: Callable[[], None]) -> None:
        with selectors.DefaultSelector() as selector:
            while True:
                self._assign(batch)
                busy = [child for child in self._children if child.work]
                if not busy:
                    return
                _watch(selector, busy)
                wait = min(child.deadline for child in busy) - time.monotonic()
                ready = [key.data for key, _ in selector.select(max(0.0, min(wait, 5.0)))]
                for child in ready:
                    self._hear(child, batch)
                now = time.monotonic()
                for child in busy:
                    # What was ready may have moved its deadline: a slow parent blames nobody.
                    if child.work and child not in ready and now >= child.deadline:
                        self._lose(child, batch, overdue=True)
                progress()
                if ready:
                    time.sleep(PAUSE_S)

    def _assign(self, batch: "_Batch") -> None:
        """Give every idle process a chunk; start processes up to the number that have work."""
        while batch.waiting():
            idle = next((child for child in self._children if not child.work), None)
            if idle is None:
                if len(self._children) == self.options.workers:
                    return
                idle = self._add_child()
            idle.work = deque(batch.take(self.options.workers))
            idle.started = False
            idle.deadline = time.monotonic() + START_S
            idle.chunk = tuple(idle.work)
            job = Job(batch.ref, [batch.samples[i] for i in idle.work], self.options.timeout_s)
            try:
                send(idle.socket, job)
            except OSError:
                self._lose(idle, batch, overdue=False)

    def _hear(self, child: "Child", batch: "_Batch") -> None:
        try:
            data = child.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._lose(child, batch, overdue=False)
            return
        child.buffer += data
        for frame in split_frames(child.buffer):
            outcome = _outcome.decode(frame)
            if outcome.kind == "ready":
                child.started, child.ordered = True, outcome.text == "in order"
            elif outcome.kind == "undecided":
                batch.return_alone(child.work)
                child.work.clear()
            else:
                index = child.chunk[outcome.index]
                batch.settle(index, outcome)
                if outcome.kind not in LOGGED:
                    child.work.remove(index)
        # Async functions end their own awaits at timeout_s: this process's deadline comes after.
        grace = 0.0 if child.ordered else 1.0
        child.deadline = time.monotonic() + self.options.timeout_s + grace

    def _lose(self, child: "Child", batch: "_Batch", *, overdue: bool) -> None:
        """A process died or is overdue: end it, blame the sample in work, requeue the others."""
        assert self._server is not None
        self._children.remove(child)
        child.socket.close()
        code = self._server.end(child.pid)
        if overdue and child.started:
            cause = f"no answer within {self.options.timeout_s:g} s, its process was killed"
        elif overdue:
            cause = f"no start within {START_S:g} s, killed"
        else:
            cause = f"its process died: {exit_text(code)}"
        if not child.started:
            batch.return_unstarted(child.work, cause)
        elif child.ordered or len(child.chunk) == 1:
            for index in batch.unit(child.work):
                batch.fail(index, cause)
                child.work.remove(index)
            batch.return_work(child.work)
        else:
            batch.return_alone(child.work)

    def _load(self, ref: FunctionRef) -> None:
        if self._server is not None and not self._server.alive():
            self._drop_server()
        if self._server is None:
            self._server = ForkServer()
        if self._server.load(ref):
            self._end_children()  # forked before it, they know neither the module nor a recipe's __main__

    def _drop_server(self) -> None:
        """The server died, and its children with it (they are tied to its life)."""
        assert self._server is not None
        for child in self._children:
            child.socket.close()
        self._children.clear()
        self._server.close()
        self._server = None

    def _add_child(self) -> "Child":
        assert self._server is not None
        child = self._server.fork()
        self._children.append(child)
        return child

    def _end_children(self) -> None:
        for child in self._children:
            child.socket.close()
            if self._server is not None and self._server.alive():
                self._server.end(child.pid)
        self._children.clear()


class _Batch:
    """The samples of one `grade` call: which wait, which have a score, which failed."""

    def __init__(
        self, ref: FunctionRef, samples: list[Sample], options: RewardOptions, allowed: int | None
    ) -> None:
        self.ref = ref
        self.samples = samples
        self._options = options
        self._scores: list[float | None] = [None] * len(samples)
        self._failures: list[Failure] = []
        self._metrics: list[tuple[str, float]] = []
        self._extras: dict[int, dict[str, Any]] = {}
        # The samples of a group, where the reward is one over groups, are side by side.
        self._waiting = deque(sorted(range(len(samples)), key=lambda i: samples[i].group))
        sizes = Counter(sample.group for sample in samples if sample.group >= 0)
        if allowed is None:
            allowed = options.failures_allowed(len(samples), max(sizes.values(), default=1))
        self._allowed = allowed
        self._alone: deque[int] = deque()
        self._false_starts = 0

    def waiting(self) -> int:
        return len(self._waiting) + len(self._alone)

    def take(self, processes: int) -> list[int]:
        """The next chunk: smaller towards the end, so that processes finish together."""
        if self._alone:
            return [self._alone.popleft()]
        share = len(self._waiting) // (2 * processes) if processes > 1 else CHUNK
        size = max(1, min(CHUNK, share, len(self._waiting)))
        taken = [self._waiting.popleft() for _ in range(size)]
        while self._waiting and self._together(taken[-1], self._waiting[0]):
            taken.append(self._waiting.popleft())
        return taken

    def unit(self, work: Sequence[int]) -> list[int]:
        """The sample at the head of this work, and the others of its group if groups are rewarded."""
        return [index for index in work if index == work[0] or self._together(index, work[0])]

    def _together(self, one: int, other: int) -> bool:
        return self.samples[one].group == self.samples[other].group >= 0

    def settle(self, index: int, outcome: Outcome) -> None:
        """Write down an outcome. Raises RewardError if it is an error of the function's."""
        if outcome.kind == "score":
            self._false_starts = 0
            self._scores[index] = outcome.score
        elif outcome.kind == "metric":
            self._metrics.append((outcome.text, outcome.score or 0.0))
        elif outcome.kind == "extra":
            name, value = msgspec.json.decode(outcome.text)
            self._extras.setdefault(index, {})[name] = value
        elif outcome.kind == "timeout":
            self.fail(index, f"no answer within {self._options.timeout_s:g} s")
        elif outcome.kind == "unscored":
            self.fail(index, outcome.text or "no verdict")
        elif outcome.kind == "invalid":
            raise RewardError(
                f"reward {self.ref} returned {outcome.text} for {self._shown(index)}\n"
                f"a reward must be a finite number, or None where it does not apply"
            )
        elif outcome.kind == "miscounted":
            raise RewardError(
                f"reward {self.ref} returned {outcome.text} for a list of samples: "
                f"it must return a list with one reward for each completion"
            )
        elif outcome.kind == "unusable":
            raise RewardError(f"reward {self.ref} cannot be loaded:\n{outcome.text}")
        else:
            raise RewardError(f"reward {self.ref} raised on {self._shown(index)}\n{outcome.text}")

    def fail(self, index: int, cause: str) -> None:
        """Count a lost sample. Raises RewardError as soon as too many are lost."""
        self._false_starts = 0
        self._failures.append(Failure(index, self.samples[index].row, cause))
        if len(self._failures) > self._allowed:
            share = self._options.max_failed_share
            causes = "\n".join(f"row {f.row}: {f.cause}" for f in self._failures[:5])
            raise RewardError(
                f"reward {self.ref} failed on {len(self._failures)} of {len(self.samples)} samples "
                f"of this rank, more than --reward.max-failed-share {share:g} allows:\n{causes}\n"
                f"last: {self._shown(index)}\n"
                f"a slow reward needs a longer --reward.timeout-s (now "
                f"{self._options.timeout_s:g} s)"
            )

    def return_work(self, indices: Sequence[int]) -> None:
        self._waiting.extendleft(reversed(indices))

    def return_alone(self, indices: Sequence[int]) -> None:
        """Nobody knows which sample of a concurrent chunk is at fault: try them one by one."""
        self._alone.extend(indices)

    def return_unstarted(self, indices: Sequence[int], cause: str) -> None:
        self._false_starts += 1
        if self._false_starts == 3:
            raise RewardError(f"reward {self.ref}: three reward processes failed to start: {cause}")
        if len(indices) == 1:
            self._alone.extendleft(indices)
        else:
            self.return_work(indices)

    def result(self) -> Graded:
        failures = sorted(self._failures, key=lambda failure: failure.index)
        return Graded(self._scores, failures, self._metrics, self._extras)

    def _shown(self, index: int) -> str:
        sample = self.samples[index]
        return (
            f"sample {index} (row {sample.row}): "
            f"prompt {_clip(sample.prompt)}, response {_clip(sample.response)}"
        )


def _watch(selector: selectors.BaseSelector, busy: Sequence[Child]) -> None:
    """Keep exactly the busy processes registered."""
    if [key.data for key in selector.get_map().values()] == busy:
        return
    for key in list(selector.get_map().values()):
        if key.data not in busy:
            selector.unregister(key.fileobj)
    known = {key.data for key in selector.get_map().values()}
    for child in busy:
        if child not in known:
            selector.register(child.socket, selectors.EVENT_READ, child)


def _clip(text: str) -> str:
    return repr(text if len(text) <= 160 else f"{text[:80]} ... {text[-75:]}")
