"""TOML files as command-line entries, each of which knows its line. No torch."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdprl.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One setting as the user gave it: on the command line (`file` None) or in a TOML file."""

    name: str
    """Dotted name with underscores, as in the dataclass: run.save_every."""
    tokens: tuple[str, ...]
    """The values as command-line words."""
    typed: str = ""
    """The flag as it was typed, for messages; empty in a file."""
    file: Path | None = None
    table: dict[str, Any] | None = None
    """The value, where it is a TOML table: its keys are entries too."""

    def where(self) -> str:
        """What to point at: the flag, or file:line and key."""
        if self.file is None:
            return self.typed
        line = line_of(self.file.read_text(encoding="utf-8"), self.name.split("."))
        return f"{self.file}:{line}: {self.name}"


def read_toml(path: str) -> list[Entry]:
    """The settings of a file in its order; UserError with file:line where it is not TOML."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--config {path}: cannot be read: {reason}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line, reason = syntax_error(text, str(error))
        raise UserError(f"{path}:{line}: not valid TOML: {reason}") from None
    return list(entries(document, file))


def entries(table: dict[str, Any], file: Path, prefix: str = "") -> Iterator[Entry]:
    """Flatten nested tables; keys may use hyphens or underscores. A table is yielded before what
    is in it, so that a table nobody knows is found even when it is empty."""
    for key, value in table.items():
        name = f"{prefix}{key.replace('-', '_')}"
        if isinstance(value, dict):
            yield Entry(name, (), file=file, table=value)
            yield from entries(value, file, f"{name}.")
        else:
            items = value if isinstance(value, list) else [value]
            yield Entry(name, tuple(str(item) for item in items), file=file)


def line_of(text: str, keys: list[str]) -> int:
    """The line (from 1) on which a key's value begins.

    tomllib keeps no positions: the key first appears in the shortest prefix of whole lines that
    parses and has it, and its value begins after the last shorter prefix that parses.
    """
    lines = text.splitlines()
    begins = 1
    for count in range(1, len(lines) + 1):
        try:
            node: Any = tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        for key in keys:
            spelled = (
                {name.replace("-", "_"): name for name in node} if isinstance(node, dict) else {}
            )
            if key not in spelled:
                break
            node = node[spelled[key]]
        else:
            return begins
        begins = count + 1
    return begins


def syntax_error(text: str, message: str) -> tuple[int, str]:
    """Line and reason out of tomllib's message, "reason (at line 3, column 7)"."""
    reason, _, position = message.partition(" (at ")
    digits = position.removeprefix("line ").split(",")[0]
    return (int(digits) if digits.isdigit() else len(text.splitlines()) or 1), reason
