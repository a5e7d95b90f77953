"""Files for tests of data: written into a test's folder, or real ones that may be given."""

import json
import os
from pathlib import Path
from typing import Any

import pytest


def given(name: str) -> Path:
    """A file of the folder in FSDPRL_DATA (or ../shared/data); skips the test without it."""
    folder = Path(
        os.environ.get("FSDPRL_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    )
    if not (folder / name).is_file():
        pytest.skip(f"{folder / name} is not there; FSDPRL_DATA names the folder of real data")
    return folder / name


def write_lines(path: Path, rows: list[Any]) -> str:
    """A jsonl file; strings are written as they are, everything else as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)
