"""What the name of a dataset says before anything is read: a file, a part of one, or a name of the hub."""

import difflib
from pathlib import Path

JSON_LINES = (".jsonl", ".ndjson")
SEPARATED = (".csv", ".tsv")
TABLES = (".parquet", ".arrow")
TEXTS = (".txt",)
EXTENSIONS = (".json", *JSON_LINES, *SEPARATED, *TABLES, *TEXTS)


def subset_of(path: str) -> tuple[str, int | None]:
    """(`PATH`, n) of `PATH#n`; (`PATH`, None) without a number behind it."""
    name, mark, count = path.rpartition("#")
    if not mark or not count.isdigit() or Path(path).expanduser().exists():
        return path, None
    return name, int(count)


def absent(path: str, flag: str = "--data") -> str:
    """What to tell the user of a path that is not there; empty where it is, or may be a name of the hub."""
    name, _ = subset_of(path)
    place = Path(name).expanduser()
    bare = name.partition("@")[0].partition(":")[0]
    looks_local = name.startswith((".", "/", "~")) or bare.count("/") > 1
    if place.exists() or not (looks_local or place.suffix.lower() in EXTENSIONS or not bare):
        return ""
    there = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    near = difflib.get_close_matches(place.name, there, n=1)
    hint = f"; did you mean {place.parent / near[0]}?" if near else ""
    return f"{flag} {path}: no such file{hint}"
