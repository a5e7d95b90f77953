"""Functions travel by name: module, qualified name and keyword arguments. No pickle, no source."""

import functools
import importlib
import importlib.util
import inspect
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from fsdprl import swift_names
from fsdprl.errors import UserError


class FunctionRef(msgspec.Struct, frozen=True):
    """A module-level function (or class attribute such as `Tasks.grade`) with bound keywords."""

    module: str
    qualname: str
    kwargs: dict[str, Any] = {}

    def __str__(self) -> str:
        bound = ", ".join(f"{k}={v!r}" for k, v in self.kwargs.items())
        return f"{self.module}:{self.qualname}" + (f"({bound})" if bound else "")


def function_ref(fn: Callable[..., Any]) -> FunctionRef:
    """Name a function, so that every rank finds the same one in its own copy of the file.

    fn: module-level function, or `functools.partial` of one with keyword arguments only.
    Raises UserError for lambdas, closures, bound methods, functions defined inside functions,
    and for names that no longer lead to `fn` (decorated or redefined).
    """
    kwargs: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        if fn.args:
            raise UserError(
                f"{_shown(fn.func)}: partial binds positional arguments {fn.args!r}; "
                f"functions travel by name with keyword arguments: write partial(fn, name=value)"
            )
        kwargs = {**fn.keywords, **kwargs}
        fn = fn.func
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    remedy = "define it with def at the top of the recipe, and bind settings with partial(fn, k=v)"
    if not module or not qualname or not callable(fn):
        raise UserError(f"{fn!r} is not a function: {remedy}")
    if inspect.ismethod(fn):
        raise UserError(f"{_shown(fn)} is a bound method and cannot travel by name: {remedy}")
    if "<" in qualname:
        what = "a lambda" if "<lambda>" in qualname else "defined inside another function"
        raise UserError(f"{_shown(fn)} is {what} and cannot travel by name: {remedy}")
    if _lookup(module, qualname) is not fn:
        raise UserError(f"{_shown(fn)}: {module}:{qualname} is now something else: {remedy}")
    _check_travels(fn, kwargs)
    return FunctionRef(module, qualname, kwargs)


def resolve(ref: FunctionRef) -> Callable[..., Any]:
    """The function that `ref` names, its keywords bound. `__main__` is this rank's recipe.

    Raises UserError if the module or the name is missing on this rank.
    """
    fn = _lookup(ref.module, ref.qualname)
    if not callable(fn):
        raise UserError(f"{ref.module}:{ref.qualname} is not a function on this rank")
    return functools.partial(fn, **ref.kwargs) if ref.kwargs else fn


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters (columns); keyword-only ones are hyperparameters.

    Raises UserError for *args or **kwargs, for positional parameters with a default, for a partial
    keyword that the function does not take, and for hyperparameters with neither value nor default.
    """
    bound: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        bound = {**fn.keywords, **bound}
        fn = fn.func
    names: list[str] = []
    hyper: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(f"{_shown(fn)}: {parameter} hides which columns it reads: name them")
        if parameter.kind is parameter.KEYWORD_ONLY:
            hyper[name] = parameter
        elif parameter.default is not parameter.empty:
            raise UserError(
                f"{_shown(fn)}: parameter {name!r} has a default, so it is a hyperparameter: "
                f"put it after a bare * in the signature"
            )
        else:
            names.append(name)
    if unknown := sorted(set(bound) - set(hyper)):
        raise UserError(
            f"{_shown(fn)}: partial binds {', '.join(unknown)}, but its hyperparameters "
            f"(the parameters after a bare *) are: {', '.join(hyper) or 'none'}"
        )
    unset = [n for n, p in hyper.items() if p.default is p.empty and n not in bound]
    if unset:
        raise UserError(
            f"{_shown(fn)}: no value for {', '.join(unset)}: "
            f"bind it with partial({fn.__name__}, {unset[0]}=...)"
        )
    return tuple(names)


def import_named(module: str) -> ModuleType:
    """Import a module by its dotted name, or a plug-in file by its path, which becomes its name.

    Modules that stand beside a plug-in file can be imported by it. Raises ImportError, UserError if there is no
    such file, and whatever the module raises.
    """
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module).expanduser().resolve()
    name = str(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"{module}: no such file on {socket.gethostname()}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        try:
            spec.loader.exec_module(made)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "swift":
                raise
            swift_names.stand_in()
            spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made


def _lookup(module: str, qualname: str) -> Any:
    try:
        found: Any = sys.modules.get(module) or import_named(module)
    except ImportError as error:
        raise UserError(f"{module}:{qualname}: cannot import {module}: {error}") from None
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _check_travels(fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        try:
            same = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        except TypeError:
            same = None
        if same is None and value is not None:
            raise UserError(
                f"{_shown(fn)}: {name} is a {type(value).__name__}; bound arguments must be "
                f"numbers, strings, booleans, None, or lists and dicts of those"
            )


def _shown(fn: Any) -> str:
    """The function with its place in the source, for messages."""
    name = getattr(fn, "__qualname__", repr(fn))
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
