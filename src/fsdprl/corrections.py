"""Corrections for the gap between the trainer's probabilities and the sampling engine's.

rho = exp(logp_old - logp_sampler): the ratio of trainer to engine on each sampled token, both taken
at the weights that sampled. Functions of logp_old are made for Batch.apply: their result [S] is a
token column that multiplies the policy loss (losses.reweigh), without gradient. Those of `logp` look
at the policy as it moves and are called inside a loss.

    batch.apply(partial(token_truncate, cap=2.0), out="is_weight")

A sequence ratio multiplies every token's gap: a mean gap of 0.01 nats is 2.7 at 100 tokens and
22,026 at 1,000, so on long answers prefer token weights or the geometric mask. Engines that filter
(top_p below 1, top_k) report log-probs normalised over what they kept; no weight here undoes that.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from .losses import LOG_RATIO_BOUND, check_shapes
from .segments import row_count, segment_max, segment_mean, segment_sum

Divergence = Literal["k1", "k2", "k3"]
Level = Literal["token", "sum", "mean", "max"]


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _log_rho(logp_old: Tensor, logp_sampler: Tensor) -> Tensor:
    check_shapes(logp_old=logp_old, logp_sampler=logp_sampler)
    return (logp_old - logp_sampler).detach()


def _per_row(x: Tensor, segment: Tensor, level: str) -> Tensor:
    """sum, mean or max of x over each row, on every token of the row: [S]."""
    check_shapes(x=x, segment=segment)
    reduce = {"sum": segment_sum, "mean": segment_mean, "max": segment_max}[level]
    return reduce(x, segment, row_count(segment))[segment]


# ---- importance weights ------------------------------------------------------------------------


def token_truncate(logp_old: Tensor, logp_sampler: Tensor, *, cap: float = 2.0) -> Tensor:
    """min(rho, cap) on each token (TIS, Yao et al. 2025, "Your efficient RL framework...")."""
    return _exp(_log_rho(logp_old, logp_sampler)).clamp(max=cap)


def token_mask(
    logp_old: Tensor, logp_sampler: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """rho where low <= rho <= high, else 0 (IcePop, Ling team 2025)."""
    rho = _exp(_log_rho(logp_old, logp_sampler))
    return torch.where((rho >= low) & (rho <= high), rho, torch.zeros_like(rho))


def sequence_truncate(
    logp_old: Tensor, logp_sampler: Tensor, segment: Tensor, *, cap: float = 2.0
) -> Tensor:
    """min(product of rho over the row, cap), on every token of the row."""
    log_rho = _per_row(_log_rho(logp_old, logp_sampler), segment, "sum")
    return _exp(log_rho).clamp(max=cap)


def sequence_mask(
    logp_old: Tensor, logp_sampler: Tensor, segment: Tensor, *, cap: float = 3.0
) -> Tensor:
    """Product of rho over the row where it is at most cap, else 0 (MIS, Liu et al. 2025)."""
    rho = _exp(_per_row(_log_rho(logp_old, logp_sampler), segment, "sum"))
    return torch.where(rho <= cap, rho, torch.zeros_like(rho))


# ---- masks: 1 keeps a token, 0 drops it; multiply with an importance weight if wanted ----------


def geometric_mask(
    logp_old: Tensor,
    logp_sampler: Tensor,
    segment: Tensor,
    *,
    low: float = 0.99,
    high: float = 1.01,
) -> Tensor:
    """1 for rows whose geometric mean of rho lies in [low, high], else 0: no growth with length."""
    log_rho = _log_rho(logp_old, logp_sampler)
    mean = _exp(_per_row(log_rho, segment, "mean"))
    return ((mean >= low) & (mean <= high)).to(log_rho)


def geometric_mask_truncate(
    logp_old: Tensor,
    logp_sampler: Tensor,
    segment: Tensor,
    *,
    low: float = 0.99,
    high: float = 1.01,
    cap: float = 2.0,
) -> Tensor:
    """geometric_mask times token_truncate ("seq-mask-tis")."""
    keep = geometric_mask(logp_old, logp_sampler, segment, low=low, high=high)
    return keep * token_truncate(logp_old, logp_sampler, cap=cap)


def divergence_mask(
    logp_old: Tensor,
    logp_sampler: Tensor,
    segment: Tensor,
    *,
    kind: Divergence = "k3",
    level: Level = "mean",
    threshold: float,
) -> Tensor:
    """1 where an estimate of KL(sampler || trainer) is at most threshold, else 0.

    k1: -log rho. k2: (log rho)^2 / 2. k3: rho - 1 - log rho (Schulman 2020). level: the token's own
    estimate, or its row's sum, mean or max. Raises ValueError for an unknown kind or level.
    """
    if kind not in get_args(Divergence) or level not in get_args(Level):
        raise ValueError(
            f"kind {kind!r} must be one of {get_args(Divergence)}, "
            f"level {level!r} one of {get_args(Level)}"
        )
    log_rho = _log_rho(logp_old, logp_sampler).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    estimate = {
        "k1": lambda: -log_rho,
        "k2": lambda: log_rho.square() / 2,
        "k3": lambda: log_rho.expm1() - log_rho,
    }[kind]()
    if level != "token":
        estimate = _per_row(estimate, segment, level)
    return (estimate <= threshold).to(log_rho)


def ones(logp_old: Tensor) -> Tensor:
    """No correction."""
    return torch.ones_like(logp_old)


def masked(is_weight: Tensor) -> Tensor:
    """1 where a weight takes the token out of the loss, else 0."""
    return (is_weight == 0).to(is_weight)


def bounded(is_weight: Tensor, *, cap: float | None) -> Tensor:
    """1 where a weight was cut to its cap or takes the token out of the loss, else 0."""
    cut = is_weight == 0
    return (cut if cap is None else cut | (is_weight >= cap)).to(is_weight)


# ---- masks of the policy being trained: called inside a loss -----------------------------------


def total_variation_mask(
    logp: Tensor, logp_sampler: Tensor, advantage: Tensor, *, threshold: float = 0.2
) -> Tensor:
    """0 where the token's probability already moved far the way its advantage pushes, else 1.

    p - p_sampler > threshold with A > 0, or < -threshold with A < 0 (DPPO, total variation).
    """
    check_shapes(logp=logp, logp_sampler=logp_sampler, advantage=advantage)
    moved = logp.detach().exp() - logp_sampler.exp()
    gone = ((advantage > 0) & (moved > threshold)) | ((advantage < 0) & (moved < -threshold))
    return (~gone).to(logp)


def off_policy_sequence_mask(
    logp: Tensor, logp_sampler: Tensor, advantage: Tensor, segment: Tensor, *, threshold: float
) -> Tensor:
    """0 on rows with A < 0 whose mean of logp_sampler - logp exceeds threshold, else 1.

    DeepSeek-V3.2 (2025), section 3.1. Rows with A >= 0 are always kept.
    """
    check_shapes(logp=logp, logp_sampler=logp_sampler, advantage=advantage, segment=segment)
    drift = _per_row((logp_sampler - logp).detach(), segment, "mean")
    return (~((advantage < 0) & (drift > threshold))).to(logp)


# ---- what to log -------------------------------------------------------------------------------


def mismatch(logp_old: Tensor, logp_sampler: Tensor) -> dict[str, Tensor]:
    """Token columns to reduce over the batch and log, each [S]. See correcting.mismatch.

    mismatch_kl: logp_sampler - logp_old, whose mean estimates KL(sampler || trainer).
    mismatch_rho: mean 1 if the two agree; sum^2 / sum of squares is the effective number of tokens.
    mismatch_gap: |logp_old - logp_sampler|.
    """
    log_rho = _log_rho(logp_old, logp_sampler)
    return {
        "mismatch_kl": -log_rho,
        "mismatch_rho": _exp(log_rho),
        "mismatch_gap": log_rho.abs(),
    }
