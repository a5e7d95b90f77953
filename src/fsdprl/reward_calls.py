"""How a reward function is called, and what counts as a reward. Runs in reward processes.

Three forms are told apart by their signature:

- `fn(sample) -> float | None`, one call per sample;
- TRL's `fn(prompts, completions, **columns) -> list[float | None]`, one call per chunk;
- `async def` of either, the samples of a chunk concurrently.
"""

import asyncio
import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fsdprl.sample import Sample

Emit = Callable[["Outcome"], None]


class Outcome(msgspec.Struct, array_like=True):
    """What became of one sample (`index` is its ordinal in the chunk), or of the chunk."""

    index: int
    kind: str
    """score | raised | invalid | timeout; of a chunk: ready | unusable | miscounted | undecided."""
    score: float | None = None
    text: str = ""


def in_order(fn: Callable[..., Any]) -> bool:
    """Whether samples are graded one after the other, so that the first one missing is at fault."""
    return not takes_batch(fn) and not _is_async(fn)


def takes_batch(fn: Callable[..., Any]) -> bool:
    """Whether `fn` has TRL's form: a parameter called `completions` or `prompts`."""
    return not {"completions", "prompts"}.isdisjoint(_parameters(fn))


def grade_chunk(
    fn: Callable[..., Any], samples: Sequence[Sample], emit: Emit, *, timeout_s: float | None
) -> None:
    """Call `fn` on the samples and emit an Outcome for each as soon as it is known.

    An exception is an outcome, except in an interpreter that is being interrupted. timeout_s bounds
    each await of async functions; nothing here can bound plain ones, their process is killed.
    """
    if takes_batch(fn):
        _grade_batch(fn, samples, emit, timeout_s)
    elif _is_async(fn):
        _event_loop().run_until_complete(_grade_together(fn, samples, emit, timeout_s))
    else:
        for index, sample in enumerate(samples):
            try:
                outcome = scored(index, fn(sample))
            except (Exception, SystemExit) as error:
                outcome = Outcome(index, "raised", text=_trace(error))
            emit(outcome)


def scored(index: int, value: Any) -> Outcome:
    """The value as a score: a finite number, a boolean or a 0-d array; None is not applicable."""
    if value is None:
        return Outcome(index, "score")
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return Outcome(index, "score", float(value))
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return Outcome(index, "invalid", text=f"{shown} ({type(value).__name__})")


def _grade_batch(
    fn: Callable[..., Any], samples: Sequence[Sample], emit: Emit, timeout_s: float | None
) -> None:
    try:
        values = fn(**_batch_arguments(fn, samples))
        if inspect.isawaitable(values):
            values = _event_loop().run_until_complete(_bounded(values, timeout_s))
        if isinstance(values, str) or not hasattr(values, "__len__"):
            emit(Outcome(0, "miscounted", text=f"a {type(values).__name__}"))
            return
    except _OverdueError:
        emit(Outcome(0, "timeout" if len(samples) == 1 else "undecided"))
        return
    except (Exception, SystemExit) as error:
        emit(Outcome(0, "raised", text=_trace(error)))
        return
    if len(values) != len(samples):
        emit(Outcome(0, "miscounted", text=f"{len(values)} rewards"))
        return
    for index, value in enumerate(values):
        emit(scored(index, value))


async def _grade_together(
    fn: Callable[..., Any], samples: Sequence[Sample], emit: Emit, timeout_s: float | None
) -> None:
    async def one(index: int, sample: Sample) -> None:
        try:
            emit(scored(index, await _bounded(fn(sample), timeout_s)))
        except _OverdueError:
            emit(Outcome(index, "timeout"))
        except (Exception, SystemExit) as error:
            emit(Outcome(index, "raised", text=_trace(error)))

    await asyncio.gather(*(one(index, sample) for index, sample in enumerate(samples)))


class _OverdueError(Exception):
    """Our deadline passed; a TimeoutError of the function's own is an error like any other."""


async def _bounded(awaitable: Any, timeout_s: float | None) -> Any:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await awaitable
    except TimeoutError:
        if deadline.expired():
            raise _OverdueError from None
        raise


def _batch_arguments(fn: Callable[..., Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """TRL's keyword arguments: prompts, completions and every dataset column, as lists.

    Message prompts give message completions, as TRL does. A function without ** gets only the
    columns that it names.
    """
    columns: dict[str, Any] = {}
    for key in {key: None for sample in samples for key in sample.meta}:
        columns[key] = [sample.meta.get(key) for sample in samples]
    columns.setdefault("answer", [sample.answer for sample in samples])
    columns["prompts"] = [s.messages if s.messages else s.prompt for s in samples]
    columns["completions"] = [
        [{"role": "assistant", "content": s.response}] if s.messages else s.response
        for s in samples
    ]
    parameters = _parameters(fn)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return columns
    return {name: values for name, values in columns.items() if name in parameters}


def _parameters(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(fn).parameters)


def _is_async(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the life of the process, so that clients a reward module keeps stay usable."""
    return asyncio.new_event_loop()


def _trace(error: BaseException) -> str:
    """The traceback from the user's function on: our own frames say nothing to its author."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
