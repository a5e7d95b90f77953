"""The few names that ms-swift's reward plug-ins import, for machines without ms-swift.

A plug-in file begins with `from swift.plugin import ORM, orms` (`swift.rewards` since version 4) and ends with
`orms["name"] = Class`. Neither name does more there than here: a class to inherit from, and a dict.
"""

import logging
import sys
from types import ModuleType
from typing import Any


class ORM:
    """What reward classes inherit from. `args` are ms-swift's training arguments: None here."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError("a reward class defines __call__(self, completions, **columns)")


class AsyncORM(ORM):
    """Of those whose `__call__` is async."""


def stand_in() -> None:
    """Put modules with these names where the imports of a plug-in file find them."""
    registry: dict[str, type] = {}
    names = {
        "ORM": ORM,
        "AsyncORM": AsyncORM,
        "orms": registry,
        "rm_plugins": {},
        "get_logger": lambda *_: logging.getLogger("swift"),
    }
    for name in ("swift", "swift.plugin", "swift.plugin.orm", "swift.rewards", "swift.utils"):
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(names)
        module.__path__ = []  # submodules may be asked for
