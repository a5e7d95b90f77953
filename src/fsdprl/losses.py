"""Losses of policies, critics and plain likelihood: pure functions over loss tokens, not reduced.

The contract of every loss, here, in preference.py and in recipes:

- A module-level function. Positional parameters are column names, keyword-only ones are
  hyperparameters. It runs on the workers, once per microbatch, over S loss tokens of R rows.
- Every column is [S], over the loss tokens of rows whose weight is not zero; masked tokens are
  gone before. A sample column (advantage, label, unit, ...) has its row's number on every token.
  Names made by the forward pass: `logp`, `entropy`, `balance` (the row's), `value`, and `score`, the one
  that is [R];
  `segment` is the row ordinal of each token (see segments.py for row sums).
- A token-level loss returns (loss [S], {metric: [S]}). A row-level one returns a RowLoss of [R];
  where rows form pairs, both rows carry their pair's number, so that weights stay 1 / N a row.
- Nothing is reduced or scaled: the worker computes sum(loss * weight), and `weight` (weights.py)
  is a sample column made on the controller. Metrics are averaged with the same weights.
- Nothing is broadcast: shapes that differ raise a ValueError.

Metric names are bare (`pg_clipfrac`); the model they belong to prefixes them (`actor/`, `critic/`).
Right after a batch was sampled every ratio is 1: clip fractions and ppo_kl are then 0, and pg_loss
is minus the mean advantage, which is near 0. That is how an on-policy step looks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .kl import KLKind, kl_estimate
from .segments import row_count, segment_count, segment_mean

LOG_RATIO_BOUND = 20.0
"""|log ratio| is cut here before exp: e^20 is far outside every clip range, and stays finite."""

TokenLoss = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class RowLoss:
    """A loss with one number a row, for objectives that do not split into tokens."""

    loss: Tensor
    """[R], not reduced."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [R], without gradient."""


def check_shapes(**columns: Tensor) -> None:
    """Raise ValueError unless all columns have one shape: a loss never broadcasts."""
    shapes = {name: tuple(values.shape) for name, values in columns.items()}
    if len(set(shapes.values())) > 1:
        listing = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"columns of a loss must have one shape, got {listing}")


def combine(*terms: TokenLoss) -> TokenLoss:
    """Add token-level losses and join their metrics. Raises ValueError on a metric named twice."""
    check_shapes(**{f"loss_{i}": loss for i, (loss, _) in enumerate(terms)})
    metrics: dict[str, Tensor] = {}
    for _, more in terms:
        if twice := metrics.keys() & more.keys():
            raise ValueError(f"two losses name a metric {sorted(twice)[0]!r}")
        metrics |= more
    return torch.stack([loss for loss, _ in terms]).sum(dim=0), metrics


def clip_shares(clipped: Tensor, side: Tensor) -> dict[str, Tensor]:
    """Metrics of a clip: pg_clipfrac marks the tokens whose gradient it removes (`clipped`, bool), pg_clipfrac_low
    those of them that it stops on the way down (side < 0) and pg_clipfrac_high on the way up (side > 0).

    side: the advantage, where a clip removes only gradients that would move a ratio further.
    """
    shares = {"": clipped, "_low": clipped & (side < 0), "_high": clipped & (side > 0)}
    return {f"pg_clipfrac{which}": where.to(side) for which, where in shares.items()}


ROW_EXTREMES = {
    "entropy": ("min", "max"),
    "pg_clipfrac_low": ("min",),
    "pg_clipfrac_high": ("max",),
}
"""Token metrics whose least or largest mean over an answer is reported beside the mean over all."""


def row_extremes(metrics: dict[str, Tensor], segment: Tensor) -> dict[str, Tensor]:
    """`min/NAME` or `max/NAME` of the ROW_EXTREMES among token metrics [S]: over rows with loss tokens, of the
    mean over a row's tokens. So they do not depend on microbatches or ranks."""
    rows = row_count(segment)
    present = segment_count(segment, rows) > 0
    found: dict[str, Tensor] = {}
    for name in [name for name in ROW_EXTREMES if name in metrics and len(segment)]:
        means = segment_mean(metrics[name].detach().double(), segment, rows)[present]
        found |= {f"{how}/{name}": getattr(means, how)() for how in ROW_EXTREMES[name]}
    return found


def add_sums(sums: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add what a microbatch or a rank came to; of `min/` and `max/` names the extreme stays."""
    how = {"min": min, "max": max}
    for name, value in more.items():
        if name in sums:
            kind = how.get(name.partition("/")[0])
            value = kind(sums[name], value) if kind else sums[name] + value
        sums[name] = value


def reweigh(term: TokenLoss, token_weight: Tensor) -> TokenLoss:
    """Multiply a loss by a token column without gradient (importance weights, masks).

    A weight of exactly 0 drops the token whatever its loss is, inf included.
    """
    loss, metrics = term
    check_shapes(loss=loss, token_weight=token_weight)
    weight = token_weight.detach().to(loss)
    return torch.where(weight != 0, loss * weight, torch.zeros_like(loss)), metrics


# ---- policies ----------------------------------------------------------------------------------


def clipped_surrogate(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    r = exp(logp - logp_old). Schulman et al. 2017, eq. 7; separate bounds: DAPO (Yu et al. 2025),
    section 3.1. Both are widths around 1. dual_clip: an upper bound on r itself, for tokens with
    A < 0, above which the loss stops growing; it must exceed 1 + clip_high. The same number is
    called c by dual-clip PPO (Ye et al. 2020, eq. 5) and delta by INTELLECT-2's two-sided clip.

    Metrics: pg_loss, ppo_kl (logp_old - logp), ratio, and the share of tokens whose gradient the
    clip removes: pg_clipfrac_high (A > 0, r above), pg_clipfrac_low (A < 0, r below), pg_clipfrac
    (both), pg_clipfrac_dual (A < 0, r above dual_clip).
    """
    check_shapes(logp=logp, logp_old=logp_old, advantage=advantage)
    log_ratio = logp - logp_old
    loss, metrics = _surrogate(log_ratio, advantage, clip_low, clip_high, dual_clip)
    return loss, {**metrics, "ppo_kl": -log_ratio.detach()}


def gspo_surrogate(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    segment: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> TokenLoss:
    """GSPO: the clipped surrogate of one ratio a row, s = exp(mean of its logp - logp_old).

    Zheng et al. 2025, eq. 5-7. Every token carries its row's value, so sequence-mean weights
    1 / (N * loss_tokens) give the paper's mean over rows. Metrics as in clipped_surrogate.
    """
    check_shapes(logp=logp, logp_old=logp_old, advantage=advantage, segment=segment)
    log_ratio = logp - logp_old
    row_log_ratio = segment_mean(log_ratio, segment, row_count(segment))[segment]
    loss, metrics = _surrogate(row_log_ratio, advantage, clip_low, clip_high, dual_clip)
    return loss, {**metrics, "ppo_kl": -log_ratio.detach()}


def _surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low {clip_low} must be in [0, 1] and clip_high {clip_high} >= 0")
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ValueError(f"dual_clip {dual_clip} bounds the ratio: it must exceed {1 + clip_high}")
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    free = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    loss = -torch.minimum(free * advantage, clipped * advantage)
    seen = ratio.detach()
    low, high = (advantage < 0) & (seen < 1 - clip_low), (advantage > 0) & (seen > 1 + clip_high)
    metrics = {"pg_loss": loss.detach(), **clip_shares(low | high, advantage), "ratio": seen}
    if dual_clip is not None:
        metrics["pg_clipfrac_dual"] = ((advantage < 0) & (seen > dual_clip)).to(seen)
    return loss, metrics


def cispo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    *,
    ratio_low: float = 0.0,
    ratio_high: float = 5.0,
) -> TokenLoss:
    """CISPO: -stop_gradient(clip(r, ratio_low, ratio_high)) A logp; every token keeps a gradient.

    MiniMax-M1 (2025), eq. 4-5. Unlike clip_high elsewhere, ratio_high is a bound on the ratio and
    not a width around 1. pg_clipfrac: tokens with A != 0 whose ratio was clipped; _low, _high: at that bound.
    """
    check_shapes(logp=logp, logp_old=logp_old, advantage=advantage)
    if not 0 <= ratio_low <= 1 <= ratio_high:
        raise ValueError(f"ratio_low {ratio_low} <= 1 <= ratio_high {ratio_high} must hold")
    log_ratio = (logp - logp_old).detach()
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    clipped = ratio.clamp(ratio_low, ratio_high)
    loss = -clipped * advantage * logp
    metrics = {
        "pg_loss": loss.detach(),
        **clip_shares((ratio != clipped) & (advantage != 0), ratio - 1),
        "ratio": ratio,
        "ppo_kl": -log_ratio,
    }
    return loss, metrics


def policy_gradient(logp: Tensor, advantage: Tensor) -> TokenLoss:
    """REINFORCE: -A logp (Williams 1992). On policy, the gradient of the clipped surrogate."""
    check_shapes(logp=logp, advantage=advantage)
    loss = -advantage * logp
    return loss, {"pg_loss": loss.detach()}


def distill_loss(logp: Tensor, logp_teacher: Tensor) -> TokenLoss:
    """On-policy distillation: a policy gradient whose advantage is logp_teacher - logp per token.

    The expected gradient is that of the per-token reverse KL(student || teacher) on the student's
    own samples (Agarwal et al. 2023; Lu 2025, "On-policy distillation"). Metrics: pg_loss,
    reverse_kl.
    """
    check_shapes(logp=logp, logp_teacher=logp_teacher)
    gap = (logp - logp_teacher).detach()
    loss = gap * logp
    return loss, {"pg_loss": loss.detach(), "reverse_kl": gap}


def gkd_loss(logp_top: Tensor, logp_teacher_top: Tensor, *, beta: float = 0.5) -> TokenLoss:
    """GKD: the generalised Jensen-Shannon divergence of teacher t and student s at each token, in nats.

    beta KL(t || m) + (1 - beta) KL(s || m) with m = beta t + (1 - beta) s (Agarwal et al. 2023,
    section 3); at the ends what it tends to when divided by its beta: KL(t || s) for 0, KL(s || t)
    for 1. Columns are [S, K]: log-probabilities of the teacher's K likeliest words (Reference.top).
    All other words count as one more outcome. Joining outcomes never raises a divergence, so this is
    a lower bound of that over the vocabulary, and equal to it where K is the whole of it.

    Metrics: divergence; teacher_tail, what the teacher gives to the words that were joined.
    """
    check_shapes(logp_top=logp_top, logp_teacher_top=logp_teacher_top)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta {beta} must lie between 0 and 1")
    student, teacher = _with_tail(logp_top), _with_tail(logp_teacher_top)
    if beta in (0, 1):
        first, second = (teacher, student) if beta == 0 else (student, teacher)
        loss = (first.exp() * (first - second)).sum(1)
    else:
        mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        loss = beta * (teacher.exp() * (teacher - mixed)).sum(1)
        loss = loss + (1 - beta) * (student.exp() * (student - mixed)).sum(1)
    tail = teacher[:, -1].exp().detach()
    return loss, {"divergence": loss.detach(), "teacher_tail": tail}


def _with_tail(logp_SK: Tensor) -> Tensor:
    """log-probabilities [S, K + 1] with what K words leave to all others."""
    least = 8 * torch.finfo(logp_SK.dtype).eps  # K words may add up to more than 1 by rounding
    rest = (1 - logp_SK.exp().sum(1, keepdim=True)).clamp(min=least)
    return torch.cat([logp_SK, rest.log()], 1)


# ---- terms beside the surrogate ----------------------------------------------------------------


def kl_penalty(
    logp: Tensor, logp_ref: Tensor, *, coef: float, kind: KLKind = "k3", clamp: bool = False
) -> TokenLoss:
    """coef * KL estimate to the reference (kl.py), to be combined with a policy loss.

    Metric: kl_loss, the estimate without its coefficient.
    """
    kl = kl_estimate(logp, logp_ref, kind=kind, clamp=clamp)
    return coef * kl, {"kl_loss": kl.detach()}


def entropy_bonus(entropy: Tensor, *, coef: float) -> TokenLoss:
    """-coef * entropy of the next-token distribution (nats). Metric: entropy."""
    return -coef * entropy, {"entropy": entropy.detach()}


def router_balance_loss(balance: Tensor, segment: Tensor, *, coef: float) -> RowLoss:
    """coef * how unevenly a row uses a mixture of experts (routing.router_balance), beside a row-level loss.

    Metric: router_balance, at least about the number of experts a token goes to; that is even use.
    """
    check_shapes(balance=balance, segment=segment)
    row = segment_mean(balance, segment, row_count(segment))
    return RowLoss(coef * row, {"router_balance": row.detach()})


# ---- likelihood and values ---------------------------------------------------------------------


def sft_loss(logp: Tensor, *, coef: float = 1.0) -> TokenLoss:
    """coef * cross-entropy of the observed tokens: -coef logp. Metric: nll, -logp, nats per token."""
    return -coef * logp, {"nll": -logp.detach()}


def value_loss(
    value: Tensor, value_old: Tensor, returns: Tensor, *, clip: float | None = 0.2
) -> TokenLoss:
    """Half the larger of (v - R)^2 and (clip(v, v_old - clip, v_old + clip) - R)^2.

    PPO2's clipped value loss (Schulman et al. 2016, eq. 28 without the clip; Engstrom et al. 2020,
    section 3). clip: None for the plain half square. Metrics: vf_loss; vf_clipfrac, the share of
    tokens where the clipped error is larger, which then have no gradient.
    """
    check_shapes(value=value, value_old=value_old, returns=returns)
    plain = (value - returns).square()
    if clip is None:
        worst, bound = plain, torch.zeros_like(plain)
    else:
        near = torch.clamp(value, value_old - clip, value_old + clip)
        clipped = (near - returns).square()
        worst, bound = torch.maximum(plain, clipped), (clipped > plain).to(plain)
    loss = worst / 2
    return loss, {"vf_loss": loss.detach(), "vf_clipfrac": bound.detach()}
