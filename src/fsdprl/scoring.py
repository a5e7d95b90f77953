"""Rewards by name, weighted and summed: what --rewards and --reward-weights mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdprl import rewards
from fsdprl.batch import Batch
from fsdprl.errors import UserError
from fsdprl.options import RewardOptions
from fsdprl.policy import RewardModel

MODEL = "reward_model"
"""The reward model's name among the rewards."""


class Rewards:
    """A weighted sum of reward functions. `rewards(batch)` scores a batch and keeps each part as a column."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] = (),
        options: RewardOptions | None = None,
        *,
        model: RewardModel | None = None,
    ) -> None:
        """names: built-in rewards, or `module:function` for your own. model: a reward model, counted last as
        `reward_model`. weights: one for each of them; none is all 1.

        Raises UserError for an unknown name, a function that cannot travel, or a wrong number of weights.
        """
        self.functions = {name: rewards.named(name, flag="--rewards") for name in names}
        self.model = model
        parts = [*names, MODEL] if model else list(names)
        if not parts:
            raise UserError("--rewards: name at least one reward")
        if weights and len(weights) != len(parts):
            raise UserError(
                f"--reward-weights has {len(weights)} numbers for {', '.join(parts)}: give one each"
            )
        self.weights = dict(zip(parts, weights or [1.0] * len(parts), strict=True))
        self.options = options or RewardOptions()

    def __call__(self, batch: Batch) -> Tensor:
        """The weighted sum over the rewards that apply to each row, float64 [N].

        Each reward's own scores become the column `{name}_rewards` (NaN where it said None). Raises UserError
        where no reward applies to a row.
        """
        several = len(self.weights) > 1
        total = torch.zeros(len(batch), dtype=torch.float64)
        applies = torch.zeros(len(batch), dtype=torch.bool)
        for name in self.weights:
            scores = self.part(name, batch, several)
            batch[f"{name}_rewards"] = scores
            total += self.weights[name] * scores.nan_to_num(0.0)
            applies |= ~scores.isnan()
        if not bool(applies.all()):
            row = int(batch.row_ids[~applies][0])
            raise UserError(
                f"--rewards: every reward returned None for row {row}: none applies to it"
            )
        return total

    def part(self, name: str, batch: Batch, allow_none: bool) -> Tensor:
        """One reward's own scores, float64 [N]."""
        if name == MODEL and self.model:
            return self.model.score(batch)
        return batch.map(self.functions[name], options=self.options, allow_none=allow_none)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """`{name}_rewards/mean` over the rows that each reward applies to."""
        means = {name: float(batch[f"{name}_rewards"].nanmean()) for name in self.weights}
        return {f"{name}_rewards/mean": mean for name, mean in means.items() if mean == mean}
