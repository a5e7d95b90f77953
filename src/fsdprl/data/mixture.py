"""Several data sets as one: a TOML file that lists them, with weights, keys and rewards of their own.

[[set]]
path = "gsm8k_train.jsonl#2000"     # a file, a folder or a hub name; from the TOML file's folder if relative
name = "gsm8k"                      # in metrics (default: the file's name)
weight = 0.7                        # share of the rows; no weights: every row once
rewards = ["numeric"]               # of --rewards, those that count for these rows (default: all)
handler = "math"                    # how rows are read (default: by their columns)
keys = {prompt = "question"}        # columns that the handler shall read
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdprl.data import order
from fsdprl.data.handlers import HANDLERS, Handled, Purpose, adapted
from fsdprl.errors import UserError

if TYPE_CHECKING:
    from fsdprl.data.rows import Rows

REWARDS = "_rewards"
"""Column that names the rewards which count for a row."""
SOURCES = ("data_source", "source", "dataset")
"""Columns that say where a row comes from."""


@dataclass(frozen=True)
class DataSet:
    """One `[[set]]` of the file."""

    path: str
    name: str = ""
    weight: float | None = None
    rewards: list[str] = field(default_factory=list)
    handler: str = ""
    keys: dict[str, str] = field(default_factory=dict)


def read_sets(path: Path, flag: str) -> list[DataSet]:
    """The sets that a TOML file lists. Raises UserError naming flag, file and what is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path}: {error}") from None
    listed = table.get("set")
    if not isinstance(listed, list) or not listed or set(table) != {"set"}:
        raise UserError(f"{flag} {path}: lists data sets, each under [[set]] with a path")
    sets = []
    for number, entry in enumerate(listed, 1):
        where = f"{flag} {path}: set {number}"
        kinds = {
            "path": str,
            "name": str,
            "weight": int | float,
            "rewards": list,
            "handler": str,
            "keys": dict,
        }
        for key, value in entry.items():
            if key not in kinds or isinstance(value, bool) or not isinstance(value, kinds[key]):
                raise UserError(f"{where}: {key} = {value!r}; known are {', '.join(kinds)}")
        if "path" not in entry:
            raise UserError(f"{where}: no path")
        if entry.get("handler", "math") not in HANDLERS:
            raise UserError(
                f"{where}: no handler {entry['handler']!r}; known are {', '.join(HANDLERS)}"
            )
        near = path.parent / entry["path"].partition("#")[0]
        local = str(path.parent / entry["path"]) if near.exists() else entry["path"]
        stem = Path(entry["path"].partition("#")[0]).stem
        sets.append(DataSet(**{"name": stem, **entry, "path": local}))
    weights = [one.weight for one in sets]
    if any(w is None for w in weights) != all(w is None for w in weights) or any(
        w is not None and w <= 0 for w in weights
    ):
        raise UserError(f"{flag} {path}: give every set a positive weight, or none")
    return sets


class Mixture:
    """Rows of several sets, in a fixed random order in which each set has its share.

    There are as many rows as the sets have together. A set whose share is more than its rows is gone through again,
    each time in another order; one whose share is less is read in part. Which rows is a pure function of the file.
    """

    def __init__(self, parts: Sequence["Rows"], sets: Sequence[DataSet]) -> None:
        self.parts, self.sets = list(parts), list(sets)
        sizes = [len(part) for part in parts]
        weights = np.array(
            [size if s.weight is None else s.weight for s, size in zip(sets, sizes, strict=True)]
        )
        ends = np.round(np.cumsum(weights / weights.sum()) * sum(sizes)).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        number = np.repeat(np.arange(len(sets)), counts)
        row = np.concatenate(
            [
                order.window(size, 0, 0, int(count))
                for size, count in zip(sizes, counts, strict=True)
            ]
        )
        if all(s.weight is None for s in sets):
            row = np.concatenate([np.arange(size) for size in sizes])
        self._number, self._row = number, row

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = int(self._number[index])
        made = dict(self.parts[number][int(self._row[index])])
        made["data_source"] = self.sets[number].name
        if self.sets[number].rewards:
            made[REWARDS] = list(self.sets[number].rewards)
        return made

    def where(self, index: int) -> str:
        return self.parts[int(self._number[index])].where(int(self._row[index]))


def read_as(rows: "Rows", purpose: Purpose) -> "Rows":
    """The rows with the columns that `purpose` needs; those of a mixture set by set."""
    if not isinstance(rows, Mixture):
        return adapted(rows, purpose)
    parts = [
        Handled(part, one.handler or "math", purpose, one.keys)
        if one.handler or one.keys
        else adapted(part, purpose)
        for part, one in zip(rows.parts, rows.sets, strict=True)
    ]
    return Mixture(parts, rows.sets)
