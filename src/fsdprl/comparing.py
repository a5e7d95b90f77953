"""Whether two runs are the same: which metrics measure a machine and not a training, and what else differs.

Two runs of one command, or one run and another that was killed and resumed, agree in every metric but those of
MEASURED, and in every byte of their checkpoints. ARCHITECTURE.md says when that holds.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdprl.records import read_lines

MEASURED = ("timing/", "memory/", "wire/")
"""Beginnings of metric names that may differ between equal runs: seconds, bytes held, and bytes of control messages,
which hold folder names and row numbers of their process."""
MEASURED_RATES = "_tps"
"""End of the names of tokens per second."""


ROUNDING = 1e-3
"""Below this size, a tolerance is a share of it: the gap between trainer and engine, say, is itself rounding."""


def is_measured(name: str) -> bool:
    """Whether a metric tells of the machine (time, memory, traffic) and is left out of a comparison."""
    return name.startswith(MEASURED) or name.endswith(MEASURED_RATES)


def repeatable(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what is measured."""
    return {name: value for name, value in row.items() if not is_measured(name)}


def metric_differences(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], tolerance: float = 0.0
) -> list[str]:
    """Each metric of each step that two runs do not have alike, in words.

    tolerance: difference up to which numbers count as equal, relative to the larger one and at least to ROUNDING;
    0 wants the same bits.
    """
    lines = []
    if [row["step"] for row in a] != [row["step"] for row in b]:
        lines.append(f"steps: {_steps(a)} and {_steps(b)}")
    others = {row["step"]: repeatable(row) for row in b}
    for row in map(repeatable, a):
        other = others.get(row["step"], row)
        for name in dict.fromkeys([*row, *other]):
            ours, theirs = row.get(name), other.get(name)
            if ours != theirs and not _near(ours, theirs, tolerance):
                lines.append(f"step {row['step']}: {name}: {ours!r} and {theirs!r}")
    return lines


def checkpoint_differences(a: Path, b: Path) -> list[str]:
    """Files of two checkpoint folders that are missing from one of them or not the same to the byte."""
    files = {
        str(path.relative_to(top)) for top in (a, b) for path in top.rglob("*") if path.is_file()
    }
    lines = []
    for name in sorted(files):
        absent = [str(top) for top in (a, b) if not (top / name).is_file()]
        if absent:
            lines.append(f"{name}: not in {absent[0]}")
        elif _digest(a / name) != _digest(b / name):
            lines.append(f"{name}: other bytes")
    return lines


def run_differences(a: Path, b: Path, tolerance: float = 0.0) -> list[str]:
    """What differs between two run folders, line by line: metrics, and files of the newest checkpoints. Empty: nothing.

    With a tolerance only metrics are compared.
    """
    ours, theirs = (read_lines(folder / "metrics.jsonl") for folder in (a, b))
    lines = metric_differences(ours, theirs, tolerance)
    one, other = (folder / "checkpoints" / "latest" for folder in (a, b))
    if not tolerance and (one.exists() or other.exists()):
        lines += [f"checkpoint: {line}" for line in checkpoint_differences(one, other)]
    return lines


def _near(a: Any, b: Any, tolerance: float) -> bool:
    if not (isinstance(a, int | float) and isinstance(b, int | float)):
        return False
    return abs(a - b) <= tolerance * max(abs(a), abs(b), ROUNDING)


def _steps(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(rows)} lines, {rows[0]['step']} to {rows[-1]['step']}" if rows else "none"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
