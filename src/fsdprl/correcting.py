"""The gap between trainer and engine over a batch: what to log, and a token weight against it."""

import inspect
from collections.abc import Mapping
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
    metrics: those of `mismatch`, and for a correction rollout/is_weight, its mean, rollout/masked,
    the share of tokens that it takes out of the loss, and those of `as_ms_swift`.

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
    function = FUNCTIONS[options.kind]
    batch.apply(partial(function, **bounds), out="is_weight")
    if metrics:
        batch.apply(corrections.masked, out="is_masked")
        metrics["rollout/is_weight"] = batch.reduce("is_weight").mean
        metrics["rollout/masked"] = batch.reduce("is_masked").mean
        cap = inspect.signature(function).parameters.get("cap")
        batch.apply(
            partial(corrections.bounded, cap=bounds.get("cap", cap.default if cap else None)),
            out="is_bounded",
        )
        metrics |= as_ms_swift(batch, metrics)
    return metrics


def as_ms_swift(batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
    """`rollout_correction/*`, which ms-swift and verl log beside a correction, from `mismatch` and is_weight.

    Over tokens: kl, k3_kl and chi2_token, all of the engine's distribution to the trainer's; ess, is_weight_mean, and
    clipped_frac, the share that the correction bounds or masks. Over answers with tokens, from the mean log-prob of an
    answer: training_log_ppl, rollout_log_ppl and their ppl; log_ppl_diff (training - rollout) with its _abs, _max and
    _min; ppl_ratio; chi2_seq of the geometric mean of rho.
    """
    rho = batch.reduce("mismatch_rho")
    tokens = batch["loss_tokens"].double()
    some = tokens > 0
    theirs, ours = (-(batch.row_sum(name) / tokens)[some] for name in ("logp_sampler", "logp_old"))
    gap = ours - theirs
    found = {
        "kl": metrics["rollout/kl"],
        "k3_kl": rho.mean - 1 + metrics["rollout/kl"],
        "chi2_token": rho.square / rho.count - 1,
        "chi2_seq": (-2 * gap).exp().mean() - 1,
        "ess": metrics["rollout/ess"],
        "is_weight_mean": metrics["rollout/is_weight"],
        "clipped_frac": batch.reduce("is_bounded").mean,
        "training_log_ppl": ours.mean(),
        "training_ppl": ours.exp().mean(),
        "rollout_log_ppl": theirs.mean(),
        "rollout_ppl": theirs.exp().mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
    }
    return {f"rollout_correction/{name}": float(value) for name, value in found.items()}
