"""Named moments of a job: where a test can make things go wrong, or anyone can watch a rank at work.

A rank reaches the name of every verb it is told to run ("engine.generate", "model.optim_step", ...) just
before it runs. The controller reaches "step" when one begins, "seal" and "commit" as a checkpoint
becomes whole and then counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Moment:
    """What a listener is told, in the thread that reaches it."""

    name: str
    rank: int
    step: int
    """The training step under way."""
    facts: dict[str, Any] = field(default_factory=dict)
    """On a rank: the worker, and the payload of its verb."""


listeners: list[Callable[[Moment], None]] = []
"""Called in turn at every moment of this process. Nothing in fsdprl adds one."""


def reached(name: str, *, rank: int, step: int, **facts: Any) -> None:
    """Tell whoever listens. What a listener raises comes out here."""
    for listener in listeners:
        listener(Moment(name, rank, step, facts))
