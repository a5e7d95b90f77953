"""Files of a run folder: replaced whole or appended to by the line, and a full disk is survived."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdprl.errors import UserError
from fsdprl.redaction import redacted


def write_atomic(path: Path, text: str, *, sync: bool = True) -> None:
    """Replace a file so that a reader, or a crash, meets the old text or the new, never a mixture."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Replace a file with indented JSON, as `write_atomic` does."""
    write_atomic(path, as_text(value), sync=sync)


def as_text(value: Any) -> str:
    """JSON as this module writes it into files of their own."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Any:
    """None where there is no such file or it does not hold JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class Patience:
    """Does what may fail for want of disk: warns and reports False, until the third time in a row."""

    def __init__(self, what: str, warn: Callable[[str], None], times: int = 3) -> None:
        self.what, self.warn, self.times = what, warn, times
        self.failures = 0

    def attempt(self, action: Callable[[], object]) -> bool:
        """Whether it worked. UserError after `times` OSErrors in a row."""
        try:
            action()
        except OSError as error:
            self.failed(error)
            return False
        self.worked()
        return True

    def failed(self, error: OSError) -> None:
        """Warn, or raise UserError for the last time in a row."""
        self.failures += 1
        reason = f"{self.what}: {error.strerror or error}"
        if self.failures >= self.times:
            raise UserError(
                f"{reason}, {self.failures} times in a row. Free space (or mend the folder) "
                f"and give the same command again: it continues from the last checkpoint"
            ) from error
        self.warn(f"{reason}; trying again after the next step")

    def worked(self) -> None:
        """Count from the beginning."""
        self.failures = 0


class JsonLines:
    """A file of one JSON object a line. What could not be written is kept and goes out first next time."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._patience = Patience(f"writing {path}", warn)
        self._size = path.stat().st_size if path.exists() else 0
        self._waiting: list[bytes] = []

    def append(self, record: dict[str, Any], *, sync: bool = False) -> bool:
        """Whether it is in the file. sync: and on the disk. UserError at the third OSError in a row."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, default=str)
        self._waiting.append(f"{redacted(line, prose=True)}\n".encode())
        return self.flush(sync=sync)

    def flush(self, *, sync: bool = False) -> bool:
        """Try to write what waits; as `append`."""
        if self._patience.attempt(lambda: self._write(sync)):
            self._waiting.clear()
        return not self._waiting

    def _write(self, sync: bool) -> None:
        with self.path.open("ab") as file:
            if file.tell() != self._size:
                file.truncate(self._size)  # half a line, left by a write that ran out of space
            file.write(b"".join(self._waiting))
            file.flush()
            if sync:
                os.fsync(file.fileno())
            self._size = file.tell()


def cut_back(path: Path, step: int) -> None:
    """Cut a JSON-lines file before the first line that is torn or belongs to `step` or later.

    Lines come in the order of their steps, so that what is kept is a prefix of the file.
    """
    keep = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or record.get("step", step) >= step:
                break
            keep += len(line)
    os.truncate(path, keep)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; a torn last line is left out."""
    records: list[dict[str, Any]] = []
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    records.append(json.loads(line))
    return records
