"""The safetensors file format: what a checkpoint holds, slices of it, and files written by ranges.

Reading goes through the safetensors library. Writing does not: the library writes whole files from
one process, and here every rank writes the byte ranges it owns of files laid out in advance.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdprl.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPE_OF = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}
WRITE_BYTES = 64 << 20


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint on disk."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face checkpoint folder, in the index's order.

    Raises UserError if there is neither model.safetensors nor an index, or a file of the index is
    missing.
    """
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return [folder / SINGLE]
        loose = sorted(file.name for file in folder.glob("*.safetensors"))
        why = f"{loose[0]} has no {INDEX} beside it" if loose else f"no {SINGLE} and no {INDEX}"
        raise UserError(
            f"{folder}: {why}; a checkpoint needs its complete set of safetensors files"
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: not a weight index ({error!r}); download it again") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{index} names {missing[0]}{more}, which is missing from the folder")
    return [folder / name for name in names]


def read_stored(files: Iterable[Path]) -> dict[str, Stored]:
    """Name -> tensor over these files, in the order of their bytes. Only headers are read.

    Raises UserError naming the file for a truncated or damaged one, and for a dtype unknown here
    (quantized weights, which cannot be trained).
    """
    stored = {}
    for file in files:
        with open_file(file) as handle:
            for name in handle.offset_keys():
                part = handle.get_slice(name)
                dtype = DTYPE_OF.get(part.get_dtype())
                if dtype is None:
                    raise UserError(
                        f"{file}: {name} has dtype {part.get_dtype()}: quantized weights cannot be "
                        f"trained; use the checkpoint in bfloat16"
                    )
                stored[name] = Stored(file, dtype, tuple(part.get_shape()))
    return stored


def open_file(file: Path) -> safe_open:
    """safe_open, whose errors name the file."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: truncated or damaged ({error}); download or save it again"
        ) from None


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a file being written, and which part of a parameter it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    param: str
    start: int
    """Position of its first element in the flattened parameter `param`."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """One file to be written: its header and where each entry's bytes go."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]
    offsets: tuple[int, ...]
    """Byte position of each entry in the file."""
    size: int

    @classmethod
    def of(cls, name: str, entries: Sequence[Entry]) -> "FileLayout":
        """The layout of `entries` in this order, with the header that the safetensors library writes."""
        table: dict = {"__metadata__": {"format": "pt"}}
        offsets, end = [], 0
        for entry in entries:
            offsets.append(end)
            end += entry.nbytes
            table[entry.name] = {
                "dtype": NAME_OF[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offsets[-1], end],
            }
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        data = tuple(len(header) + offset for offset in offsets)
        return cls(name, header, tuple(entries), data, len(header) + end)


def split_by_size(stem: str, entries: Sequence[Entry], max_bytes: int) -> list[FileLayout]:
    """Entries into files of at most `max_bytes` (a larger tensor alone), named as transformers does.

    Wide dtypes come first inside a file, so that every tensor starts at a multiple of its item size.
    """
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if parts[-1] and size + entry.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.nbytes
    names = [f"{stem}-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = [f"{stem}.safetensors"]
    return [
        FileLayout.of(name, sorted(part, key=lambda entry: -entry.dtype.itemsize))
        for name, part in zip(names, parts, strict=True)
    ]


PART_BYTES = 128 << 20
"""Bytes after which a new sha256 begins, so that several threads can verify one file."""


class Tally:
    """What one process has written into one file: its byte ranges, in the order of writing, and their sha256."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()
        self._left = 0

    def add(self, position: int, data: memoryview) -> None:
        """Bytes that stand at `position`; what continues the last range extends it."""
        while len(data):
            if self._left == 0:
                self.facts()  # closes the part that is full
                self._digest, self._left = hashlib.sha256(), PART_BYTES
                self._parts.append({"ranges": [], "sha256": ""})
            piece = data[: self._left]
            ranges = self._parts[-1]["ranges"]
            if ranges and ranges[-1][1] == position:
                ranges[-1][1] += len(piece)
            else:
                ranges.append([position, position + len(piece)])
            self._digest.update(piece)
            self._left -= len(piece)
            position, data = position + len(piece), data[len(piece) :]

    def facts(self) -> list[dict[str, Any]]:
        """Its parts: byte ranges, and the sha256 of their contents in that order."""
        if self._parts:
            self._parts[-1]["sha256"] = self._digest.hexdigest()
        return self._parts


def write_header(path: Path, layout: FileLayout, tally: Tally) -> None:
    """Create `path` at its final size with its header. One rank does it, before or after the others'
    `write_ranges`: the size never cuts what they wrote."""
    with _opened(path) as fd:
        os.ftruncate(fd, layout.size)
        _write_at(fd, 0, memoryview(layout.header), tally)


def write_ranges(path: Path, chunks: Iterable[tuple[int, Tensor]], tally: Tally) -> None:
    """Write (byte position, contiguous CPU tensor) chunks into `path`."""
    with _opened(path) as fd:
        for position, tensor in chunks:
            _write_at(fd, position, tensor.view(torch.uint8).numpy().data, tally)


def write_whole(path: Path, data: bytes, tally: Tally) -> None:
    """Write a small file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path) as fd:
        os.ftruncate(fd, len(data))
        _write_at(fd, 0, memoryview(data), tally)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it survive a crash."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file to write into, created if need be and never cut; fsynced at the end."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        yield fd
        os.fsync(fd)
    except OSError as error:
        error.filename = str(path)  # a full disk should say which file it was
        raise
    finally:
        os.close(fd)


def _write_at(fd: int, position: int, data: memoryview, tally: Tally) -> None:
    while len(data):
        written = os.pwrite(fd, data[:WRITE_BYTES], position)
        tally.add(position, data[:written])
        position += written
        data = data[written:]
