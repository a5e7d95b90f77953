"""What else the machine does while a trial runs: seconds of a quiet machine are not those of a busy one."""

import os
import threading
import time
from collections import deque
from functools import cache
from pathlib import Path

CPUS = os.cpu_count() or 1
SHARED = 1.5
"""Two processes on the two threads of one core each take this much longer than on a core of their own."""
_samples: deque[tuple[float, int]] = deque(maxlen=4000)


@cache
def watch() -> None:
    """Count what wants to run, from now on, twice a second."""

    def sample() -> None:
        while True:
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
            _samples.append((time.time(), int(running) - 1))  # not this one
            time.sleep(0.5)

    threading.Thread(target=sample, daemon=True).start()


def factor(since: float, own: int) -> float:
    """How much longer work of `own` processes takes than alone, on the mean since then: 1 where nothing else ran."""
    seen = [running for at, running in list(_samples) if at >= since]
    others = max(0.0, sum(seen) / len(seen) - min(own, CPUS)) if seen else 0.0
    return 1.0 + SHARED * others / CPUS
