"""A recipe's Config from the command line, over TOML files. No torch: help and mistakes answer at once.

tyro reads the values and writes the help. Around it: `--config file.toml` under the command line,
every mistake at once with its flag or file:line, and the name that was probably meant.

Conventions: `--run.save-every 5`, `--run.save_every 5` and `--run.save-every=5` are the same; booleans
are `--x`, `--no-x`, `--x True` or `--x False`; a list takes all words up to the next flag, so
`--run.track wandb tensorboard`; the last of a repeated flag counts. A value that begins with `--` is
written with `=`. Later files win over earlier ones, the command line over all files.
"""

import contextlib
import dataclasses
import io
import json
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fsdprl.config_file import Entry, read_toml
from fsdprl.errors import UserError
from fsdprl.redaction import redacted
from fsdprl.suggest import closest_choice, nearest

ConfigT = TypeVar("ConfigT")
SECRET = re.compile(
    r"(^|_)(api_key|secret|password|passwd|credentials?|(hf|auth|access|api)_token)$"
)
BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True)
class Flags:
    """What every recipe understands beside its own Config."""

    debug: bool = False
    """Drop all deadlines and run rewards inside the rank, so that a debugger can stop anywhere."""
    dry_run: bool = False
    """Print the resolved config, the step arithmetic, two prompts and a memory estimate, and stop."""
    config: tuple[str, ...] = ()
    """TOML files with options, under the command line; later files win."""


@dataclass(frozen=True)
class Leaf:
    """One option: a field that is not itself a group of options."""

    path: str
    type: Any
    required: bool

    @property
    def is_bool(self) -> bool:
        return self.type is bool


def parse(
    config_class: type[ConfigT], argv: Sequence[str] | None = None, *, quiet: bool = False
) -> tuple[ConfigT, Flags]:
    """The Config and Flags of this process, or exit: 0 after --help, 2 after a mistake.

    quiet (every rank but the first): print nothing, exit with the same code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if any(word in ("-h", "--help") for word in words):
            print_help(config_class, quiet)
            raise SystemExit(0)
        return resolve(config_class, words)
    except UserError as error:
        if not quiet:
            print(redacted(f"{program()}: error: {error}"), file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def resolve(config_class: type[ConfigT], argv: Sequence[str]) -> tuple[ConfigT, Flags]:
    """Like `parse`, but raises UserError with all mistakes, one a line."""
    leaves = {leaf.path: leaf for leaf in [*walk(config_class), *walk(Flags)]}
    check_recipe(config_class)
    typed = split(argv)
    files = [word for entry in typed if entry.name == "config" for word in entry.tokens]
    entries = [entry for file in files for entry in read_toml(file)] + typed

    mistakes = [text for entry in entries if (text := unknown(entry, leaves))]
    given = [entry for entry in entries if target(entry, leaves)]
    mistakes += [text for entry in given if (text := complaint(entry, leaves))]
    named = {target(entry, leaves) for entry in given}
    missing = [leaf.path for leaf in leaves.values() if leaf.required and leaf.path not in named]
    mistakes += [f"{spelled(path)} is required" for path in missing]
    if mistakes:
        raise UserError("\n  ".join([*dict.fromkeys(mistakes), "(--help lists every option)"]))
    last = {target(entry, leaves): entry for entry in given}
    words = [word for path, entry in last.items() for word in as_words(leaves[path], entry)]
    line = read(config_class, words)
    return line.recipe, line.flags


def read(config_class: type, words: list[str]) -> Any:
    """The whole command line through tyro. What fails here passed one by one: a group's own check."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            return tyro_cli(whole_line(config_class), words)
    except SystemExit:
        text = " ".join(re.sub(r"[^\x20-\x7e]+", " ", printed.getvalue()).split())
        raise UserError(
            text.partition(" For full helptext")[0] or "the options do not fit"
        ) from None


def walk(group: type, prefix: str = "") -> list[Leaf]:
    """The options of a dataclass and of the groups nested in it, in order."""
    hints = get_type_hints(group, include_extras=True)
    leaves: list[Leaf] = []
    for field in dataclasses.fields(group):
        if not field.init:
            continue
        kind, path = hints[field.name], f"{prefix}{field.name}"
        bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if dataclasses.is_dataclass(bare) and isinstance(bare, type):
            leaves += walk(bare, f"{path}.")
        else:
            required = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            leaves.append(Leaf(path, kind, required))
    return leaves


def check_recipe(config_class: type) -> None:
    """What a Config may not have: the launcher's own names, and places for secrets."""
    taken = {field.name for field in dataclasses.fields(Flags)}
    for leaf in walk(config_class):
        name = leaf.path.rpartition(".")[2]
        if leaf.path in taken:
            raise UserError(
                f"{config_class.__name__}.{name}: fsdprl has a flag of this name; rename it"
            )
        if SECRET.search(name):
            raise UserError(
                f"{config_class.__name__}.{leaf.path}: configs are written to config.json and to "
                f"trackers, so they hold no secrets; read it from the environment"
            )


def split(argv: Sequence[str]) -> list[Entry]:
    """Words into entries: a flag and the words up to the next one."""
    entries: list[Entry] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            name = flag[2:].replace("-", "_")
            entries.append(Entry(name, (value,) if equals else (), typed=flag))
        elif entries:
            entries[-1] = dataclasses.replace(entries[-1], tokens=(*entries[-1].tokens, word))
        else:
            raise UserError(f"{word!r}: expected a flag first, as in --steps 100")
    return entries


def target(entry: Entry, leaves: dict[str, Leaf]) -> str:
    """The option an entry sets, "" if there is none. --no-x and --group.no-x set x."""
    if entry.name in leaves:
        return entry.name if entry.file is None or entry.name not in FLAGS else ""
    if entry.file is None:
        group, dot, name = entry.name.rpartition(".")
        for path in (f"{group}{dot}{name.removeprefix('no_')}", entry.name.removeprefix("no_")):
            if path != entry.name and path in leaves and leaves[path].is_bool:
                return path
    return ""


FLAGS = frozenset(field.name for field in dataclasses.fields(Flags))


def unknown(entry: Entry, leaves: dict[str, Leaf]) -> str:
    """What is wrong with an entry's name, or ""."""
    inside = [path for path in leaves if path.startswith(f"{entry.name}.")]
    within_table = any(path in leaves for path in parents(entry.name))
    if target(entry, leaves) or (entry.table is not None and inside) or within_table:
        return ""
    if entry.file is not None and entry.name in FLAGS:
        return f"{entry.where()}: belongs on the command line, as {spelled(entry.name)}"
    if inside:
        names = ", ".join(shown(path, entry) for path in inside[:4])
        return (
            f"{entry.where()}: is a group of options: {names}{', ...' if len(inside) > 4 else ''}"
        )
    parent = entry.name.rpartition(".")[0]
    if (
        entry.file is not None
        and parent
        and not any(path.startswith(f"{parent}.") for path in leaves)
    ):
        return ""  # the table itself is reported
    meant = [shown(path, entry) for path in nearest(entry.name, list(leaves))]
    return f"{entry.where()}: no such option" + (
        f"; did you mean {' or '.join(meant)}?" if meant else ""
    )


def parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def shown(path: str, entry: Entry) -> str:
    return spelled(path) if entry.file is None else path


def spelled(path: str) -> str:
    """A dotted name as a flag: --run.save-every."""
    return f"--{path.replace('_', '-')}"


def complaint(entry: Entry, leaves: dict[str, Leaf]) -> str:
    """What is wrong with an entry's value, or "". tyro itself is the judge."""
    leaf = leaves[target(entry, leaves)]
    words, kind = values(entry), bare_type(leaf.type)
    if leaf.is_bool:
        if not words or (len(words) == 1 and words[0].lower() in BOOLEANS):
            return ""
        return f"{entry.where()}: {' '.join(words)!r} is not True or False"
    if accepted(leaf.type, words):
        return ""
    many = get_origin(kind) in (tuple, list, set, frozenset, dict)
    if not many and len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        return f"{entry.where()}: takes one value, {got}"
    element = next((arg for arg in get_args(kind) if arg is not Ellipsis), str) if many else kind
    bad = next((word for word in words if not accepted(element, [word])), " ".join(words))
    return f"{entry.where()}: {bad!r} is not {wanted(element, bad)}"


def values(entry: Entry) -> list[str]:
    """An entry's words; a TOML table for a dict option becomes key value key value."""
    if entry.table is None:
        return list(entry.tokens)
    return [str(word) for pair in entry.table.items() for word in pair]


def accepted(kind: Any, words: Sequence[str]) -> bool:
    """Whether tyro takes these words for a field of this type."""
    probe = dataclasses.make_dataclass("Probe", [("value", kind)])
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            tyro_cli(probe, flag_words("--value", words))
    except SystemExit:
        return False
    return True


def wanted(kind: Any, bad: str) -> str:
    """The type in words, and the choice that was probably meant."""
    kind = bare_type(kind)
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        close = closest_choice(bad, choices)
        return f"one of {', '.join(choices)}" + (f"; did you mean {close}?" if close else "")
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(wanted(arg, bad) for arg in get_args(kind))
    names = {int: "a whole number", float: "a number", bool: "True or False", type(None): "None"}
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")


def bare_type(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def as_words(leaf: Leaf, entry: Entry) -> list[str]:
    """An entry as tyro wants it."""
    words = values(entry)
    if not leaf.is_bool:
        return flag_words(spelled(leaf.path), words)
    on = (BOOLEANS[words[0].lower()] if words else True) is (entry.name == leaf.path)
    group, dot, name = leaf.path.rpartition(".")
    return [spelled(leaf.path if on else f"{group}{dot}no_{name}")]


def flag_words(flag: str, words: Sequence[str]) -> list[str]:
    # "=" keeps a value that begins with a hyphen from being taken for a flag.
    return [f"{flag}={words[0]}"] if len(words) == 1 else [flag, *words]


def whole_line(config_class: type) -> type:
    """The recipe's options and the launcher's, on one level."""
    import tyro

    flat = tyro.conf.arg(name="")
    fields = [("recipe", Annotated[config_class, flat]), ("flags", Annotated[Flags, flat])]
    return dataclasses.make_dataclass("Line", fields)


def tyro_cli(kind: Any, words: Sequence[str], **options: Any) -> Any:
    import tyro  # 0.3 s, and not needed where a config is made by hand

    return tyro.cli(kind, args=list(words), prog=program(), **options)


def print_help(config_class: type, quiet: bool) -> None:
    """Every option with its unit and default, under the recipe's own docstring."""
    about = sys.modules["__main__"].__doc__ or config_class.__doc__ or ""
    sink = io.StringIO() if quiet else sys.stdout
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sink):
        tyro_cli(whole_line(config_class), ["--help"], description=about)


def program() -> str:
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "recipe"


def to_dict(config: Any) -> dict[str, Any]:
    """A Config as JSON has it: tuples are lists, paths and enums are text."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict to dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
