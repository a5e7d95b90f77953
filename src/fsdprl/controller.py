"""What rank 0's main thread holds: verbs to sets of ranks, and how long things took."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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

    def drain(self) -> tuple[list[Span], dict[str, float]]:
        """All spans and counters since the last drain, in the order they ended."""
        with self._lock:
            spans, self._spans = self._spans, []
            counts, self._counts = self._counts, {}
        return spans, counts
