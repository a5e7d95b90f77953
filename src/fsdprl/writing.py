"""Worker verbs over checkpoints: this rank's bytes of a model, written at once or behind the training's back.

A model is copied to host memory, and a thread of this rank alone writes and hashes the copy: no collective runs, and
nothing but this rank's own bytes is touched. The controller asks every rank whether it has finished, and only then
makes the checkpoint count.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fsdprl import ferry
from fsdprl.checkpoint_save import (
    narrowed_tensors,
    save_plan,
    stream_snapshot,
    take_snapshot,
    tensors_plan,
    write_snapshot,
)
from fsdprl.safetensors_file import Tally
from fsdprl.worker import Worker

Write = Callable[[Path, Callable[[], None]], dict[str, Tally]]
LOOK_S = 0.2
"""Between two looks at a thread that is waited for."""


class Writing:
    """One model's files being written by this rank."""

    def __init__(self, jobs: Sequence[tuple[Write, Path]], trip: ferry.Trip | None = None) -> None:
        """trip: where hosts share no disk, what goes to rank 0, or comes there."""
        self.files: dict[str, list[dict[str, Any]]] = {}
        self.error: Exception | None = None
        self.pieces = 0
        self.told = False
        """Whether a poll has said how it went."""
        self.thread: threading.Thread | None = None
        self._jobs, self._trip = list(jobs), trip

    def run(self) -> None:
        """Write everything, one job after the other, and let go of its memory."""
        try:
            while self._jobs:
                write, folder = self._jobs.pop(0)
                self._note(write(folder, self._moved))
        except Exception as error:
            self.error = error
            self._jobs.clear()
        try:
            if self._trip:  # after a failure, too: the other side waits
                self._note(self._trip.finish(self._moved))
        except Exception as error:
            self.error = self.error or error

    def start(self) -> None:
        """Write in a thread."""
        self.thread = threading.Thread(target=self.run, name="saving", daemon=True)
        self.thread.start()

    def wait(self, progress: Callable[[], None]) -> None:
        """Until it has finished; a disk that takes no more bytes is no progress."""
        seen = -1
        while self.going:
            if self.pieces != seen:
                seen = self.pieces
                progress()
            assert self.thread
            self.thread.join(LOOK_S)

    @property
    def going(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def _note(self, tallies: Mapping[str, Tally]) -> None:
        for path, tally in tallies.items():
            self.files.setdefault(path, []).extend(tally.facts())

    def _moved(self) -> None:
        self.pieces += 1


def save(worker: Worker, *, model: str, out: str, background: bool) -> None:
    """Write this rank's bytes of the Hugging Face checkpoint and, in trainer/, of what training needs besides.

    trainer/ holds the optimizer's tensors, and the float32 masters where the model files are narrower.
    background: return when they are copied. `poll` says how it went.
    """
    m, folder = worker.models[model], Path(out)
    plan = save_plan(m.network, m.path)
    parts: list[tuple[Any, Any, Path]] = [(m.network, plan, folder)]
    if m.optimizer is not None:
        state = m.optimizer.state_tensors()
        parts.append((state, tensors_plan(state), folder / "trainer"))
    if masters := narrowed_tensors(m.network, plan):
        parts.append((masters, tensors_plan(masters, stem="masters"), folder / "trainer"))
    trip = ferry.begin(worker)
    put: dict[str, Any] = {"put": trip.write} if trip and trip.away else {}
    if background:
        jobs = [(partial(write_snapshot, take_snapshot(w, how), **put), to) for w, how, to in parts]
        writing = Writing(jobs, trip)
        writing.start()
    else:
        writing = Writing(
            [(partial(stream_snapshot, w, how, **put), to) for w, how, to in parts], trip
        )
        writing.run()
    known: list[Writing] = worker.state.get("writings", [])
    worker.state["writings"] = [*(each for each in known if not each.told), writing]
    worker.progress()


def poll(worker: Worker, *, wait: bool) -> dict[str, Any]:
    """Whether this rank has written all that it was told to.

    done: and if so, files: path -> byte ranges and their sha256; error: errno, text and file of what the disk
    refused, or None. Raises what else went wrong. The answer stays the same until the next save: a signal may have
    kept the controller from hearing it.
    """
    writings: list[Writing] = worker.state.get("writings", [])
    if wait:
        for writing in writings:
            writing.wait(worker.progress)
    if any(writing.going for writing in writings):
        return {"done": False}
    files: dict[str, list[dict[str, Any]]] = {}
    refused = None
    for writing in writings:
        writing.told = True
        files |= writing.files
        if isinstance(writing.error, OSError):
            error = writing.error
            refused = [error.errno or 0, error.strerror or str(error), error.filename]
        elif writing.error is not None:
            raise writing.error
    return {"done": True, "files": files, "error": refused}


VERBS: dict[str, Callable[..., Any]] = {"model.save": save, "saves.poll": poll}
