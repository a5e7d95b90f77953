"""One step's numbers: merged from many calls, timed from spans, named as in the metrics reference."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdprl.controller import Span
from fsdprl.losses import add_sums

# Phases that may run beside the old log-probs: what of them was not hidden is reported as well.
OVERLAPPING = ("reference_model", "rule_reward", "reward_model", "adv")
ALSO = {
    "metric/pg_clipfrac": "clip_ratio/region_mean",
    "metric/pg_clipfrac_low": "clip_ratio/low_mean",
    "min/pg_clipfrac_low": "clip_ratio/low_min",
    "metric/pg_clipfrac_high": "clip_ratio/high_mean",
    "max/pg_clipfrac_high": "clip_ratio/high_max",
    "metric/kl_loss": "kl",
    "metric/entropy": "entropy/mean",
    "min/entropy": "entropy/min",
    "max/entropy": "entropy/max",
    "metric/acc": "rewards/accuracies",
    "metric/chosen_reward": "rewards/chosen",
    "metric/reject_reward": "rewards/rejected",
    "metric/margin": "rewards/margins",
    "metric/chosen_logp": "logps/chosen",
    "metric/reject_logp": "logps/rejected",
    "metric/nll": "nll_loss",
}
"""What TRL and ms-swift call numbers of an update, beside their own names here."""


class StepMetrics:
    """Metrics of one step. A name logged several times is averaged; under */max, */min and the like the
    extreme counts (see merge). Values may be numbers, booleans or tensors of one element."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Raises TypeError naming the metric that is not one number."""
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"metric {name!r} must be one number, got {value!r:.80}") from None
            self._values.setdefault(name, []).append(number)

    def merged(self) -> dict[str, float]:
        """One number a name, in the order of first mention."""
        return {name: merge(name, values) for name, values in self._values.items()}


def merge(name: str, values: Sequence[float]) -> float:
    """The largest of /max, /max_* and /*_max, the least of /min, /min_* and /*_min, the mean of anything else."""
    words = name.rpartition("/")[2].split("_")
    for how, extreme in (("max", max), ("min", min)):
        if how in (words[0], words[-1]):
            return extreme(values)
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)


def averaged(
    replies: Sequence[Mapping[str, float]], prefix: str, also: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Loss and metrics of an update from the sums of all ranks, under prefix/. also: sum -> what else it is called."""
    sums: dict[str, float] = {}
    for reply in replies:
        add_sums(sums, reply)
    found = {f"{prefix}/loss": sums.get("loss", 0.0)}
    for name, value in sums.items():
        kind, _, short = name.partition("/")
        if kind == "metric":
            value = found[f"{prefix}/{short}"] = value / (sums[f"weight/{short}"] or 1.0)
        if also and name in also:
            found[also[name]] = value
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in the union of (start, end) intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def timings(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """timing/<phase> seconds inside [start, end], timing/all, what of the overlapping phases was
    not hidden behind old_log_p, and timing/controller_overhead: the share of the step, 0 to 1, that
    no phase covers."""
    inside = [
        Span(span.name, max(span.start, start), min(span.end, end))
        for span in spans
        if span.end > start and span.start < end
    ]
    phases: dict[str, list[tuple[float, float]]] = {}
    for span in inside:
        phases.setdefault(span.name, []).append((span.start, span.end))
    whole = end - start
    seconds = {"timing/all": whole}
    seconds |= {f"timing/{name}": covered(times) for name, times in phases.items()}
    if "old_log_p" in phases:
        behind = max(stop for _, stop in phases["old_log_p"])
        for name in OVERLAPPING:
            if name in phases:
                first, last = min(s for s, _ in phases[name]), max(e for _, e in phases[name])
                hidden = behind if name == "adv" else max(behind, first)
                seconds[f"timing/non_overlap_{name}"] = max(last - hidden, 0.0)
    busy = covered((span.start, span.end) for span in inside)
    seconds["timing/controller_overhead"] = max(0.0, 1.0 - busy / whole) if whole > 0 else 0.0
    return seconds


def throughput(
    seconds: Mapping[str, float], counts: Mapping[str, float], world_size: int
) -> dict[str, float]:
    """Tokens per second and rank: e2e_tps over the step, update_tps and vllm_tps over its phases.

    `tokens` counts prompt and response tokens of all samples of the step, each once (mean response
    + mean prompt length, times samples), for all three; evaluation is not counted.
    """
    tokens = counts.get("tokens", 0.0) / world_size
    phases = {"e2e_tps": "all", "update_tps": "update", "vllm_tps": "rollout"}
    return {
        name: tokens / seconds[f"timing/{phase}"]
        for name, phase in phases.items()
        if tokens and seconds.get(f"timing/{phase}", 0.0) > 0
    }


def counted(counts: Mapping[str, float]) -> dict[str, float]:
    """Counters of the step as metrics: tokens, reward/failed, wire/sent (bytes), ...

    rollout/cache_hit_rate is the share of prompt tokens that the engine did not compute again.
    """
    metrics = {name.replace(".", "/"): amount for name, amount in counts.items()}
    if prompts := counts.get("rollout/prompt_tokens"):
        metrics["rollout/cache_hit_rate"] = counts["rollout/cached_prompt_tokens"] / prompts
    return metrics


def jsonable(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON knows no NaN or infinity: they become null."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
