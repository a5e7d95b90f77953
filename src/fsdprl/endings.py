"""How the end of a job reads: exit code, the text on the terminal, and the cause in status.json."""

import bdb
import signal
import traceback
from pathlib import Path
from typing import Any

from fsdprl.errors import Interrupted, NonFiniteError, RemoteError, UserError


def describe(error: BaseException, recipe: Path) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text for people, and cause (kind, message; rank, host, phase of a rank's failure)."""
    where = recipe_line(error, recipe)
    if isinstance(error, RemoteError):
        message = error.message + where
        text = f"{error.text.rstrip()}\n\nfsdprl: {message}" if error.text else f"fsdprl: {message}"
        fields: dict[str, Any] = {"rank": error.rank, "host": error.host, "phase": error.phase}
        if error.stacks:
            fields["stacks"] = error.stacks
        return 1, text, {"kind": error.kind, "message": message, **fields}
    if isinstance(error, NonFiniteError):
        message = f"{error}{where}"
        return 1, f"fsdprl: {message}", {"kind": "nonfinite", "phase": "update", "message": message}
    if isinstance(error, UserError):
        return 2, f"fsdprl: {error}", {"kind": "user", "message": str(error)}
    if isinstance(error, KeyboardInterrupt):
        number = error.signum if isinstance(error, Interrupted) else signal.SIGINT
        message = f"interrupted by {signal.Signals(number).name}{where}"
        return 128 + number, f"fsdprl: {message}", {"kind": "interrupted", "message": message}
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = "" if isinstance(error.code, int | None) else str(error.code)
        return code, text, {"kind": "exit", "message": text or f"exit code {code}"}
    if isinstance(error, bdb.BdbQuit):
        message = f"left the debugger{where}"
        return 1, f"fsdprl: {message}", {"kind": "exit", "message": message}
    message = f"{type(error).__name__}: {error}"
    return 1, _traceback(error, recipe), {"kind": "error", "message": message}


def _traceback(error: BaseException, recipe: Path) -> str:
    """The traceback from the recipe's first line on; whole if the recipe is not in it."""
    start = error.__traceback__
    while start and Path(start.tb_frame.f_code.co_filename).resolve() != recipe:
        start = start.tb_next
    lines = traceback.format_exception(type(error), error, start or error.__traceback__)
    return "".join(lines).rstrip()


def recipe_line(error: BaseException, recipe: Path) -> str:
    """Which line of the recipe was running, as the end of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [line for line in frames if Path(line.filename).resolve() == recipe]
    named = [line for line in lines if line.name != "<module>"]
    return f" (at {recipe.name}:{named[-1].lineno} in {named[-1].name})" if named else ""
