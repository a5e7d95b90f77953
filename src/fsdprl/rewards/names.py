"""What --rewards names: a built-in reward, `module:function`, or `path/to/file.py:function`, with settings."""

import ast
import difflib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from fsdprl.errors import UserError
from fsdprl.functions import function_ref, import_named
from fsdprl.rewards import BUILT_IN


def named(text: str, *, flag: str = "--rewards") -> Callable[..., Any]:
    """The reward that a text names: `accuracy`, `cosine(max_length=512)`, `package.module:function`,
    `path/to/file.py:function` or `path/to/file.py:Class`; settings in brackets are Python literals.

    Raises UserError naming `flag` and the nearest built-in name, setting or function.
    """
    call, settings = _settings(text, flag)
    module, colon, function = call.rpartition(":")
    found = _member(module, function, text, flag) if colon else _built_in(call, text, flag)
    for name, parameter in _settable(found).items():
        # Another's function may take a column of the dataset like that.
        if not colon and parameter.default is parameter.empty and name not in settings:
            raise UserError(f"{flag} {text}: needs a value: write '{call}({name}=...)'")
    if unknown := [name for name in settings if not _takes(found, name)]:
        known = ", ".join(_settable(found)) or "none"
        raise UserError(f"{flag} {text}: {call} has no setting {unknown[0]!r}; known are {known}")
    if settings:
        found = functools.partial(found, **settings)
    function_ref(found)
    return found


def short_names(texts: list[str]) -> list[str]:
    """How rewards are called in metrics and columns: without module, path and settings; a number behind repeated
    ones. Built-in names stay as they are."""
    names: list[str] = []
    for text in texts:
        name = text.partition("(")[0].rpartition(":")[2]
        count = 2
        while (unique := name if count == 2 and name not in names else f"{name}_{count}") in names:
            count += 1
        names.append(unique)
    return names


def _settings(text: str, flag: str) -> tuple[str, dict[str, Any]]:
    """(`name`, settings) of `name(setting=literal, ...)`."""
    name, bracket, _ = text.partition("(")
    if not bracket:
        return text, {}
    try:
        call = ast.parse(f"f({text[len(name) + 1 :]}", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args and all(k.arg for k in call.keywords)
        return name, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise UserError(
            f"{flag} {text}: settings are written as 'name(setting=value, ...)', with numbers or quoted texts"
        ) from None


def _built_in(name: str, text: str, flag: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(BUILT_IN)}"
    raise UserError(
        f"{flag} {text}: no such reward; {hint} (or module:function, or path/to/file.py:function)"
    )


def _member(module: str, function: str, text: str, flag: str) -> Callable[..., Any]:
    try:
        imported = import_named(module)
    except ImportError as error:
        raise UserError(f"{flag} {text}: cannot import {module}: {error}") from None
    except UserError:
        raise UserError(f"{flag} {text}: no such file: {module}") from None
    except Exception as error:
        raise UserError(
            f"{flag} {text}: importing {module} raised {type(error).__name__}: {error}"
        ) from error
    found = getattr(imported, function, None)
    if found is None:  # ms-swift's plug-ins put their classes into a dict, by another name
        found = getattr(sys.modules.get("swift.plugin"), "orms", {}).get(function)
    if not callable(found):
        there = [
            name for name, value in vars(imported).items() if callable(value) and name[0] != "_"
        ]
        near = difflib.get_close_matches(function, there, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{flag} {text}: {module} has no function {function}{hint}")
    return found


def _settable(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Keyword-only parameters; of a class also those of its constructor."""
    parameters = inspect.signature(fn).parameters
    if inspect.isclass(fn):
        return {name: p for name, p in parameters.items() if p.default is not p.empty}
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _takes(fn: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(fn).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
