"""Rewards by name, weighted and summed: what --rewards and --reward-weights mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdprl import rewards
from fsdprl.batch import Batch
from fsdprl.errors import UserError
from fsdprl.options import RewardOptions


class Rewards:
    """A weighted sum of reward functions. `rewards(batch)` scores a batch and keeps each part as a column."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] = (),
        options: RewardOptions | None = None,
    ) -> None:
        """names: built-in rewards, or `module:function` for your own. weights: one a name; none is all 1.

        Raises UserError for an unknown name, a function that cannot travel, or a wrong number of weights.
        """
        if not names:
            raise UserError("--rewards: name at least one reward")
        if weights and len(weights) != len(names):
            raise UserError(
                f"--reward-weights has {len(weights)} numbers for {len(names)} --rewards: give one each"
            )
        self.functions = {name: rewards.named(name, flag="--rewards") for name in names}
        self.weights = dict(zip(names, weights or [1.0] * len(names), strict=True))
        self.options = options or RewardOptions()

    def __call__(self, batch: Batch) -> Tensor:
        """The weighted sum over the rewards that apply to each row, float64 [N].

        Each reward's own scores become the column `{name}_rewards` (NaN where it said None). Raises UserError
        where no reward applies to a row.
        """
        several = len(self.functions) > 1
        total = torch.zeros(len(batch), dtype=torch.float64)
        applies = torch.zeros(len(batch), dtype=torch.bool)
        for name, function in self.functions.items():
            scores = batch.map(function, options=self.options, allow_none=several)
            batch[f"{name}_rewards"] = scores
            total += self.weights[name] * scores.nan_to_num(0.0)
            applies |= ~scores.isnan()
        if not bool(applies.all()):
            row = int(batch.row_ids[~applies][0])
            raise UserError(
                f"--rewards: every reward returned None for row {row}: none applies to it"
            )
        return total

    def metrics(self, batch: Batch) -> dict[str, float]:
        """`{name}_rewards/mean` over the rows that each reward applies to."""
        means = {name: float(batch[f"{name}_rewards"].nanmean()) for name in self.functions}
        return {f"{name}_rewards/mean": mean for name, mean in means.items() if mean == mean}
