"""The loss of preference pairs by name: options checked once, and what couples a batch computed before each update."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fsdprl import coupled
from fsdprl.batch import Batch
from fsdprl.errors import UserError
from fsdprl.policy import Policy
from fsdprl.preference import check_dpo_options, dpo_loss, dpo_wpo_loss

SORTED = {
    "aot": (coupled.aot_loss, coupled.aot_targets),
    "aot_unpaired": (coupled.aot_unpaired_loss, coupled.aot_unpaired_targets),
}
"""Losses that sort the batch. They stand alone."""


class PairLoss:
    """A preference loss. Batches need `chosen`, `unit` and the token column `logp_ref`.

        batch["weight"] = weights.row_mean(batch["loss_tokens"])
        policy.forward_backward(batch, loss.of(batch, policy))

    Track it with the run: bco_pair's shift is a running mean.
    """

    def __init__(
        self,
        losses: Sequence[str],
        loss_weights: Sequence[float] = (),
        *,
        wpo: bool = False,
        bco_shift: bool = False,
        **options: Any,
    ) -> None:
        """losses: names of preference.dpo_loss, or `aot` or `aot_unpaired` alone. options: keywords of dpo_loss.

        wpo: weigh pairs by their likelihood under the policy (dpo_wpo_loss). bco_shift: bco_pair's shift is the
        running mean reward, not 0. Raises UserError for options that could have no effect.
        """
        self.losses, self.wpo, self.shifts = list(losses), wpo, bco_shift
        self.sum, self.count = 0.0, 0
        """Of the rewards that bco_pair's shift is the mean of."""
        self.options = {
            "losses": self.losses,
            "loss_weights": list(loss_weights) or None,
            **options,
        }
        self.sorted = SORTED.get(self.losses[0]) if len(self.losses) == 1 else None
        if self.sorted:
            self.check_sorted(options)
        else:
            self.check(options)
        if bco_shift and "bco_pair" not in self.losses:
            raise UserError("--bco-shift has no effect without bco_pair among --losses")

    def check(self, options: dict[str, Any]) -> None:
        named = ("beta", "f_divergence", "label_smoothing", "discopop_tau")
        try:
            check_dpo_options(
                self.losses,
                self.options["loss_weights"],
                **{name: options[name] for name in named if name in options},
            )
        except ValueError as error:
            raise UserError(f"--losses and their options: {error}") from None
        if options.get("f_alpha", 0.5) != 0.5 and options.get("f_divergence") != "alpha_divergence":
            raise UserError("--f-alpha has no effect without --f-divergence alpha_divergence")

    def check_sorted(self, options: dict[str, Any]) -> None:
        neutral = {
            "rpo_alpha": 0.0,
            "ld_alpha": 1.0,
            "f_divergence": "reverse_kl",
            "f_alpha": 0.5,
            "discopop_tau": 0.05,
        }
        given = [name for name, value in neutral.items() if options.get(name, value) != value]
        given += ["loss_weights"] * bool(self.options["loss_weights"]) + ["wpo"] * self.wpo
        if given:
            raise UserError(
                f"--{given[0].replace('_', '-')} has no effect on {self.losses[0]}, which sorts the batch"
            )
        self.options = {
            name: options[name] for name in ("beta", "label_smoothing") if name in options
        }

    def of(self, batch: Batch, policy: Policy, *, training: bool = True) -> Callable[..., Any]:
        """The loss of this batch, for forward_backward. training: the batch counts in the running mean."""
        if self.sorted:
            loss, targets = self.sorted
            now, reference = self.sums(batch, policy)
            if self.losses == ["aot"]:
                target = targets(now, reference, batch["chosen"], batch["unit"])
            else:
                target = targets(now - reference, batch["chosen"])
            batch["aot_target"] = target
            return partial(loss, **self.options)
        loss = partial(dpo_wpo_loss if self.wpo else dpo_loss, **self.options)
        if not self.shifts:
            return loss
        if training:
            now, reference = self.sums(batch, policy)
            self.sum += self.options.get("beta", 0.1) * float((now - reference).sum())
            self.count += len(batch)
        return partial(loss, shift=self.sum / max(self.count, 1))

    def sums(self, batch: Batch, policy: Policy) -> tuple[Tensor, Tensor]:
        """Log-probs of each completion now and under the reference, [N] each, from a pass without gradient."""
        policy.logprobs(batch, out="logp_now")
        return batch.row_sum("logp_now"), batch.row_sum("logp_ref")

    def state_dict(self) -> dict[str, float]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.sum, self.count = state["sum"], int(state["count"])
