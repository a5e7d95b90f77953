"""Checkpoint folders that are whole or absent: written aside, sealed, renamed; verified on the way back.

A checkpoint is a Hugging Face checkpoint with the trainer's state in `trainer/`, the run's own small
state in `run.json`, and `manifest.json` with size and sha256 of every other file (manifest.py).
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fsdprl.errors import UserError
from fsdprl.manifest import verify
from fsdprl.moments import reached
from fsdprl.records import read_json, sync_folder, write_atomic, write_json

NAME = re.compile(r"step-(\d{6,})")
LATEST, BEST = "latest", "best"
PROGRESS = ("skipped", "stopped")


def folder_name(step: int) -> str:
    """step-000100"""
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

    def commit(self, part: Path, step: int, keep: int = 0, best: Path | None = None) -> Path:
        """Rename the folder into place, point `latest` at it and delete what exceeds `keep` (0: none) but `best`."""
        reached("commit", rank=0, step=step)
        final = self.folder / folder_name(step)
        if final.exists():
            set_aside(final)
        os.rename(part, final)
        point(self.folder / LATEST, final.name)
        sync_folder(self.folder)
        self.prune(keep, best)
        return final

    def prune(self, keep: int, best: Path | None) -> None:
        """Delete the oldest checkpoints but `best`, until there are `keep` beside it (0: delete none)."""
        for _, path in self.all()[: -keep if keep else 0]:
            if path == best:
                continue
            # Renamed first: a crash half way leaves no folder that looks like a checkpoint.
            doomed = path.rename(self.folder / f".{path.name}.part")
            shutil.rmtree(doomed, ignore_errors=True)

    def point_best(self, path: Path, keep: int) -> None:
        """Make `best` a link to this checkpoint, which outlives the `keep` newest ones."""
        point(self.folder / BEST, path.name)
        self.prune(keep, path)

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
        """Set aside every checkpoint of a later step: the run goes on from `step` and makes its own.

        `latest` then names the newest of the others, also where a kill came before it was moved.
        """
        for later, path in self.all():
            if later > step:
                set_aside(path)
        if left := self.all():
            point(self.folder / LATEST, left[-1][1].name)
        for link in (self.folder / LATEST, self.folder / BEST):
            if link.is_symlink() and not link.exists():
                link.unlink()


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
    by state_dict() and load_state_dict(). A model whose ranks write by themselves has begin_save(dir,
    background=...), and run_saves.collect hears of its end. The first model's checkpoint is the
    folder itself, any other's a subfolder of its name."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self._remembered: dict[str, Any] | None = None
        self.redrawn = 0
        """How often a run was resumed without its random numbers: part of every seed of sampling."""
        self.progress: dict[str, int] = {}
        """Of the run itself: updates `skipped`, and the steps of the plan that Run.stop() has `stopped`; none is 0."""

    def add(self, name: str, thing: Any) -> None:
        """None, and what says of itself that it is constant, need no saving."""
        if thing is None or getattr(thing, "constant", False):
            return
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

    @property
    def asks_ranks(self) -> bool:
        """Whether ranks write files of their own, and must be asked when they have finished."""
        return any(hasattr(model, "begin_save") for model in self.models.values())

    def save(
        self, folder: Path, step: int, *, remembered: bool = False, background: bool = False
    ) -> None:
        """Write everything, but what begin_save() only began; remembered: small states as of remember().

        background: what ranks write, they write in threads. UserError where a state is not JSON; OSError where the
        disk refuses.
        """
        for name, model in self.models.items():
            place = self.place(name, folder)
            place.mkdir(exist_ok=True)
            if hasattr(model, "begin_save"):
                model.begin_save(place, background=background)
            else:
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
        small: dict[str, Any] = {"step": step, "models": list(self.models), "states": states}
        if self.redrawn:
            small["redrawn"] = self.redrawn
        small |= self.progress
        write_json(folder / "run.json", small)

    def load(self, folder: Path, forget: Collection[str] = ()) -> None:
        """Restore what save wrote, but what `forget` names: "optimizer" (moments stay as they are), "rng" (what is
        sampled is drawn with other seeds), "progress" (all but what has load_weights stays as it is).

        UserError where the checkpoint is of other things than are tracked.
        """
        saved = read_json(folder / "run.json") or {}
        models, states = saved.get("models", []), saved.get("states", {})
        wanted_states = {} if "progress" in forget else self.states
        wanted = {
            name: model
            for name, model in self.models.items()
            if "progress" not in forget or hasattr(model, "load_weights")
        }
        absent = [name for name in wanted if name not in models]
        absent += [name for name in wanted_states if name not in states]
        if absent or models[:1] != list(self.models)[:1]:
            raise UserError(
                f"{folder} holds {', '.join([*models, *states]) or 'nothing'}, but the recipe tracks "
                f"{', '.join([*self.models, *self.states])}"
            )
        for name, model in wanted.items():
            place = self.place(name, folder)
            if "optimizer" in forget and hasattr(model, "load_weights"):
                model.load_weights(place)
            else:
                model.load(place)
        for name, thing in wanted_states.items():
            thing.load_state_dict(states[name])
        self.redrawn = saved.get("redrawn", 0) + ("rng" in forget)
        kept = () if "progress" in forget else PROGRESS
        self.progress = {name: saved[name] for name in kept if name in saved}
