"""Worker verbs of --run.profile: a torch profiler trace of a window of steps."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

from fsdprl.ferry import deliver
from fsdprl.worker import Worker


def start(worker: Worker) -> None:
    """Trace this rank's serving thread from here on."""
    worker.state["profiler"] = profiler = profile()
    profiler.__enter__()


def stop(worker: Worker, *, out: str) -> None:
    """End the trace and write it as rank-00000.json, which chrome://tracing and Perfetto read."""
    profiler = worker.state.pop("profiler")
    profiler.__exit__(None, None, None)
    name = f"rank-{worker.world.rank:05d}.json"
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(Path(folder) / name))
        deliver(worker, Path(out) / name, (Path(folder) / name).read_bytes())


VERBS: dict[str, Callable[..., Any]] = {"profile_start": start, "profile_stop": stop}
