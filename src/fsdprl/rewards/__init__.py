"""Rewards to use as they are or to copy: each is a module-level `fn(sample) -> float | None`.

Bind settings with `functools.partial(fn, name=value)`. Nothing heavy is imported before it is used.
"""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from fsdprl.errors import UserError
from fsdprl.rewards.math import math_accuracy as math_accuracy
from fsdprl.rewards.numeric import numeric_match as numeric_match
from fsdprl.rewards.text import contains_answer as contains_answer
from fsdprl.rewards.text import exact_match as exact_match
from fsdprl.rewards.text import soft_overlong as soft_overlong
from fsdprl.rewards.text import think_answer_format as think_answer_format

BUILT_IN: dict[str, Callable[..., Any]] = {
    "accuracy": math_accuracy,
    "numeric": numeric_match,
    "exact": exact_match,
    "contains": contains_answer,
    "format": think_answer_format,
}
"""Names for the command line."""


def named(name: str, *, flag: str = "--rewards") -> Callable[..., Any]:
    """The reward called `name`: a built-in one, or `module:function` of a module that imports.

    Raises UserError naming `flag` and the nearest built-in name.
    """
    module, colon, function = name.partition(":")
    if not colon:
        if name in BUILT_IN:
            return BUILT_IN[name]
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(BUILT_IN)}"
        raise UserError(f"{flag} {name}: no such reward; {hint} (or module:function)")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise UserError(f"{flag} {name}: cannot import {module}: {error}") from None
    if not callable(found):
        raise UserError(f"{flag} {name}: {module} has no function {function}")
    return found
