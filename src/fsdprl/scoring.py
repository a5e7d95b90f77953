"""Rewards by name, weighted and summed: what --rewards and --reward-weights mean."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdprl.advantages import group_std
from fsdprl.batch import Batch
from fsdprl.controller import current
from fsdprl.errors import UserError
from fsdprl.grades import Grades, grade
from fsdprl.options import RewardOptions
from fsdprl.policy import RewardModel
from fsdprl.rewards.names import named, short_names

MODEL = "reward_model"
"""The reward model's name among the rewards; the second one is reward_model_2."""

ENV = "env"
"""The name of what the environment of `sampler.rollout` gave."""

_log = logging.getLogger(__name__)


class Rewards:
    """A weighted sum of rewards. `rewards(batch)` scores a batch and keeps each part as a column."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] = (),
        options: RewardOptions | None = None,
        *,
        model: RewardModel | Sequence[RewardModel] | None = None,
    ) -> None:
        """names: what `rewards.names.named` reads: built-in rewards, `module:function` or `file.py:function` for
        your own; `env` is what the environment of `sampler.rollout` gave. model: reward models, counted last as
        `reward_model`, `reward_model_2` and so on. weights: one for each of them; none is all 1.

        Raises UserError for an unknown name, a function that cannot travel, or a wrong number of weights.
        """
        models = [model] if isinstance(model, RewardModel) else list(model or [])
        self.columns = dict(zip(names, short_names(list(names)), strict=True))
        self.functions = {
            self.columns[text]: named(text, flag="--rewards") for text in names if text != ENV
        }
        self.models = {MODEL if not i else f"{MODEL}_{i + 1}": m for i, m in enumerate(models)}
        parts = [*self.columns.values(), *self.models]
        if not parts:
            raise UserError("--rewards: name at least one reward")
        if len(self.columns) < len(names):
            raise UserError(f"--rewards names {', '.join(names)}: the same one twice")
        if weights and len(weights) != len(parts):
            raise UserError(
                f"--reward-weights: {len(weights)} given, {len(parts)} wanted: one each for {', '.join(parts)}"
            )
        self.weights = dict(zip(parts, weights or [1.0] * len(parts), strict=True))
        self.options = options or RewardOptions()
        self.logged: dict[str, float] = {}

    def __call__(self, batch: Batch, *, turn: int = -1) -> Tensor:
        """The weighted sum over the rewards that apply to each row, float64 [N], always finite.

        turn: which of the model's turns in a conversation is judged: 0 is the first one, -1 the last.

        Each reward's own scores become the column `{name}_rewards` (NaN where it said None). A row that a reward
        failed on, or that none applies to, is `masked`: it gets the mean of its group's other rows (of the batch's,
        if there are none), so that its advantage over them is 0. Masked rows are counted in `reward/masked` and
        warned of; UserError where they are more than options.max_failed_share, and one is too many for it.
        """
        self.logged = {}
        total = torch.zeros(len(batch), dtype=torch.float64)
        applies = torch.zeros(len(batch), dtype=torch.bool)
        failed = torch.zeros(len(batch), dtype=torch.bool)
        if "env_failed" in batch:
            failed |= batch["env_failed"]
        for name in self.weights:
            graded = self.part(name, batch, turn=turn)
            batch[f"{name}_rewards"] = graded.scores
            self.logged |= graded.metrics
            total += self.weights[name] * graded.scores.nan_to_num(0.0)
            applies |= ~graded.scores.isnan()
            failed |= graded.failed
        masked = failed | ~applies
        batch["masked"] = masked
        self._check(batch, failed, applies)
        return _filled(total, masked, batch.columns.get("group", batch.row_ids))

    def part(self, name: str, batch: Batch, *, turn: int = -1) -> Grades:
        """One reward's own verdicts on a batch."""
        if name in self.models:
            scores = self.models[name].score(batch)
            return Grades(scores, torch.zeros(len(batch), dtype=torch.bool))
        if name == ENV:
            if "env_reward" not in batch:
                raise UserError("--rewards env: these answers had no environment (sampler.rollout)")
            return Grades(batch["env_reward"], batch["env_failed"])
        return grade(batch, self.functions[name], self.options, name=name, turn=turn)

    def metrics(self, batch: Batch, score: str = "") -> dict[str, float]:
        """`{name}_rewards/mean` over the rows that each reward applies to, of those that scored this batch, which is
        `rewards/{name}/mean` as well, and `rewards/{name}/std`, unbiased; what rewards logged themselves (TRL's
        log_metric) when they last scored; what of the batch can teach nothing.

        reward: mean of the batch's reward. reward_std: mean of the groups' deviations. frac_reward_zero_std: share of
        answers in groups without any, groups of one among them. empty: share of answers without a token. And
        `completions`. score: also mean, max and min of the batch's reward under this name; MindSpeed-RL's are
        grpo/score and dapo/score.
        """
        scored = [name for name in self.weights if f"{name}_rewards" in batch]
        found: dict[str, float] = {}
        for name in scored:
            scores = batch[f"{name}_rewards"]
            scores = scores[~scores.isnan()]
            if len(scores):
                mean, std = float(scores.mean()), float(scores.std()) if len(scores) > 1 else 0.0
                found[f"{name}_rewards/mean"] = found[f"rewards/{name}/mean"] = mean
                found[f"rewards/{name}/std"] = std
        found |= self.logged
        if score and len(batch):
            hows = ("mean", "max", "min")
            found |= {f"{score}/{how}": float(getattr(batch["reward"], how)()) for how in hows}
        if len(batch) and "reward" in batch and "group" in batch:
            std = group_std(batch["reward"], batch["group"])
            found |= {
                "reward": float(batch["reward"].mean()),
                "reward_std": float(std.mean()),
                "frac_reward_zero_std": float((std == 0).double().mean()),
                "empty": float((batch["loss_tokens"] == 0).double().mean()),
            }
        if len(batch) and "length" in batch and "truncated" in batch:
            found |= completions(batch["length"], batch["truncated"])
        return found

    def _check(self, batch: Batch, failed: Tensor, applies: Tensor) -> None:
        none = ~applies & ~failed
        count, share = int((failed | none).sum()), self.options.max_failed_share
        if not count:
            return
        current().timeline.count("reward/masked", count)
        allowed = max(int(share * len(batch)), share > 0)
        row = int(batch.row_ids[none][0]) if bool(none.any()) else None
        if row is not None and (int(none.sum()) > allowed or count == len(batch)):
            one = len(self.weights) == 1
            raise UserError(
                f"--rewards {' '.join(self.columns)}: {'' if one else 'every reward '}returned None for "
                f"{int(none.sum())} of {len(batch)} rows, the first is row {row}: nothing says what those are worth "
                f"(is there a return?), and --reward.max-failed-share is {share:g}"
            )
        _log.warning(
            "%d of %d answers have no reward in this step and teach nothing", count, len(batch)
        )


def completions(length: Tensor, truncated: Tensor) -> dict[str, float]:
    """Answers under the names of TRL and ms-swift, from their lengths in tokens and whether they hit the limit, [N].

    completions/{mean,min,max}_length, and completions/clipped_ratio: the share cut off. The same of terminated_length
    over those that ended by themselves, if any did.
    """
    metrics = {"completions/clipped_ratio": float(truncated.double().mean())}
    for name, values in (("length", length), ("terminated_length", length[~truncated])):
        for how in ("mean", "min", "max") if len(values) else ():
            metrics[f"completions/{how}_{name}"] = float(getattr(values.double(), how)())
    return metrics


def _filled(total: Tensor, masked: Tensor, group: Tensor) -> Tensor:
    """total, with masked rows at the mean of their group's other rows, or of all other rows."""
    if not bool(masked.any()):
        return total
    filled = total.clone()
    everyone = total[~masked].mean() if bool((~masked).any()) else total.new_zeros(())
    for place in masked.nonzero().flatten().tolist():
        peers = total[(group == group[place]) & ~masked]
        filled[place] = peers.mean() if len(peers) else everyone
    return filled
