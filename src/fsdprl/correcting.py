"""The gap between trainer and engine over a batch: what to log, and a token weight against it."""

from functools import partial
from typing import Any

from fsdprl import corrections
from fsdprl.batch import Batch
from fsdprl.errors import UserError
from fsdprl.options import CorrectionOptions

USES: dict[str, tuple[str, ...]] = {
    "none": (),
    "tis": ("cap",),
    "icepop": ("low", "high"),
    "sequence_tis": ("cap",),
    "sequence_mask": ("cap",),
    "geometric_mask": ("low", "high"),
    "geometric_mask_tis": ("low", "high", "cap"),
}
"""The bounds that each kind of correction has."""

FUNCTIONS: dict[str, Any] = {
    "tis": corrections.token_truncate,
    "icepop": corrections.token_mask,
    "sequence_tis": corrections.sequence_truncate,
    "sequence_mask": corrections.sequence_mask,
    "geometric_mask": corrections.geometric_mask,
    "geometric_mask_tis": corrections.geometric_mask_truncate,
}


def mismatch(batch: Batch) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, over the loss tokens of a batch that has
    `logp_old` of the weights that sampled it. Empty for no rows.

    rollout/kl: mean of logp_sampler - logp_old, an estimate of KL(engine || trainer).
    rollout/max_abs_logp_diff: the largest gap of a token. rollout/ess: effective share of the tokens
    under importance weights rho = exp(logp_old - logp_sampler), sum(rho)^2 / (S sum(rho^2)); 1 is best.
    """
    if not len(batch):
        return {}
    batch.apply(corrections.mismatch, out=("mismatch_kl", "mismatch_rho", "mismatch_gap"))
    kl, rho, gap = (batch.reduce(f"mismatch_{what}") for what in ("kl", "rho", "gap"))
    if not rho.count:
        return {}
    ess = rho.sum**2 / (rho.count * rho.square) if rho.square else 0.0
    return {"rollout/kl": kl.mean, "rollout/max_abs_logp_diff": gap.max, "rollout/ess": ess}


def correct(batch: Batch, options: CorrectionOptions) -> dict[str, float]:
    """Make token column `is_weight`, which multiplies the policy loss (losses.reweigh), and return
    metrics: those of `mismatch`, and for a correction rollout/is_weight, its mean, and
    rollout/masked, the share of tokens that it takes out of the loss.

    kind "none" weighs every token 1. Raises UserError for a bound that the kind does not have.
    """
    given = {name: getattr(options, name) for name in ("low", "high", "cap")}
    bounds = {name: value for name, value in given.items() if value is not None}
    for name in bounds:
        if name not in USES[options.kind]:
            has = " and ".join(f"--correction.{bound}" for bound in USES[options.kind])
            raise UserError(
                f"--correction.{name} does nothing with --correction.kind {options.kind}"
                + (f", which has {has}" if has else ": choose a kind")
            )
    metrics = mismatch(batch)
    if options.kind == "none":
        batch.apply(corrections.ones, out="is_weight")
        return metrics
    batch.apply(partial(FUNCTIONS[options.kind], **bounds), out="is_weight")
    if metrics:
        batch.apply(corrections.masked, out="is_masked")
        metrics["rollout/is_weight"] = batch.reduce("is_weight").mean
        metrics["rollout/masked"] = batch.reduce("is_masked").mean
    return metrics
