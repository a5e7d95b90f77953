"""Rows of a dataset: a file, a folder of files, or a hub name, each row with its place."""

import bisect
import difflib
import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fsdprl.data import order
from fsdprl.data.csv_rows import CsvRows
from fsdprl.data.json_rows import JsonLines, open_json
from fsdprl.data.mixture import Mixture, read_sets
from fsdprl.data.places import EXTENSIONS, JSON_LINES, SEPARATED, TABLES, TEXTS, absent, subset_of
from fsdprl.data.text_rows import TextRows
from fsdprl.errors import UserError


class Rows(Protocol):
    """A sequence of rows; reading a broken one raises UserError with its place."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    def where(self, index: int) -> str:
        """The row's place for messages: file:line, or file and row number."""
        ...


def open_rows(path: str, *, flag: str = "--data") -> Rows:
    """The rows of a .jsonl, .json, .csv, .tsv, .parquet, .arrow or .txt file, of all files of a folder's
    most frequent such kind in name order, of a folder made by `save_to_disk`, of a hub dataset, or of the sets that
    a .toml file lists (mixture.py).

    A hub name is `owner/name`, `owner/name:config` or either with `@split` (default train). `#n` at the end takes n
    rows, drawn by a fixed seed, in the order of the file. Parquet, arrow and hub datasets are read by `datasets`,
    which caches what it converts. Raises UserError naming `flag` and the path if there is nothing to read.
    """
    path, some = subset_of(path)
    if some is not None:
        return Subset(open_rows(path, flag=flag), some, f"{flag} {path}")
    place = Path(path).expanduser()
    if place.is_file() and place.suffix.lower() == ".toml":
        sets = read_sets(place, flag)
        rows: Rows = Mixture([open_rows(one.path, flag=flag) for one in sets], sets)
    elif place.is_file():
        rows = _open_file(place, flag)
    elif (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file():
        rows = _saved(place, flag)
    elif place.is_dir():
        rows = Joined([_open_file(file, flag) for file in _files_of(place, flag)])
    else:
        rows = _hub(path, flag)
    if not len(rows):
        raise UserError(f"{flag} {path}: no rows in it")
    return rows


def fingerprint(path: str) -> str:
    """A short digest of a file's or folder's size and content, to see whether ranks read the same.

    Up to 64 MiB every byte counts; of a larger file 64 blocks of 1 MiB, evenly spread. A hub name
    is its own fingerprint.
    """
    name, some = subset_of(path)
    place = Path(name).expanduser()
    if not place.exists():
        return path
    digest = hashlib.blake2b(b"" if some is None else f"#{some}".encode(), digest_size=16)
    if place.is_file() and place.suffix.lower() == ".toml":
        for one in read_sets(place, "--data"):
            digest.update(fingerprint(one.path).encode())
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name if place.is_dir() else ''} {size}\n".encode())
            step = max(1 << 20, size // 64)
            with file.open("rb") as opened:
                for start in range(0, size, step):
                    opened.seek(start)
                    digest.update(opened.read(1 << 20))
    return digest.hexdigest()


def field(row: dict[str, Any], key: str, where: str, flag: str) -> Any:
    """row[key]; `a.b` also reaches into an object. Raises UserError if it is missing or null."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            known = ", ".join(row) or "no fields"
            near = difflib.get_close_matches(key, row, n=1, cutoff=0.5)
            hint = f"; did you mean {flag} {near[0]}?" if near else f"; name one with {flag}"
            raise UserError(f"{where}: no field {key!r}; the row has {known}{hint}")
        value = value[part]
    if value is None:
        raise UserError(f"{where}: field {key!r} is null")
    return value


class Table:
    """Rows of a `datasets.Dataset`, memory-mapped."""

    def __init__(self, dataset: Any, source: str) -> None:
        self._dataset, self._source = dataset, source

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._dataset[index]

    def where(self, index: int) -> str:
        return f"{self._source} row {index + 1}"


class Subset:
    """n rows of others, drawn by a fixed seed, in their order. UserError where there are fewer."""

    def __init__(self, rows: Rows, count: int, what: str) -> None:
        if not 0 < count <= len(rows):
            raise UserError(f"{what}#{count}: it has {len(rows)} rows")
        self._rows = rows
        self._taken = np.sort(order.permutation(len(rows), 0, 0)[:count])

    def __len__(self) -> int:
        return len(self._taken)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[int(self._taken[index])]

    def where(self, index: int) -> str:
        return self._rows.where(int(self._taken[index]))


class Joined:
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, inner = self._locate(index)
        return part[inner]

    def where(self, index: int) -> str:
        part, inner = self._locate(index)
        return part.where(inner)

    def _locate(self, index: int) -> tuple[Rows, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def _open_file(path: Path, flag: str) -> Rows:
    kind = path.suffix.lower()
    if path.stat().st_size == 0:
        raise UserError(f"{flag} {path}: the file is empty")
    if kind in JSON_LINES:
        return JsonLines(path)
    if kind == ".json":
        return open_json(path)
    if kind in SEPARATED:
        return CsvRows(path)
    if kind in TEXTS:
        return TextRows(path)
    if kind not in TABLES:
        raise UserError(f"{flag} {path}: unknown kind of file; known are {', '.join(EXTENSIONS)}")

    def load(datasets: Any) -> Any:
        return datasets.load_dataset(kind[1:], data_files=str(path), split="train")

    return Table(_loaded(load, f"{flag} {path}"), str(path))


def _saved(path: Path, flag: str) -> Rows:
    def load(datasets: Any) -> Any:
        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, dict):
            if "train" not in loaded:
                raise ValueError(f"no split train; name one of the folders {', '.join(loaded)}")
            loaded = loaded["train"]
        return loaded

    return Table(_loaded(load, f"{flag} {path}"), str(path))


def _hub(path: str, flag: str) -> Rows:
    name, _, part = path.partition("@")
    name, _, config = name.partition(":")
    if said := absent(path, flag):
        raise UserError(said)

    def load(datasets: Any) -> Any:
        return datasets.load_dataset(name, config or None, split=part or "train")

    what = f"{flag} {path}: neither a file nor a hub dataset that can be reached"
    return Table(_loaded(load, what), path)


def _loaded(load: Callable[[Any], Any], what: str) -> Any:
    """load(datasets), with any failure in one line: its errors span screens and name no file."""
    import datasets  # a second to import: only tables and hub names need it

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        return load(datasets)
    except Exception as error:
        cause = error.__cause__ or error
        lines = [line for line in str(cause).splitlines() if line.strip()]
        reason = lines[0] if lines else type(cause).__name__
        raise UserError(f"{what}: {reason}") from error


def _files_of(folder: Path, flag: str) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in EXTENSIONS)
    if not files:
        raise UserError(f"{flag} {folder}: no {', '.join(EXTENSIONS)} file in this folder")
    kind = Counter(file.suffix.lower() for file in files).most_common(1)[0][0]
    return [file for file in files if file.suffix.lower() == kind]
