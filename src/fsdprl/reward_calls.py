"""How a reward function is called, and what counts as a reward. Runs in reward processes.

Samples of plain functions are graded one after the other, so that the first one missing is at fault when a process
dies; those of `async` functions concurrently; groups and TRL's lists in one call each (see reward_forms.py).
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

from fsdprl.errors import UnscoredError
from fsdprl.reward_forms import Log, batch_arguments, form_of, is_async, made, sample_arguments
from fsdprl.sample import Sample

Emit = Callable[["Outcome"], None]


class Outcome(msgspec.Struct, array_like=True):
    """What became of one sample (`index` is its ordinal in the chunk), or of the chunk."""

    index: int
    kind: str
    """score | raised | invalid | timeout | unscored; of a chunk: ready | unusable | miscounted | undecided.
    Beside them what a reward logs: extra (text: a JSON name and value), of a chunk metric (text: its name)."""
    score: float | None = None
    text: str = ""


def in_order(fn: Callable[..., Any]) -> bool:
    """Whether samples are graded one after the other, so that the first one missing is at fault."""
    form = form_of(fn)
    return form == "group" or (form != "batch" and not is_async(fn))


def grade_chunk(
    fn: Callable[..., Any], samples: Sequence[Sample], emit: Emit, *, timeout_s: float | None
) -> None:
    """Call `fn` on the samples and emit an Outcome for each as soon as it is known.

    An exception is an outcome, except in an interpreter that is being interrupted. timeout_s bounds
    each await of async functions; nothing here can bound plain ones, their process is killed.
    """
    form = form_of(fn)
    if form == "batch":
        _grade_list(fn, samples, range(len(samples)), emit, timeout_s)
    elif form == "group":
        groups: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            groups.setdefault(sample.group, []).append(index)
        for members in groups.values():
            _grade_list(fn, samples, members, emit, timeout_s)
    elif is_async(fn):
        _event_loop().run_until_complete(_grade_together(fn, samples, emit, timeout_s))
    else:
        call = made(fn)
        for index, sample in enumerate(samples):
            try:
                positional, named = sample_arguments(fn, sample)
                outcome = scored(index, call(*positional, **named))
            except UnscoredError as error:
                outcome = Outcome(index, "unscored", text=str(error))
            except (Exception, SystemExit) as error:
                outcome = Outcome(index, "raised", text=_trace(error))
            emit(outcome)


def scored(index: int, value: Any) -> Outcome:
    """The value as a score: a finite number, a boolean or a 0-d array; None is not applicable."""
    if value is None:
        return Outcome(index, "score")
    if isinstance(value, dict):
        value = value.get("score", value)  # verl's functions may return more beside it
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return Outcome(index, "score", float(value))
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return Outcome(index, "invalid", text=f"{shown} ({type(value).__name__})")


def _grade_list(
    fn: Callable[..., Any],
    samples: Sequence[Sample],
    indices: Sequence[int],
    emit: Emit,
    timeout_s: float | None,
) -> None:
    """One call for the samples at these indices, which returns a list."""
    some = [samples[index] for index in indices]
    first = indices[0]
    try:
        grouped = form_of(fn) == "group"
        log = Log(len(some))
        values = made(fn)(some) if grouped else made(fn)(**batch_arguments(fn, some, log))
        if inspect.isawaitable(values):
            values = _event_loop().run_until_complete(_bounded(values, timeout_s))
        if isinstance(values, str) or not hasattr(values, "__len__"):
            emit(Outcome(first, "miscounted", text=f"a {type(values).__name__}"))
            return
    except _OverdueError:
        if len(some) == len(samples) > 1 and form_of(fn) == "batch":
            emit(Outcome(first, "undecided"))
            return
        for index in indices:
            emit(Outcome(index, "timeout"))
        return
    except UnscoredError as error:
        for index in indices:
            emit(Outcome(index, "unscored", text=str(error)))
        return
    except (Exception, SystemExit) as error:
        emit(Outcome(first, "raised", text=_trace(error)))
        return
    if len(values) != len(some):
        emit(Outcome(first, "miscounted", text=f"{len(values)} rewards"))
        return
    for name, number in log.metrics:
        emit(Outcome(first, "metric", number, name))
    for name, column in log.extras.items():
        for index, value in zip(indices, column, strict=True):
            text = msgspec.json.encode([name, value], enc_hook=str).decode()
            emit(Outcome(index, "extra", text=text))
    for index, value in zip(indices, values, strict=True):
        emit(scored(index, value))


async def _grade_together(
    fn: Callable[..., Any], samples: Sequence[Sample], emit: Emit, timeout_s: float | None
) -> None:
    call = made(fn)

    async def one(index: int, sample: Sample) -> None:
        try:
            positional, named = sample_arguments(fn, sample)
            emit(scored(index, await _bounded(call(*positional, **named), timeout_s)))
        except _OverdueError:
            emit(Outcome(index, "timeout"))
        except UnscoredError as error:
            emit(Outcome(index, "unscored", text=str(error)))
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
