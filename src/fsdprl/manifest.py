"""manifest.json of a checkpoint: size and sha256 of every file, of the manifest itself too, and whether they hold.

A small file that one process wrote has one sha256. A large one, or one that many ranks wrote, has several parts: each
is a list of byte ranges and the sha256 of their contents in that order, as the rank computed it while it wrote.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdprl.moments import reached
from fsdprl.records import as_text, read_json, sync_folder, write_json

MANIFEST = "manifest.json"
READ_BYTES = 16 << 20
PICKLED = re.compile(r"\.(bin|pt|pth|pkl|pickle|ckpt|py)$|(^|/)\.metadata$")
"""Files that others load by running what they say; none of a checkpoint's own is of that kind."""

Parts = Mapping[str, Sequence[Mapping[str, Any]]]
"""Path inside the checkpoint -> {"ranges": [[start, end], ...], "sha256": ...} of each rank that wrote into it."""


def seal(folder: Path, step: int, written: Parts | None = None) -> None:
    """Write the manifest of a folder whose files are complete, and flush it to the disk.

    written: what ranks wrote, flushed and hashed; every other file is flushed and hashed here. Raises OSError where a
    file is not as long as it was written, or the disk refuses.
    """
    reached("seal", rank=0, step=step)
    written = written or {}
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        others = [name for name in files if name not in written]
        facts = dict(zip(others, pool.map(lambda n: fingerprint(folder / n), others), strict=True))
    for name in written:
        facts[name] = joined(folder / name, written[name])
    manifest = {"step": step, "files": {name: facts[name] for name in files}}
    write_json(folder / MANIFEST, manifest | {"sha256": _own(manifest)})
    for inner in {path.parent for path in folder.rglob("*")}:
        sync_folder(inner)


def fingerprint(path: Path, *, sync: bool = True) -> dict[str, Any]:
    """Size in bytes and sha256 of a file, flushed to the disk."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def joined(path: Path, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The manifest's entry of a file from what each rank wrote. OSError where that is not the whole file."""
    size = path.stat().st_size
    end = 0
    for start, stop in sorted(tuple(span) for part in parts for span in part["ranges"]):
        if start != end:
            break
        end = stop
    if end != size:
        raise OSError(5, f"{path} has {size} bytes, of which {end} were written in one piece")
    if len(parts) == 1 and parts[0]["ranges"] == [[0, size]]:
        return {"bytes": size, "sha256": parts[0]["sha256"]}
    return {"bytes": size, "parts": [dict(part) for part in parts]}


def verify(folder: Path) -> str:
    """What is wrong with a checkpoint folder, or "" if every file is as its manifest says."""
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return f"{MANIFEST} is missing or unreadable"
    same = as_text(manifest).encode() == (folder / MANIFEST).read_bytes()
    if manifest.pop("sha256", "") != _own(manifest) or not same:
        return f"the contents of {MANIFEST} have changed (sha256)"
    return next(_faults(folder, manifest["files"]), "")


def _own(manifest: Mapping[str, Any]) -> str:
    """sha256 of the manifest's other entries."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _faults(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    for name in sorted(there - files.keys() - {MANIFEST}):
        if PICKLED.search(name):
            yield f"{name} is not of this checkpoint, and of a kind that can hold code"
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != expected["bytes"]:
            yield f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
    # Sizes first, as they cost nothing.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        checks = [
            (name, part)
            for name, expected in files.items()
            for part in expected.get("parts")
            or [{"ranges": [[0, expected["bytes"]]], "sha256": expected["sha256"]}]
        ]
        digests = pool.map(lambda check: _sha256(folder / check[0], check[1]["ranges"]), checks)
        for (name, part), digest in zip(checks, digests, strict=True):
            if digest != part["sha256"]:
                yield f"the contents of {name} have changed (sha256)"


def _sha256(path: Path, ranges: Sequence[Sequence[int]]) -> str:
    """Of these byte ranges of a file, one after the other."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start, stop in ranges:
            file.seek(start)
            while start < stop and (data := file.read(min(READ_BYTES, stop - start))):
                digest.update(data)
                start += len(data)
    return digest.hexdigest()
