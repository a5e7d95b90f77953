"""What differs between a run and the command that would continue it: options, the files they name, the recipe.

Every difference has a name, which --run.allow takes: an option's (`lr`, `data`, `model`) or `recipe`.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdprl.config import flatten, spelled
from fsdprl.errors import UserError
from fsdprl.suggest import nearest

MAY_CHANGE = ("sharding.", "engine.", "reward.")
"""What a resumed run may change beside run.*: where and how it runs. Losses and the order of data do not depend on
these. Everything else makes another run."""
HORIZON = ("steps", "epochs")
RECIPE = "recipe"
SHOWN = 6
"""Most changed lines of a recipe in a message."""


@dataclass(frozen=True)
class Change:
    """One difference: what --run.allow calls it, and how it reads."""

    name: str
    text: str


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that differ, by dotted name; one that exists on one side only is None on the other."""
    before, now = flatten(old), flatten(new)
    names = dict.fromkeys([*before, *now])
    return {
        name: (before.get(name), now.get(name))
        for name in names
        if before.get(name) != now.get(name) and not name.startswith("run.")
    }


def of_options(changes: Mapping[str, tuple[Any, Any]]) -> list[Change]:
    """The options among `changes` that make another run."""
    return [
        Change(name, f"{spelled(name)}: {old!r} there, {new!r} now")
        for name, (old, new) in changes.items()
        if name not in HORIZON and not name.startswith(MAY_CHANGE)
    ]


def inputs(config: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Option -> file -> digest of its contents, for every option that names files: data, models with their
    tokenizers, templates, reward files. A large file is sampled (see data.rows.fingerprint)."""
    found: dict[str, dict[str, str]] = {}
    for name, value in flatten(config).items():
        if not name.startswith("run."):
            files: dict[str, str] = {}
            for one in value if isinstance(value, list) else [value]:
                files |= dict(_digests(one)) if isinstance(one, str) else {}
            if files:
                found[name] = files
    return found


def _digests(value: str) -> Iterator[tuple[str, str]]:
    from fsdprl.data.rows import fingerprint, subset_of  # reads files: not before ranks start

    source, colon, _ = value.rpartition(":")
    path = source if colon and source.endswith(".py") else value
    try:
        place = Path(subset_of(path)[0]).expanduser()
        exists = bool(path) and place.exists()
    except OSError:  # a text too long for a name
        return
    if not exists:
        return
    if (place / "config.json").is_file():
        for file in sorted(entry for entry in place.iterdir() if entry.is_file()):
            yield str(place / file.name), fingerprint(str(file))
    else:
        yield path, fingerprint(path)


def of_inputs(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> list[Change]:
    """Files that an option names, as it did, and whose contents are others."""
    changes = []
    for name, files in new.items():
        before = old.get(name, {})
        for file in dict.fromkeys([*before, *files]):
            if before.keys() & files.keys() and before.get(file) != files.get(file):
                how = "other contents" if file in before and file in files else "not there"
                how = "new" if file not in before else "gone" if file not in files else how
                changes.append(Change(name, f"{spelled(name)}: {file}: {how}"))
    return changes


def of_recipe(old: Path, new: Path, digest: str, known: str) -> list[Change]:
    """The recipe's changed lines, where its digest is not the known one."""
    if digest == known:
        return []
    before, now = (path.read_text().splitlines() if path.is_file() else [] for path in (old, new))
    diff = list(difflib.unified_diff(before, now, lineterm="", n=0))[2:]
    lines = [line for line in diff if not line.startswith("@@")]
    shown = "".join(f"\n      {line}" for line in lines[:SHOWN])
    more = f"\n      and {len(lines) - SHOWN} more lines" if len(lines) > SHOWN else ""
    return [Change(RECIPE, f"the recipe {new.name} has changed:{shown}{more}")]


def check_allowed(allow: Sequence[str], config: dict[str, Any]) -> set[str]:
    """The names of --run.allow as dotted options. UserError for one that names nothing."""
    known = [*flatten(config), RECIPE]
    names = {name.lstrip("-").replace("-", "_") for name in allow}
    for name in sorted(names - set(known)):
        near = [part.replace("_", "-") for part in nearest(name, known)]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"--run.allow {name}: no option of this recipe, nor {RECIPE}{hint}")
    return names


def refuse(path: Path, changes: Sequence[Change], allowed: set[str]) -> list[Change]:
    """The changes, all of which are allowed. UserError with every one that makes this another run and is not."""
    left = [change for change in changes if change.name not in allowed]
    if left:
        names = " ".join(dict.fromkeys(change.name.replace("_", "-") for change in left))
        lines = [
            f"--run.out {path}: holds a run of another config:",
            *(change.text for change in left),
        ]
        lines.append("give another --run.out; with --run.resume CHECKPOINT it begins from there;")
        lines.append(f"to go on here all the same: --run.allow {names}")
        raise UserError("\n  ".join(lines))
    return list(changes)
