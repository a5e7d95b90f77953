"""Examples: the rows of supervised training on the controller, which knows them by number only."""

import copy
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fsdprl.batch import Batch, Lease
from fsdprl.controller import current
from fsdprl.data import order
from fsdprl.data.chat import text_or_file
from fsdprl.data.example_rows import ExampleFormat
from fsdprl.data.feed import owners
from fsdprl.data.preference_rows import PreferenceFormat
from fsdprl.data.row_tokens import TokenRow
from fsdprl.data.rows import fingerprint
from fsdprl.data.sources import open_source
from fsdprl.errors import UserError

_log = logging.getLogger(__name__)


class Examples:
    """Which rows a step trains on: a pure function of (seed, step). Tokens are made on the ranks.

    The controller reads and checks every row once. Each rank then opens the same source, with
    `form` sent as plain values, measures its share of the rows, and `measured` drops what is too
    long or teaches nothing: `Examples(form).measure()`.

    Attributes: `form`, what the ranks need; `source`, the rows as the ranks read them; `seed`;
    `counts`, rows read and dropped by reason;
    `tokens`, int32 [rows of the file] once measured, else None.
    """

    def __init__(
        self,
        form: ExampleFormat | PreferenceFormat,
        *,
        seed: int = 0,
        workers: int = 0,
        flag: str = "--data",
    ) -> None:
        """workers: processes of each rank that make the rows of the steps to come (0: made when they are needed).

        Raises UserError with file:line, field and value for the first row that is no example.
        """
        if workers < 0:
            raise UserError(f"--data-workers {workers} must be at least 0")
        self.form = dataclasses.replace(
            form,
            system=text_or_file(form.system, "--system") if form.system else "",
            fingerprint=fingerprint(form.path),
        )
        self.seed, self.workers, self._flag = seed, workers, flag
        self.source = open_source(self.form, flag=flag)
        for index in range(len(self.source)):
            self.source.check(index)
        self._kept = np.arange(len(self.source), dtype=np.int64)
        self.counts = {"rows": len(self.source), "too_long": 0, "nothing_to_learn": 0}
        self.tokens: npt.NDArray[np.int32] | None = None
        self._course = ""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The rows in use, in the order of the file."""
        return self._kept

    def at(self, step: int, count: int) -> npt.NDArray[np.int64]:
        """Rows [count] of a step when every step takes `count`; passes are reshuffled."""
        return self.take(step * count, count)

    def take(self, cursor: int, count: int) -> npt.NDArray[np.int64]:
        """Rows [count] after the first `cursor` ones: a pure function of (seed, cursor)."""
        return self._kept[order.window(len(self), self.seed, cursor, count)]

    def first(self, count: int) -> npt.NDArray[np.int64]:
        """The first rows in the order of the file, at most `count`."""
        return self._kept[:count]

    def split(self, share: float) -> tuple["Examples", "Examples"]:
        """(to train on, held out), drawn by seed alone. Raises UserError for an impossible share."""
        try:
            parts = order.split(self._kept, share, self.seed)
        except ValueError as error:
            raise UserError(f"--eval-share: {error}") from None
        train, held_out = copy.copy(self), copy.copy(self)
        train._kept, held_out._kept = parts
        return train, held_out

    def measured(
        self, tokens: npt.NDArray[np.int32], loss_tokens: npt.NDArray[np.int32]
    ) -> "Examples":
        """These examples without the rows that cannot be used; counted and warned of once.

        tokens, loss_tokens: of every row of the file, as `ExampleRows.measure` gives them.
        Raises UserError naming --max-length and --over-length for too long rows under the policy
        `error`, and if no row is left.
        """
        limit = self.form.max_length
        used = np.zeros(len(self.source), dtype=bool)
        used[self._kept] = True
        long = (tokens > limit) & used
        if long.any() and self.form.over_length == "error":
            worst = int(np.argmax(np.where(long, tokens, 0)))
            raise UserError(
                f"{self._flag} {self.form.path}: {long.sum()} of {used.sum()} rows are longer than "
                f"--max-length {limit} tokens (longest: {tokens[worst]}, "
                f"{self.source.where(worst)}): raise it, or choose --over-length drop, truncate or truncate_left"
            )
        if self.form.over_length.startswith("truncate"):
            long[:] = False
        empty = (loss_tokens == 0) & used & ~long
        kept = copy.copy(self)
        kept.tokens = tokens
        kept.counts = {
            "rows": int(used.sum()),
            "too_long": int(long.sum()),
            "nothing_to_learn": int(empty.sum()),
        }
        kept._kept = np.flatnonzero(used & ~long & ~empty).astype(np.int64)
        text = (
            f"{self._flag} {self.form.path}: of {used.sum()} rows {long.sum()} are longer than "
            f"--max-length {limit} tokens and {empty.sum()} have nothing to learn within it"
        )
        if not len(kept):
            raise UserError(f"{text}: no row is left")
        if long.any() or empty.any():
            _log.warning("%s: dropped", text)
        return kept

    def measure(self) -> "Examples":
        """Open the file on every rank, have the ranks measure all rows, and drop what cannot be used.

        The numbers are in `counts`. In a dry run only the first rows are measured, here.
        """
        controller = current()
        if controller.flags.dry_run:
            return self
        payload = {"name": self.name, "form": dataclasses.asdict(self.form), "flag": self._flag}
        controller.call("examples.open", payload, phase="load").wait()
        shares = np.array_split(np.arange(len(self.source)), controller.world_size)
        payloads = [{"name": self.name, "indices": torch.from_numpy(share)} for share in shares]
        replies = controller.call("examples.measure", payloads, phase="load").wait()
        tokens = torch.cat([reply["tokens"] for reply in replies])
        loss_tokens = torch.cat([reply["loss_tokens"] for reply in replies])
        return self.measured(tokens.numpy(), loss_tokens.numpy())

    @property
    def name(self) -> str:
        """How the ranks call the opened file."""
        return f"{self._flag} {self.form.path}"

    def batch(self, step: int, count: int) -> Batch:
        """The rows of a step, resident and spread evenly over the ranks by tokens."""
        batch = self.load(self.at(step, count), fed=self.feed(self._kept, step, count))
        current().timeline.count("tokens", float(batch["tokens"].sum()))
        return batch

    def load(
        self,
        indices: npt.NDArray[np.int64] | Sequence[int],
        *,
        units: Sequence[int] | None = None,
        answers: npt.NDArray[np.int64] | None = None,
        fed: dict[str, Any] | None = None,
    ) -> Batch:
        """These rows of the file (`Prompt.index`) as a batch, in this order. Each rank tokenises its own.

        units: rows with the same number go to one rank. answers: rows whose completions stand behind
        these rows' prompts (PreferenceRows). fed: from `feed`, if these are the rows of a step.
        """
        controller = current()
        indices = np.asarray(indices, dtype=np.int64)
        Lease.flush()
        assert self.tokens is not None, "measure() first"
        units = range(len(indices)) if units is None else units
        lease = Lease(torch.tensor(owners(indices, self.tokens, units, controller.world_size)))
        positions = [
            (lease.ranks == rank).nonzero().flatten() for rank in range(controller.world_size)
        ]
        rows = torch.from_numpy(indices)
        payloads: list[dict[str, Any]] = [
            {"name": self.name, "indices": rows[where], "row_ids": lease.row_ids[where]}
            for where in positions
        ]
        for payload in payloads if fed else []:
            payload["fed"] = fed
        if answers is not None:
            for payload, where in zip(payloads, positions, strict=True):
                payload["answers"] = torch.from_numpy(answers)[where]
        replies = controller.call("examples.load", payloads, phase="data").wait()
        columns = {"example": rows}
        for name in ("tokens", "loss_tokens"):
            columns[name] = torch.zeros(len(rows), dtype=torch.int64)
            for where, reply in zip(positions, replies, strict=True):
                columns[name][where] = reply[name]
        return Batch.of(lease, columns)

    def feed(
        self, kept: npt.NDArray[np.int64], step: int, count: int, *, per: int = 1
    ) -> dict[str, Any] | None:
        """Have the ranks' data processes follow a course (once), and say where in it a step stands.

        kept, per: the units of a step and how many rows each has (`data.feed.Course`). None without processes.
        """
        if not self.workers:
            return None
        assert self.tokens is not None, "measure() first"
        course = f"{self.name} {count} {per}"
        if course != self._course:
            payload = {
                "name": self.name,
                "course": course,
                "form": dataclasses.asdict(self.form),
                "flag": self._flag,
                "kept": torch.from_numpy(np.asarray(kept)),
                "tokens": torch.from_numpy(np.asarray(self.tokens)),
                "seed": self.seed,
                "count": count,
                "per": per,
                "workers": self.workers,
                "step": step,
            }
            current().call("examples.feed", payload, phase="load").wait()
            self._course = course
        return {"course": course, "step": step}

    def preview(self, index: int) -> TokenRow:
        """One row's tokens, made here, for people to read."""
        return self.source.rows([index])[0]
