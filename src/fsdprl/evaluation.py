"""Evaluation on held-out prompts, in a recipe's loop or by scripts/evaluate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdprl.batch import Batch
from fsdprl.data.mixture import SOURCES
from fsdprl.data.prompt import Prompt
from fsdprl.errors import UserError
from fsdprl.estimates import mean_ci95, pass_at_k
from fsdprl.options import TurnOptions

if TYPE_CHECKING:
    from fsdprl.prompts import Prompts
    from fsdprl.run import Run
    from fsdprl.sampler import Sampler
    from fsdprl.scoring import Rewards

MOST_SOURCES = 50
"""More are identifiers, not sources."""


@dataclass(frozen=True)
class Evaluation:
    """Estimates over all prompts, and over those of each source."""

    metrics: dict[str, float]
    """As logged: `eval/NAME`, `eval/NAME/ci95`, `eval/SOURCE/NAME`."""
    table: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """source ("all" first) -> name -> (mean, half-width of the 95 % interval)."""
    prompts: dict[str, int] = field(default_factory=dict)
    """source -> prompts."""
    answers: Batch | None = None

    def lines(self) -> list[str]:
        """The table for people, in Markdown."""
        names = list(next(iter(self.table.values())))
        rows = [["source", "prompts", *names]]
        for source, values in self.table.items():
            cells = [f"{mean:.4g} ± {half:.2g}" for mean, half in (values[name] for name in names)]
            rows.append([source, str(self.prompts[source]), *cells])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
            for row in rows
        ]
        return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


class Evaluator:
    """Evaluation every so many steps of a recipe's loop, and of the last weights.

    sampler.pull()
    evaluate(step)
    """

    def __init__(
        self,
        run: "Run",
        sampler: "Sampler",
        rewards: "Rewards",
        held_out: "Prompts",
        *,
        every: int,
        prompts: int,
        samples: int,
        **conversing: Any,
    ) -> None:
        """every: steps between evaluations, 0 for none; prompts: most of one; samples, env, turns: see `evaluate`."""
        self.run, self.sampler, self.rewards, self.held_out = run, sampler, rewards, held_out
        self.every, self.prompts = every, prompts
        self.how = {"samples": samples, **conversing}

    def __call__(self, step: int) -> None:
        """If this step is one of them."""
        if self.every and step % self.every == 0:
            prompts = self.held_out.first(self.prompts)
            evaluate(self.run, self.sampler, self.rewards, prompts, **self.how)

    def last(self) -> None:
        """After the loop, of the weights that it ended with."""
        if self.every:
            self.sampler.pull()
            self(0)


def evaluate(
    run: "Run",
    sampler: "Sampler",
    rewards: "Rewards",
    prompts: Sequence[Prompt],
    *,
    samples: int = 1,
    env: Callable[..., Any] | None = None,
    turns: TurnOptions | None = None,
) -> Evaluation:
    """Answer held-out prompts, log estimates under `eval/`, and show three answers.

    samples: answers to each prompt at the sampler's temperature; 0 for one greedy answer. env, turns: hold
    conversations with this environment (see `Sampler.rollout`). See `estimated`.
    """
    made = estimated(sampler, rewards, prompts, samples=samples, env=env, turns=turns)
    run.log(made.metrics)
    assert made.answers is not None
    run.show(made.answers.peek(3))
    return made


def estimated(
    sampler: "Sampler",
    rewards: "Rewards",
    prompts: Sequence[Prompt],
    *,
    samples: int = 1,
    ks: Sequence[int] = (),
    env: Callable[..., Any] | None = None,
    turns: TurnOptions | None = None,
) -> Evaluation:
    """Answer prompts and estimate, each with a confidence interval over prompts:

    reward, the weighted sum; mean@n, the first reward's own score; pass@k, the chance that one of k answers passes,
    which an answer does to which the first reward gives 1 or more. ks: 1, 2, 4 and so on up to n if empty. Rows that a
    reward failed on are left out. Prompts that name their source (data_source, source or dataset) are also reported
    by source. Raises UserError for a k above n.
    """
    greedy = samples < 1
    n = max(1, samples)
    ks = list(ks) or sorted({1, n, *(2**i for i in range(n.bit_length()) if 2**i <= n)})
    if max(ks) > n:
        raise UserError(f"pass@{max(ks)} needs at least {max(ks)} answers to a prompt, not {n}")
    how = {"temperature": 0.0} if greedy else {}
    if env is None:
        answers = sampler.generate(prompts, n=n, phase="eval", **how)
    else:
        answers = sampler.rollout(env, prompts, n=n, turns=turns, phase="eval", **how)
    answers["reward"] = rewards(answers)
    first = next(iter(rewards.weights))
    counts = ~answers["masked"]
    values = _values(answers["reward"], answers[f"{first}_rewards"], counts, len(prompts), n, ks)
    table, sizes = (
        {"all": {name: mean_ci95(each) for name, each in values.items()}},
        {"all": len(prompts)},
    )
    for source, where in _sources(prompts).items():
        table[source] = {name: mean_ci95(each[where]) for name, each in values.items()}
        sizes[source] = len(where)
    metrics = {}
    for source, estimates in table.items():
        prefix = "eval" if source == "all" else f"eval/{source}"
        for name, (mean, half) in estimates.items():
            metrics |= {f"{prefix}/{name}": mean, f"{prefix}/{name}/ci95": half}
    if env is not None:
        metrics["eval/turns"] = float(answers["turns"].double().mean())
    metrics |= {
        "eval/response_length": float(answers["length"].double().mean()),
        "eval/truncated": float(answers["truncated"].double().mean()),
    }
    kept = {name: value for name, value in metrics.items() if value == value}
    return Evaluation(kept, table, sizes, answers)


def _values(
    reward: Tensor, score: Tensor, counts: Tensor, prompts: int, n: int, ks: Sequence[int]
) -> dict[str, Tensor]:
    """Each estimate's value of every prompt, float64 [P]."""
    nan = torch.full_like(reward, torch.nan)
    graded_Pn = torch.where(counts, score, nan).view(prompts, n)
    sampled_P = (~graded_Pn.isnan()).sum(1)
    passed_P = (graded_Pn >= 1.0).sum(1)
    values = {
        "reward": torch.where(counts, reward, nan).view(prompts, n).nanmean(1),
        f"mean@{n}": graded_Pn.nanmean(1),
    }
    return values | {f"pass@{k}": pass_at_k(passed_P, sampled_P, k) for k in ks}


def _sources(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """source -> ordinals of its prompts; none where all are of one, or nearly every one is of its own."""
    sources: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        named = (prompt.meta[key] for key in SOURCES if prompt.meta.get(key))
        sources.setdefault(str(next(named, "other")).replace("/", "_"), []).append(place)
    return sources if 1 < len(sources) <= MOST_SOURCES else {}
