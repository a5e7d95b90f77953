"""JSON and JSON-lines files as rows that know their line. `datasets` loses it in its errors."""

import json
import mmap
from array import array
from pathlib import Path
from typing import Any

import msgspec

from fsdprl.errors import UserError

_decode = msgspec.json.Decoder().decode
_WHITE = " \t\r\n"


class JsonLines:
    """A file with one JSON object a line, memory-mapped; a line is parsed when its row is asked for.

    Blank lines are passed over, a byte order mark too. Raises UserError with file:line for a line
    that is not UTF-8, not JSON or not an object, when that row is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._numbers = array("q"), array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(offset)
                    self._numbers.append(number)
                offset += len(line)
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if offset else b""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self._starts[index]
        end = self._data.find(b"\n", start)
        return _row(self._data[start : end if end >= 0 else None], self.where(index))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"


def check_head(path: Path, rows: int | None = None) -> None:
    """UserError for a broken line among the first `rows` of a file of JSON lines, as far as its first megabyte goes."""
    with path.open("rb") as file:
        head = file.read(1 << 20)
    lines = head.split(b"\n")[: None if len(head) < 1 << 20 else -1]
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in filled[:rows]:
        _row(line, f"{path}:{number}")


class JsonList:
    """A file that holds one JSON list of objects. Reads it whole; raises UserError at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._numbers = array("q")
        text = _text(path)
        position = _skip(text, text.index("[") + 1)
        line, seen = 1, 0
        decoder = json.JSONDecoder()
        while text[position : position + 1] != "]":
            line, seen = line + text.count("\n", seen, position), position
            try:
                row, position = decoder.raw_decode(text, position)
            except json.JSONDecodeError as error:
                raise _broken(f"{path}:{error.lineno}", error.msg, error.colno) from None
            except RecursionError:
                raise UserError(f"{path}:{line}: nested too deeply") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{line}: a {_json_name(row)} in a list of rows")
            self._rows.append(row)
            self._numbers.append(line)
            position = _skip(text, position)
            if text[position : position + 1] == ",":
                position = _skip(text, position + 1)
            elif text[position : position + 1] != "]":
                end = line + text.count("\n", seen, position)
                raise UserError(f"{path}:{end}: not valid JSON: expected ',' or ']' after a row")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"


def open_json(path: Path) -> JsonLines | JsonList:
    """A .json file: one list of rows, or (as many are) one row a line."""
    with path.open("rb") as file:
        start = file.read(1 << 16).lstrip(b"\xef\xbb\xbf" + _WHITE.encode())
    if start[:1] == b"[":
        return JsonList(path)
    lines = JsonLines(path)
    if len(lines) > 1:
        try:
            lines[0]
        except UserError:
            raise UserError(
                f"{path}: neither a list of rows nor one row a line; if it holds one object, take "
                f"the list out of it"
            ) from None
    return lines


def _row(line: bytes, where: str) -> dict[str, Any]:
    """The object of one line, without its end."""
    try:
        row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        row = _slow_decode(line, where)
    if not isinstance(row, dict):
        raise UserError(
            f"{where}: a {_json_name(row)}, but every line must be an object with one field per column"
        )
    return row


def _slow_decode(line: bytes, where: str) -> Any:
    """What the fast decoder refused: NaN and Infinity as Python writes them, or a precise error."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not valid UTF-8 at byte {error.start + 1} of the line "
            f"({line[error.start : error.start + 4]!r}); save the file as UTF-8"
        ) from None
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise _broken(where, error.msg, error.colno) from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff) alone") from None
    return row


def _broken(where: str, reason: str, column: int) -> UserError:
    return UserError(f"{where}: not valid JSON at column {column}: {reason}")


def _json_name(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not valid UTF-8; save the file as UTF-8") from None


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _WHITE:
        position += 1
    return position
