"""Rows of the steps to come, made ahead of time in processes of their own (torchdata's StatefulDataLoader).

What a rank reads in a step is a pure function of (seed, step): so is the order that comes out, whatever the number of
processes, and the whole state of a loader is the step it stands at. A resumed run opens it there.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdprl.data import order
from fsdprl.data.processes import data_processes
from fsdprl.data.row_tokens import TokenRow
from fsdprl.data.sources import format_of, open_source
from fsdprl.errors import UserError
from fsdprl.packing import balance

AHEAD = 2
"""Steps that each process makes ahead."""


@dataclass(frozen=True)
class Course:
    """Which rows every step takes, and which rank each of them goes to."""

    kept: npt.NDArray[np.int64]
    """Numbers of the units in use: rows, or pairs of them."""
    tokens: npt.NDArray[np.int32]
    """Of every row of the file."""
    seed: int
    count: int
    """Units of a step."""
    per: int = 1
    """Rows of a unit: unit u is rows u * per and following."""

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        """The rows of a step, in order."""
        units = self.kept[order.window(len(self.kept), self.seed, step * self.count, self.count)]
        return (units[:, None] * self.per + np.arange(self.per)).reshape(-1)

    def of_rank(self, step: int, rank: int, ranks: int) -> list[int]:
        """Those of one rank, in order."""
        rows = self.rows(step)
        to = owners(rows, self.tokens, np.arange(len(rows)) // self.per, ranks)
        return [row for row, owner in zip(rows.tolist(), to, strict=True) if owner == rank]


def owners(
    rows: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    units: Sequence[int] | Any,
    ranks: int,
) -> list[int]:
    """The rank of each row: even in tokens, units whole."""
    return balance(tokens[rows].tolist(), list(map(int, units)), ranks)


class Steps:
    """A batch sampler without end: each step's rows of one rank. Its state is the step."""

    def __init__(self, course: Course, rank: int, ranks: int) -> None:
        self.course, self.rank, self.ranks, self.step = course, rank, ranks, 0

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            self.step += 1
            yield self.course.of_rank(self.step - 1, self.rank, self.ranks)

    def state_dict(self) -> dict[str, int]:
        """The step that comes next."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a step."""
        self.step = state["step"]


class Source:
    """The rows of a file as a dataset; each process opens the file for itself."""

    def __init__(self, form: dict[str, Any], flag: str) -> None:
        self.form, self.flag, self.opened = form, flag, None

    def __getitems__(self, indices: list[int]) -> list[tuple[int, TokenRow]]:
        if self.opened is None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is one of many
            self.opened = open_source(format_of(self.form), flag=self.flag)
        return list(zip(indices, self.opened.rows(indices), strict=True)) if indices else []

    def __getitem__(self, index: int) -> tuple[int, TokenRow]:
        return self.__getitems__([index])[0]


class Feed:
    """One rank's rows, step after step."""

    def __init__(
        self,
        form: dict[str, Any],
        course: Course,
        *,
        rank: int,
        ranks: int,
        workers: int,
        flag: str,
        step: int,
    ) -> None:
        """workers: processes, at least 1. step: the first one to come. Raises UserError without torchdata."""
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader  # seconds to import
        except ImportError:
            raise UserError("--data-workers needs torchdata: pip install torchdata") from None
        steps = Steps(course, rank, ranks)
        steps.load_state_dict({"step": step})
        self.step = step
        self.loader: Any = StatefulDataLoader(
            Source(form, flag),  # pyright: ignore[reportArgumentType]
            batch_sampler=steps,  # pyright: ignore[reportArgumentType]
            num_workers=workers,
            prefetch_factor=AHEAD,
            collate_fn=_as_it_is,
            multiprocessing_context=data_processes(),
        )
        self._batches = iter(self.loader)

    def take(self, step: int) -> list[tuple[int, TokenRow]]:
        """(number, tokens) of each row of the next step, which must be this one."""
        if step != self.step:
            raise ValueError(f"the feed stands at step {self.step}, not {step}")
        self.step += 1
        return next(self._batches)


def _as_it_is(batch: list[Any]) -> list[Any]:
    return batch
