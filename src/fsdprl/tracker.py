"""wandb, trackio and tensorboard beside metrics.jsonl, each in a child process of its own.

Their failure, slowness or absence never touches training; metrics.jsonl is complete without them.
Run as `python -m fsdprl.tracker`, this module is that child.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from fsdprl.sidecar import Sidecar, messages

CLOSE_S = 30.0


class Trackers:
    """All trackers of a run behind one `log`. Never blocks, never raises."""

    def __init__(self, kinds: tuple[str, ...], folder: Path, warn: Callable[[str], None]) -> None:
        self._kinds, self._folder, self._warn = tuple(dict.fromkeys(kinds)), folder, warn
        self._sidecars: list[Sidecar] = []

    def start(self, config: Mapping[str, Any], run_id: str, first_step: int) -> None:
        """run_id: stays the same when a run is resumed. first_step: it and later ones are sent again."""
        for kind in self._kinds:
            log = self._folder / f"{kind}.log"
            remedy = f"Every metric is in {self._folder / 'metrics.jsonl'}; see {log}"
            sidecar = Sidecar(f"tracker {kind}", "fsdprl.tracker", log, self._warn, remedy)
            start = {"kind": kind, "folder": str(self._folder.resolve()), "config": dict(config)}
            sidecar.send(start | {"id": run_id, "first_step": first_step})
            self._sidecars.append(sidecar)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Numbers of one step; a None (NaN) is left out."""
        for sidecar in self._sidecars:
            sidecar.send({"step": step, "metrics": dict(metrics)})

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Give the trackers this long, in all, to send what they have; then end them."""
        deadline = time.monotonic() + timeout_s
        for sidecar in self._sidecars:
            sidecar.close(max(1.0, deadline - time.monotonic()))


# ---- in the child ----------------------------------------------------------------------------


class Sink(Protocol):
    """One open tracker."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class Wandb:
    """Weights & Biases; offline (for `wandb sync` later) where its server cannot be used from here."""

    def __init__(self, start: dict[str, Any]) -> None:
        wandb: Any = import_module("wandb")
        folder = Path(start["folder"])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fsdprl"),
            name=folder.name,
            id=start["id"],
            resume="allow",
            dir=str(folder),
            config=start["config"],
            mode=os.environ.get("WANDB_MODE") or wandb_mode(wandb),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_mode(wandb: Any) -> str:
    """online, if the server answers and there is a key for it."""
    if not reachable(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")):
        return "offline"
    try:
        return "online" if wandb.Api().api_key else "offline"
    except Exception:  # wandb raises several kinds, all of which mean: not from here
        return "offline"


def reachable(url: str, timeout_s: float = 3.0) -> bool:
    parts = urlparse(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout_s).close()
    except OSError:
        return False
    return True


class Trackio:
    """trackio: a local SQLite file and dashboard (`trackio show`)."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._trackio: Any = import_module("trackio")
        name = f"{Path(start['folder']).name}-{start['id']}"
        self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "fsdprl"),
            name=name,
            config=start["config"],
            resume="allow",
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(metrics, step=step)

    def close(self) -> None:
        self._trackio.finish()


class Tensorboard:
    """Event files in <run>/tensorboard, written without TensorFlow or torch."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._event: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(Path(start["folder"]) / "tensorboard"))
        if start["first_step"]:
            # Tells TensorBoard to forget what an earlier process wrote from this step on.
            again = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(self._event.Event(step=start["first_step"], session_log=again))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
        ]
        self._add(self._event.Event(step=step, summary=self._summary.Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)


SINKS: dict[str, Callable[[dict[str, Any]], Sink]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": Tensorboard,
}


def main() -> None:
    """Open the tracker named by the first message and log every message after it."""
    received = messages()
    start = next(received, None)
    if start is None:
        return
    try:
        sink = SINKS[start["kind"]](start)
    except ImportError:
        sys.exit(f"{start['kind']} is not installed: pip install 'fsdprl[{start['kind']}]'")
    for message in received:
        sink.log(message["step"], {k: v for k, v in message["metrics"].items() if v is not None})
    sink.close()


if __name__ == "__main__":
    main()
