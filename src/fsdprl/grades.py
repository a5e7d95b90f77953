"""How a batch is graded: what is sent to the ranks, and what their scores and failures mean."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdprl.controller import current
from fsdprl.errors import UserError
from fsdprl.functions import function_ref
from fsdprl.options import RewardOptions

if TYPE_CHECKING:
    from fsdprl.batch import Batch


@dataclass(frozen=True)
class Grades:
    """One reward's verdicts on N rows."""

    scores: Tensor
    """float64 [N], NaN where the reward does not apply (it returned None) and where it failed."""
    failed: Tensor
    """bool [N]: its process hung or died, or it raised UnscoredError."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of what it logged by TRL's log_metric."""


def grade(
    batch: "Batch",
    fn: Callable[..., Any],
    options: RewardOptions | None = None,
    *,
    name: str = "",
    turn: int = -1,
) -> Grades:
    """Run a reward function over every row, in killable processes beside the text.

    name: rows whose dataset lists the rewards that count for it are graded only if it is among them. turn: which of
    the model's turns in a conversation is the response. Failures are
    counted in `reward/failed`. Raises UserError where more than options.max_failed_share of the rows fail (one is
    always allowed, unless the share is 0), and for a reward over groups whose answers are on several ranks.
    """
    options = options or RewardOptions()
    controller = current()
    ref = function_ref(fn)
    positions = batch.by_rank()
    payload: list[dict[str, Any]] = [
        {
            "rows": batch.row_ids[where],
            "fn": {"module": ref.module, "qualname": ref.qualname, "kwargs": ref.kwargs},
            "options": asdict(options),
            "name": name,
            "step": controller.step,
            "turn": turn,
        }
        for where in positions
    ]
    unit = 1
    if _rewards_groups(fn):
        groups = _groups(batch)
        unit = int(groups.unique(return_counts=True)[1].max()) if len(batch) else 1
        for part, where in zip(payload, positions, strict=True):
            part["groups"] = groups[where]
    allowed = options.failures_allowed(len(batch), unit)
    for part in payload:
        part["allowed"] = allowed
    replies = controller.call("rows.grade", payload, phase="rule_reward").wait()
    failed = [
        (int(where[index]), cause)
        for where, reply in zip(positions, replies, strict=True)
        for index, cause in reply["failed"]
    ]
    controller.timeline.count("reward/failed", len(failed))
    if len(failed) > allowed:
        place, cause = failed[0]
        raise UserError(
            f"reward {ref.qualname} failed on {len(failed)} of {len(batch)} samples, more than "
            f"--reward.max-failed-share {options.max_failed_share}; the first was row "
            f"{int(batch.row_ids[place])}: {cause}"
        )
    down = torch.zeros(len(batch), dtype=torch.bool)
    down[[place for place, _ in failed]] = True
    logged: dict[str, list[float]] = {}
    for reply in replies:
        for key, value in reply["metrics"]:
            logged.setdefault(key, []).append(value)
    metrics = {key: sum(values) / len(values) for key, values in logged.items()}
    return Grades(batch.gather(positions, [reply["scores"] for reply in replies]), down, metrics)


def _rewards_groups(fn: Callable[..., Any]) -> bool:
    while hasattr(fn, "func"):
        fn = fn.func  # type: ignore[attr-defined]
    call = fn.__call__ if isinstance(fn, type) else fn
    return "group" in getattr(call, "__code__", _NO_CODE).co_varnames


class _NO_CODE:
    co_varnames = ()


def _groups(batch: "Batch") -> Tensor:
    """The group of each row, int64 [N]. Raises UserError where a group is not on one rank."""
    groups, ranks = batch["group"], batch.ranks
    for group in groups.unique():
        if len(ranks[groups == group].unique()) > 1:
            raise UserError(
                "a reward over whole groups needs a group's answers on one rank: score the batch before "
                "batch.rebalance()"
            )
    return groups
