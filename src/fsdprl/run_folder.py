"""Whose run a folder holds, and whether this command continues it."""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fsdprl import run_changes
from fsdprl.config import spelled
from fsdprl.disk_room import check_room
from fsdprl.errors import UserError
from fsdprl.options import RunOptions
from fsdprl.records import cut_back, read_json, read_lines, write_atomic, write_json
from fsdprl.redaction import redacted, redacted_leaves
from fsdprl.run_checkpoints import Checkpoints, verify

REMEDY = {
    "engine": "--engine.kind {0}",
    "threads": "OMP_NUM_THREADS={0} (or leave --run.deterministic out)",
}
"""How to have again what a run was begun with, for what is only decided at run time."""
PACKAGES = ("fsdprl", "torch", "transformers", "vllm", "safetensors", "accelerate")


@dataclass(frozen=True)
class Found:
    """What a command meets in its --run.out, by reading alone."""

    known: dict[str, Any] | None
    """config.json of a run with something to protect: a finished step or a checkpoint."""
    changes: dict[str, tuple[Any, Any]]
    """Options that differ from that run's, all of which may."""
    given: Path | None
    """The checkpoint of --run.resume."""
    inside: bool
    """Whether that is one of this folder's own: the run goes back to it."""
    finished: bool
    """This very run has been here, and is done."""
    allowed: set[str]
    """Names of --run.allow."""


def examine(options: RunOptions, config: dict[str, Any], *, restarted: bool = False) -> Found:
    """Whether a run of this config may use the folder. Changes nothing.

    restarted: torchrun has started the same job again, which then continues whatever --run.resume says. Raises
    UserError if a flag of `options` is out of range, the folder holds something else, or the disk is too small.
    """
    for name, least in (
        ("save_every", 0),
        ("keep", 0),
        ("log_every", 1),
        ("skip_nonfinite", 0),
    ):
        if getattr(options, name) < least:
            raise UserError(f"{spelled(f'run.{name}')} must be at least {least}")
    profile_window(options.profile)
    path = Path(options.out)
    given = given_checkpoint(options.resume)
    if options.forget and given is None:
        raise UserError(
            "--run.forget: says what of a given checkpoint is left out: give --run.resume CHECKPOINT"
        )
    known = occupant(path)
    if known and options.resume == "never" and not restarted:
        raise UserError(
            f"--run.out {path}: holds a run already, and --run.resume is never: give another folder"
        )
    allowed = run_changes.check_allowed(options.allow, as_json(config))
    changes = run_changes.differences(known["config"], as_json(config)) if known else {}
    run_changes.refuse(path, run_changes.of_options(changes), allowed)
    inside = given is not None and given.parent == (path / "checkpoints").resolve()
    if inside and "progress" in options.forget:
        raise UserError(
            f"--run.forget progress: {given} is of this run, which then begins anew: give another --run.out"
        )
    inside = inside and not restarted  # back to it once, not after every restart
    goes_on = known and Checkpoints(path / "checkpoints").all()
    if given and (inside or not goes_on) and not (given / "manifest.json").is_file():
        raise UserError(
            f"--run.resume {options.resume}: neither auto nor never nor a checkpoint folder of a run "
            f"(a folder with manifest.json)"
        )
    done = (read_json(path / "status.json") or {}).get("state") == "finished"
    done = bool(known) and done and not changes and not inside
    if not done:
        check_room(options, config)
    return Found(known, changes, given, inside, done, allowed)


def preflight(
    options: RunOptions, config: dict[str, Any], *, quiet: bool, restarted: bool = False
) -> None:
    """Every rank's look at the folder before torch is imported, so that a wrong one costs a second.

    Raises UserError as `examine` does; exits with 0 if the run is finished, which it says unless quiet.
    """
    if examine(options, config, restarted=restarted).finished:
        if not quiet:
            print(finished_message(options), flush=True)
        raise SystemExit(0)


def occupant(path: Path) -> dict[str, Any] | None:
    """The config.json of a run in this folder, None if there is nothing to protect."""
    if path.exists() and not path.is_dir():
        raise UserError(f"--run.out {path}: is a file, not a folder")
    known = read_json(path / "config.json")
    if isinstance(known, dict) and "config" in known:
        begun = Checkpoints(path / "checkpoints").all() or file_size(path / "metrics.jsonl")
        return known if begun else None
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    if any(not name.startswith(".") for name in names):
        raise UserError(
            f"--run.out {path}: is not empty and holds no run (no config.json): give another folder"
        )
    return None


def finished_message(options: RunOptions) -> str:
    """What a command is told that has nothing left to do."""
    return f"{options.out}: this run is finished; nothing is left to do"


class RunFolder:
    """A claimed run folder. `restore` is the checkpoint to continue from, None to start at step 0."""

    def __init__(
        self,
        options: RunOptions,
        *,
        config: dict[str, Any],
        recipe: Path,
        world_size: int,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        restarted: bool = False,
    ) -> None:
        """config: the recipe's. restarted: as in `examine`. Raises UserError if the folder holds another run, is in
        use, or is no run's; `finished` is set when it holds this very run, done."""
        self.path, self.say, self.warn = Path(options.out), say, warn
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.metrics, self.completions = self.path / "metrics.jsonl", self.path / "completions"
        self.restore: tuple[int, Path] | None = None
        self.forget: frozenset[str] = frozenset()
        """What of `restore` is not restored: --run.forget, where that is the checkpoint given."""
        self.ended = False
        self.config = as_json(config)
        examine(options, self.config, restarted=restarted)
        self._lock = self.lock()
        try:
            found = examine(options, self.config, restarted=restarted)  # nobody else changes it now
            self.finished = found.finished
            if not self.finished:
                self.inputs = run_changes.inputs(self.config)
                self.compare(found, recipe, world_size)
                self.restore = self.starting_point(found, frozenset(options.forget))
                self.record(found, recipe, world_size)
        except UserError:
            self._lock.close()
            raise

    def compare(self, met: Found, recipe: Path, world_size: int) -> None:
        """Say what is not as it was. UserError where that makes another run and is not allowed."""
        for name, (old, new) in met.changes.items():
            self.say(f"{spelled(name)}: {old!r} before, {new!r} from here on")
        if met.known is None:
            return
        before = met.known
        then = [event["recipe"] for event in before.get("resumed", []) if "recipe" in event]
        changes = run_changes.of_inputs(before.get("inputs", {}), self.inputs)
        changes += run_changes.of_recipe(
            self.path / (then[-1] if then else before["recipe"]),
            recipe,
            sha256_of(recipe),
            before["recipe_sha256"],
        )
        for change in run_changes.refuse(self.path, changes, met.allowed):
            self.warn(change.text)
        if before["world_size"] != world_size:
            self.say(
                f"{before['world_size']} ranks before, {world_size} from here on: the same data in the same order, "
                f"and numbers that agree to about 0.2 %"
            )
        now = versions()
        for name, version in before.get("versions", {}).items():
            if now.get(name, version) != version:
                self.say(f"{name} {version} before, {now[name]} from here on")

    def lock(self) -> IO[str]:
        """Hold the folder until this process ends. UserError if another process holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("w")
        except OSError as error:
            raise UserError(f"--run.out {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            at = self.status()
            raise UserError(
                f"--run.out {self.path}: process {at.get('pid', '?')} on {at.get('host', '?')} is "
                f"training in this folder"
            ) from None
        except OSError:
            self.warn(f"{self.path}: this file system cannot lock; start one job at a time in it")
        return file

    def starting_point(self, met: Found, forget: frozenset[str]) -> tuple[int, Path] | None:
        """The checkpoint to continue from, with everything later than it cut off: this folder's
        newest, else the one given, or that one anyway if it is this folder's own. forget: --run.forget."""
        own = met.known and not met.inside
        found = self.checkpoints.newest_whole(self.warn) if own else None
        if met.given is not None and found is None:
            if fault := verify(met.given):
                raise UserError(f"--run.resume {met.given}: damaged: {fault}")
            step = 0 if "progress" in forget else read_json(met.given / "manifest.json")["step"]
            found = step, met.given
        if found and found[1].resolve() == met.given:  # or again: a restart before the next one
            self.forget = forget
        step = found[0] if found else 0
        self.set_status(
            "running", phase="starting", step=step
        )  # before anything of an old end goes
        self.checkpoints.forget_after(step)
        for path in [self.metrics, *self.completions.glob("*.jsonl")]:
            if path.exists():
                cut_back(path, step)
        if met.known:
            self.say(
                f"continuing {self.path} from " + (f"{found[1]}" if found else "the beginning")
            )
        elif found:
            self.say(f"starting from {found[1]}")
        if self.forget:
            self.say(f"not restored: {', '.join(sorted(self.forget))}")
        return found

    def record(self, met: Found, recipe: Path, world_size: int) -> None:
        """Write config.json and the recipe's source beside it."""
        source, digest = recipe.read_bytes() if recipe.is_file() else b"", sha256_of(recipe)
        step = self.restore[0] if self.restore else 0
        facts: dict[str, Any] = {
            "config": self.config,
            "inputs": self.inputs,
            "recipe": recipe.name,
            "recipe_sha256": digest,
            "id": uuid.uuid4().hex[:12],
            "world_size": world_size,
            "versions": versions(),
            "resumed": [],
        }
        name = recipe.name
        known = met.known
        if known is not None:
            facts["id"], facts["resumed"] = known["id"], known["resumed"]
            event: dict[str, Any] = {"step": step, "world_size": world_size}
            event["changes"] = {key: list(pair) for key, pair in met.changes.items()}
            if known["recipe_sha256"] != digest:
                name = f"{recipe.stem}-from-step-{step:06d}{recipe.suffix}"
                self.say(f"the recipe as it is from here on: {name}")
                event["recipe"] = name
            facts["resumed"] = [*facts["resumed"], event]
        self.begun = known or {}
        self.facts = self.begun | facts
        write_json(self.path / "config.json", self.facts)
        if source:
            (self.path / name).write_bytes(source)
        self.completions.mkdir(exist_ok=True)

    def note(self, **facts: Any) -> None:
        """Add to config.json what was only decided at run time.

        Raises UserError where a run that is resumed was begun with something else.
        """
        for name, value in facts.items():
            begun = self.begun.get(name, value)
            if self.restore and begun != value:
                raise UserError(
                    f"{self.path} was begun with {name} {begun}, and would now go on with {value}: "
                    f"give {REMEDY[name].format(begun)}, or another --run.out"
                )
        if any(self.facts.get(name) != value for name, value in facts.items()):
            self.facts |= facts
            write_json(self.path / "config.json", self.facts)

    def status(self) -> dict[str, Any]:
        return read_json(self.path / "status.json") or {}

    def set_status(self, state: str, **more: Any) -> None:
        """state: running, finished, failed or interrupted. Written at every step: not worth an fsync
        nor, when the disk is full, a complaint of its own. After an end nothing runs, though another thread than the
        one that ends the job may believe it."""
        if self.ended and state == "running":
            return
        self.ended = state != "running"
        facts = {
            "state": state,
            "resumable": state != "finished",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        facts |= {name: redacted_leaves(v) for name, v in more.items() if v is not None}
        try:
            write_json(self.path / "status.json", facts, sync=state != "running")
        except OSError:
            if state != "running":
                self.warn(f"{self.path / 'status.json'} could not be written")

    def write_stacks(self, stacks: Mapping[str, str]) -> Path:
        """Keep what every rank was doing when nothing moved any more."""
        path = self.path / "stacks.txt"
        text = "\n\n".join(f"==== {who}\n{where}" for who, where in stacks.items())
        write_atomic(path, redacted(text) + "\n", sync=False)
        return path

    def shown_samples(self) -> list[dict[str, Any]]:
        return read_lines(self.completions / "shown.jsonl")


def as_json(config: dict[str, Any]) -> dict[str, Any]:
    """A config as a file gives it back: tuples are lists, paths are text, and secrets are taken out."""
    return redacted_leaves(json.loads(json.dumps(config, default=str)))


def profile_window(text: str) -> tuple[int, int] | None:
    """First and last step of --run.profile."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    if not (first.isdigit() and (last.isdigit() or not colon)) or int(last or first) < int(first):
        raise UserError(f"--run.profile {text}: expected FIRST:LAST, such as 3:5")
    return int(first), int(last or first)


def given_checkpoint(resume: str) -> Path | None:
    """The folder that --run.resume names, None for auto and never."""
    return None if resume in ("auto", "never") else Path(resume).resolve()


def versions() -> dict[str, str]:
    """Of what shapes the numbers, as far as installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def sha256_of(recipe: Path) -> str:
    """Of a file; of nothing where there is none."""
    return hashlib.sha256(recipe.read_bytes() if recipe.is_file() else b"").hexdigest()


def file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
