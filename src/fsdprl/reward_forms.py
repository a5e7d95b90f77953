"""The forms in which people bring rewards, and how each is called on samples.

Told apart by the names of the parameters:

- `fn(sample)`: one call a sample; further parameters without a default are columns of the dataset;
- `fn(group)`: all samples of one prompt, in one call that returns a list;
- TRL's `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`: one call a chunk;
- ms-swift's classes, `__call__(self, completions, **columns)`: likewise, completions as texts;
- verl's `fn(data_source, solution_str, ground_truth, extra_info)`: one call a sample.

Each may be `async`. A class is made once a process, without arguments or with those bound by `partial`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from fsdprl.errors import UserError
from fsdprl.sample import Sample

Form = Literal["sample", "group", "batch", "verl"]


@functools.lru_cache(64)  # signatures take longer to read than quick rewards take to run
def form_of(fn: Callable[..., Any]) -> Form:
    """Which of the forms a function, a callable object or a class has."""
    names = parameters(fn)
    if not {"completions", "prompts"}.isdisjoint(names):
        return "batch"
    if "group" in names:
        return "group"
    return "verl" if {"solution_str", "ground_truth"} <= set(names) else "sample"


@functools.lru_cache(64)
def parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters that a call must fill: of a class those of its `__call__`; what is bound is left out."""
    bare, bound = _bare(fn)
    if inspect.isclass(bare):
        call = inspect.signature(bare.__call__).parameters
        return dict(list(call.items())[1:])
    return {k: p for k, p in inspect.signature(bare).parameters.items() if k not in bound}


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calls return something to await."""
    bare, _ = _bare(fn)
    if inspect.isclass(bare) or not inspect.isroutine(bare):
        bare = getattr(bare, "__call__", bare)  # noqa: B004
    return inspect.iscoroutinefunction(bare)


def made(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or this process's one object of a class."""
    bare, bound = _bare(fn)
    if not inspect.isclass(bare):
        return fn
    key = (bare, repr(sorted(bound.items())))
    if key not in _objects:
        needed = [
            name
            for name, p in inspect.signature(bare).parameters.items()
            if p.default is p.empty
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and name not in bound
        ]
        # ms-swift gives its training arguments to rewards that ask for them: there are none here.
        _objects[key] = bare(**bound | dict.fromkeys(needed))
    return _objects[key]


_objects: dict[Any, Any] = {}


@dataclass
class Log:
    """What TRL's rewards log beside their scores."""

    size: int
    """Completions of the call."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        """TRL's log_metric: a number that is averaged over calls and logged with the step."""
        self.metrics.append((str(name), float(value)))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's log_extra: a column of the completions file, one value a completion."""
        if isinstance(values, str) or len(values) != self.size:
            raise ValueError(f"log_extra({column!r}) needs {self.size} values, one a completion")
        self.extras[str(column)] = list(values)


def batch_arguments(
    fn: Callable[..., Any], samples: Sequence[Sample], log: Log | None = None
) -> dict[str, Any]:
    """TRL's and ms-swift's keyword arguments: prompts, completions and every dataset column, as lists.

    log: takes what the function logs.
    Message prompts give message completions, as in TRL; classes always get texts, as in ms-swift.
    A function without ** gets only what it names. Raises UserError naming a column that is missing.
    """
    columns: dict[str, Any] = {}
    for key in {key: None for sample in samples for key in sample.meta}:
        columns[key] = [sample.meta.get(key) for sample in samples]
    columns.setdefault("answer", [sample.answer for sample in samples])
    columns.setdefault("solution", columns["answer"])  # the column that ms-swift's rewards read
    texts = inspect.isclass(_bare(fn)[0])
    columns["prompts"] = [s.messages if s.messages and not texts else s.prompt for s in samples]
    columns["completions"] = [_completion(sample, texts) for sample in samples]
    columns["completion_ids"] = columns["response_token_ids"] = [s.ids for s in samples]
    columns["trainer_state"] = SimpleNamespace(global_step=samples[0].step if samples else 0)
    log = log or Log(len(samples))
    columns["log_extra"], columns["log_metric"] = log.extra, log.metric
    wanted = parameters(fn)
    missing = [n for n, p in wanted.items() if _required(p) and n not in columns]
    if missing:
        raise UserError(_no_column(missing[0], columns))
    if any(p.kind is p.VAR_KEYWORD for p in wanted.values()):
        return columns
    return {name: values for name, values in columns.items() if name in wanted}


def sample_arguments(fn: Callable[..., Any], sample: Sample) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of one call for `sample`. Raises UserError for a missing column."""
    if form_of(fn) == "verl":
        given = {
            "data_source": sample.meta.get("data_source", sample.meta.get("source", "")),
            "solution_str": sample.response,
            "ground_truth": sample.answer,
            "extra_info": sample.meta.get("extra_info"),
        }
        wanted = parameters(fn)
        if any(p.kind is p.VAR_KEYWORD for p in wanted.values()):
            return [], given
        return [], {name: value for name, value in given.items() if name in wanted}
    columns = {}
    for name, parameter in list(parameters(fn).items())[1:]:
        if _required(parameter):
            if name not in sample.meta:
                raise UserError(_no_column(name, sample.meta))
            columns[name] = sample.meta[name]
    return [sample], columns


def _completion(sample: Sample, texts: bool) -> Any:
    if texts or not sample.messages:
        return sample.response
    return sample.turns or [{"role": "assistant", "content": sample.response}]


def _required(parameter: inspect.Parameter) -> bool:
    fills = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return fills and parameter.default is parameter.empty


def _no_column(name: str, columns: Any) -> str:
    return (
        f"it asks for a dataset column {name!r}; the rows have {', '.join(columns) or 'none'} "
        f"(bind settings: --rewards 'name({name}=...)' or functools.partial)"
    )


def _bare(fn: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    bound: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        bound = {**fn.keywords, **bound}
        fn = fn.func
    return fn, bound
