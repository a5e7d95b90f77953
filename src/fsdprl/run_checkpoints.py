"""Checkpoint folders that are whole or absent: written aside, hashed, renamed; verified on the way back.

A checkpoint is a Hugging Face checkpoint with the trainer's state in `trainer/`, the run's own small
state in `run.json`, and `manifest.json` with size and sha256 of every other file.
"""

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdprl.errors import UserError
from fsdprl.records import read_json, sync_folder, write_atomic, write_json

NAME = re.compile(r"step-(\d{6,})")
MANIFEST = "manifest.json"
LATEST = "latest"


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


class Checkpoints:
    """The checkpoints/ folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[tuple[int, Path]]:
        """(optimised steps, folder) of every finished checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [
            (match, path) for path in self.folder.iterdir() if (match := NAME.fullmatch(path.name))
        ]
        return sorted((int(match[1]), path) for match, path in found if path.is_dir())

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into; leftovers of a crash are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".*.part"):
            shutil.rmtree(leftover)
        part = self.folder / f".{folder_name(step)}.part"
        part.mkdir()
        return part

    def seal(self, part: Path, step: int) -> None:
        """Flush every file of the folder to disk and write its manifest."""
        files = sorted(str(path.relative_to(part)) for path in part.rglob("*") if path.is_file())
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            facts = list(pool.map(lambda name: fingerprint(part / name, sync=True), files))
        write_json(part / MANIFEST, {"step": step, "files": dict(zip(files, facts, strict=True))})
        for folder in {path.parent for path in part.rglob("*")}:
            sync_folder(folder)

    def commit(self, part: Path, step: int, keep: int = 0) -> Path:
        """Rename the folder into place, point `latest` at it and delete what exceeds `keep` (0: none)."""
        final = self.folder / folder_name(step)
        if final.exists():
            set_aside(final)
        os.rename(part, final)
        point(self.folder / LATEST, final.name)
        sync_folder(self.folder)
        for _, path in self.all()[: -keep if keep else 0]:
            # Renamed first: a crash half way leaves no folder that looks like a checkpoint.
            doomed = path.rename(self.folder / f".{path.name}.part")
            shutil.rmtree(doomed, ignore_errors=True)
        return final

    def newest_whole(self, warn: Callable[[str], None]) -> tuple[int, Path] | None:
        """The newest checkpoint that verifies; damaged ones are named.

        UserError if there are checkpoints and none is whole.
        """
        found = self.all()
        faults: list[str] = []
        for step, path in reversed(found):
            fault = verify(path)
            if not fault:
                return step, path
            faults.append(f"checkpoint {path} is damaged: {fault}")
            warn(f"{faults[-1]}; taking the one before it")
        if found:
            raise UserError(
                "; ".join(faults)
                + ". No whole checkpoint is left: give a new --run.out to start again"
            )
        return None

    def forget_after(self, step: int) -> None:
        """Set aside every checkpoint of a later step: the run goes on from `step` and makes its own."""
        for later, path in self.all():
            if later > step:
                set_aside(path)


def fingerprint(path: Path, *, sync: bool = False) -> dict[str, Any]:
    """Size in bytes and sha256 of a file."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def verify(path: Path) -> str:
    """What is wrong with a checkpoint folder, or "" if every file is as its manifest says."""
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return f"{MANIFEST} is missing or unreadable"

    def faults() -> Iterator[str]:
        for name, expected in manifest["files"].items():
            file = path / name
            if not file.is_file():
                yield f"{name} is missing"
            elif file.stat().st_size != expected["bytes"]:
                yield f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
        # Sizes first, as they cost nothing.
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            paths = [path / name for name in manifest["files"]]
            for name, fact in zip(manifest["files"], pool.map(fingerprint, paths), strict=True):
                if fact["sha256"] != manifest["files"][name]["sha256"]:
                    yield f"the contents of {name} have changed (sha256)"

    return next(faults(), "")


def set_aside(path: Path) -> None:
    """Rename a checkpoint out of the way without losing it."""
    count = 0
    while (aside := path.with_name(f"unused-{count}-{path.name}")).exists():
        count += 1
    path.rename(aside)


def point(link: Path, name: str) -> None:
    """Make `latest` a link to a checkpoint, or a file with its name where links cannot be made."""
    beside = link.with_name(f".{link.name}.tmp")
    beside.unlink(missing_ok=True)
    try:
        beside.symlink_to(name, target_is_directory=True)
    except OSError:
        write_atomic(link, name + "\n")
    else:
        os.replace(beside, link)


class Tracked:
    """What a run saves and restores beside its step: models by save(dir) and load(dir), small things
    by state_dict() and load_state_dict(). The first model's checkpoint is the folder itself, any
    other's a subfolder of its name."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self._remembered: dict[str, Any] | None = None

    def add(self, name: str, thing: Any) -> None:
        if name in self.models or name in self.states:
            raise UserError(f"run.track({name}=...): this name is already tracked")
        if hasattr(thing, "save") and hasattr(thing, "load"):
            self.models[name] = thing
        elif hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            self.states[name] = thing
        else:
            raise UserError(
                f"run.track({name}={type(thing).__name__}): needs save(dir) and load(dir), or "
                f"state_dict() and load_state_dict()"
            )

    @property
    def steady(self) -> bool:
        """Whether all models hold, until the first update of a step, what they held when it began."""
        return all(getattr(model, "steady", False) for model in self.models.values())

    def remember(self) -> None:
        """Keep the small states as they are when a step begins, for a save in the midst of it."""
        self._remembered = {
            name: copy.deepcopy(thing.state_dict()) for name, thing in self.states.items()
        }

    def place(self, name: str, folder: Path) -> Path:
        return folder if name == next(iter(self.models)) else folder / name

    def save(self, folder: Path, step: int, *, remembered: bool = False) -> None:
        """Write everything; remembered: small states as of remember().

        UserError where a state is not JSON; OSError where the disk refuses.
        """
        for name, model in self.models.items():
            place = self.place(name, folder)
            place.mkdir(exist_ok=True)
            model.save(place)
        states = {name: thing.state_dict() for name, thing in self.states.items()}
        if remembered and self._remembered is not None:
            states = self._remembered
        for name, state in states.items():
            try:
                json.dumps(state, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"run.track({name}=...): its state_dict() is not JSON: {error}"
                ) from None
        write_json(
            folder / "run.json", {"step": step, "models": list(self.models), "states": states}
        )

    def load(self, folder: Path) -> None:
        saved = read_json(folder / "run.json") or {}
        models, states = saved.get("models", []), saved.get("states", {})
        absent = [name for name in self.models if name not in models]
        absent += [name for name in self.states if name not in states]
        if absent or models[:1] != list(self.models)[:1]:
            raise UserError(
                f"{folder} holds {', '.join([*models, *states]) or 'nothing'}, but the recipe tracks "
                f"{', '.join([*self.models, *self.states])}"
            )
        for name, model in self.models.items():
            model.load(self.place(name, folder))
        for name, thing in self.states.items():
            thing.load_state_dict(states[name])
