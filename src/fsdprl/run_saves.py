"""Checkpoints as they come to be: copied when a step ends, written meanwhile, and counted when all is on the disk.

    begin: what is tracked is copied (stalls training for that long), and every rank writes its bytes in a thread
    record: the step's line of metrics.jsonl is on the disk, so that a run resumed from here misses none
    poll: when every rank has finished, the manifest is written, the folder renamed and `latest` moved

Until then the folder does not count, and the checkpoint before it is the newest. One is written at a time.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdprl.controller import current
from fsdprl.errors import UserError
from fsdprl.manifest import seal
from fsdprl.records import Patience, write_atomic
from fsdprl.run_checkpoints import Checkpoints, Tracked, folder_name

POLL_S = 0.05
"""Least time between two questions to the ranks whether they have finished."""


@dataclass
class Pending:
    """A checkpoint that does not count yet."""

    part: Path
    done: int
    """Optimised steps."""
    recorded: bool = False


@dataclass(frozen=True)
class Written:
    """What the ranks say when all have finished."""

    files: dict[str, list[dict[str, Any]]]
    """Path -> byte ranges and sha256 of each rank that wrote into it."""
    error: OSError | None


def collect(*, wait: bool) -> Written | None:
    """Ask all ranks how their writing went; None: not finished."""
    replies = current().call("saves.poll", {"wait": wait}, phase="save").wait()
    if not all(reply["done"] for reply in replies):
        return None
    files: dict[str, list[dict[str, Any]]] = {}
    error = None
    for rank, reply in enumerate(replies):
        for path, parts in reply["files"].items():
            files.setdefault(path, []).extend(parts)
        if reply["error"] and error is None:
            number, text, name = reply["error"]
            error = OSError(number, f"{text} (rank {rank})", name)
    return Written(files, error)


class Best:
    """Which step's weights had the best value of a metric: --run.keep-best NAME, NAME:min or NAME:max.

    Step s of metrics.jsonl is measured with the weights of checkpoint s. Only steps at which a checkpoint is due
    count, whether a run was interrupted or not. Nothing is saved: the lines of metrics.jsonl tell it again.
    """

    def __init__(self, wish: str, save_every: int) -> None:
        """UserError for an empty name. Without :min or :max, names that end in loss are better when low."""
        self.name, _, how = (
            wish.rpartition(":") if wish.endswith((":min", ":max")) else (wish, "", "")
        )
        if wish and not self.name:
            raise UserError(f"--run.keep-best {wish}: name a metric, such as eval/reward")
        self.sign = -1.0 if how == "min" or (not how and wish.endswith("loss")) else 1.0
        self.every = save_every
        self.step: int | None = None
        self.value = 0.0

    def note(self, step: int, metrics: Mapping[str, Any], *, last: bool) -> bool:
        """Whether the weights of this step are the best so far; last: they are the run's last ones."""
        value = metrics.get(self.name)
        due = last or (self.every > 0 and step % self.every == 0)
        if not self.name or value is None or not due or not step:
            return False
        if self.step is not None and self.sign * (value - self.value) <= 0:
            return False
        self.step, self.value = step, value
        return True


class Saves:
    """The checkpoints that a run writes."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        tracked: Tracked,
        warn: Callable[[str], None],
        *,
        keep: int,
        best: Best,
        texts: Mapping[str, str],
    ) -> None:
        """keep: as --run.keep. texts: files of every checkpoint that take the place of the model's own, such as the
        chat template that it was trained with."""
        self.checkpoints, self.tracked, self.keep, self.best = checkpoints, tracked, keep, best
        self.texts = texts
        self.owed = False
        """A checkpoint could not be written: the next step's end tries again."""
        self._pending: Pending | None = None
        self._behind = False
        """`best` could not be moved yet."""
        self._warn, self._patience = warn, Patience("saving a checkpoint", warn)
        self._next = 0.0
        self.committed: Callable[[], object] = lambda: None
        """Called after each checkpoint that counts."""

    def begin(self, done: int, *, background: bool, remembered: bool = False) -> bool:
        """Copy everything tracked after `done` steps, and have it written; whether it began.

        background: else all is written on return. remembered: small states as of Tracked.remember(). Waits for the
        checkpoint before it. UserError after three failures in a row.
        """
        self.poll(wait=True)
        if self._pending and self.tracked.asks_ranks:
            collect(wait=True)  # a signal came before its line: its ranks may still write
        self._pending, self.owed = None, False
        try:
            self._check_room()
            part = self.checkpoints.begin(done)
            self._pending = Pending(part, done)
            self.tracked.save(part, done, remembered=remembered, background=background)
        except OSError as error:
            if self._pending and self.tracked.asks_ranks:
                collect(wait=True)  # what has begun must not write into the next one
            self._failed(error)
            return False
        return True

    def record(self, written: bool) -> None:
        """The step's metrics are on the disk, or not: then this checkpoint will not count."""
        if self._pending is None:
            return
        self._pending.recorded = True
        if written:
            self.poll()
            return
        if self.tracked.asks_ranks:
            collect(wait=True)
        self._pending, self.owed = None, True

    def poll(self, *, wait: bool = False) -> None:
        """Make the pending checkpoint count if all ranks have written it. UserError as `begin`."""
        pending, now = self._pending, time.monotonic()
        if pending is None or not pending.recorded or (now < self._next and not wait):
            return
        written = Written({}, None)
        if self.tracked.asks_ranks:
            if wait:
                with current().timeline.span("save"):
                    written = collect(wait=True)
            else:
                written = collect(wait=False)
        if written is None:
            self._next = time.monotonic() + POLL_S
            return
        try:
            if written.error:
                raise written.error
            # A signal's exception between two renames would leave `latest` behind.
            with current().whole():
                self._commit(pending, written.files)
        except OSError as error:
            self._failed(error)
            return
        self._pending = None
        self._patience.worked()
        if self._behind:
            self._point_best()
        self.committed()

    def _commit(self, pending: Pending, files: Mapping[str, list[dict[str, Any]]]) -> None:
        top = pending.part.resolve()
        parts = {str(Path(path).relative_to(top)): each for path, each in files.items()}
        for name, text in self.texts.items():
            write_atomic(pending.part / name, text)
            parts.pop(name, None)
        seal(pending.part, pending.done, parts)
        best = self.best.step
        keep = None if best is None else self.checkpoints.folder / folder_name(best)
        self.checkpoints.commit(pending.part, pending.done, self.keep, keep)

    def note(self, step: int, metrics: Mapping[str, Any], *, last: bool = False) -> None:
        """What was measured with the weights after `step` steps, of which there may be a checkpoint."""
        if not self.best.name:
            return
        if self._pending and self._pending.done == step:
            self.poll(wait=True)
        if self._note(step, metrics, last=last):
            self._point_best()

    def recall(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """What was measured before this process began, by the lines of metrics.jsonl.

        All of them first: a better one on the way must not cost the best one its folder.
        """
        for row in rows:
            self._note(row["step"], row, last=False)
        if self.best.step is not None:
            self._point_best()

    def _note(self, step: int, metrics: Mapping[str, Any], *, last: bool) -> bool:
        known = self.checkpoints.folder / folder_name(step)
        return known.is_dir() and self.best.note(step, metrics, last=last)

    def _point_best(self) -> None:
        assert self.best.step is not None
        best = self.checkpoints.folder / folder_name(self.best.step)
        self._behind = True
        try:
            with current().whole():
                self.checkpoints.point_best(best, self.keep)
                self._behind = False
        except OSError as error:  # it is kept all the same, see _commit
            self._warn(f"{best.with_name('best')}: {error.strerror or error}; trying again later")

    def _failed(self, error: OSError) -> None:
        self._pending, self.owed = None, True
        self._patience.failed(error)

    def _check_room(self) -> None:
        """OSError if there is less room than the last checkpoint took: found out before ranks write."""
        last = self.checkpoints.all()[-1:]
        need = sum(
            path.stat().st_size for _, top in last for path in top.rglob("*") if path.is_file()
        )
        self.checkpoints.folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.checkpoints.folder.parent).free < need:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {need / 1e9:.3g} GB")
