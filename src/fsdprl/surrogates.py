"""Policy losses beside PPO's clip: a soft gate, tapered and squared ones, and groups as classifiers.

The contract, the units of columns and the meaning of shared metrics are those of losses.py. None of
them has a recipe of its own; recipes/README.md says which lines of one become them.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .advantages import discounted_returns
from .losses import LOG_RATIO_BOUND, RowLoss, TokenLoss, check_shapes, clipped_surrogate
from .segments import row_count, segment_count, segment_first, segment_mean, segment_sum


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sapo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """SAPO: -A sigmoid(tau (r - 1)) 4 / tau: a gradient that fades where the ratio leaves 1, on both sides.

    Gao et al. 2025 (arXiv 2511.20347), eq. 5-6; a mean over answers there. tau: how fast it fades,
    tau_positive where A > 0, tau_negative elsewhere. On policy it is REINFORCE's gradient.

    Metrics: pg_loss, ratio, ppo_kl, and gate: the share of the gradient of r A that is left, 1 at r = 1.
    """
    check_shapes(logp=logp, logp_old=logp_old, advantage=advantage)
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(f"tau_positive {tau_positive} and tau_negative {tau_negative} must be > 0")
    log_ratio = logp - logp_old
    ratio = _ratio(log_ratio)
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio)
    soft = torch.sigmoid(tau * (ratio - 1))
    loss = -advantage * soft * 4 / tau
    metrics = {"pg_loss": loss, "ratio": ratio, "ppo_kl": -log_ratio, "gate": 4 * soft * (1 - soft)}
    return loss, {name: values.detach() for name, values in metrics.items()}


def topr_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, segment: Tensor) -> TokenLoss:
    """TOPR: REINFORCE on good answers as they are, on bad ones times min(pi / pi_old, 1) of the answer.

    Le Roux et al. 2025 (arXiv 2503.14286), eq. 8: the weight has no gradient, and what has become
    unlikely is not pushed down further. Good is A > 0. weights.row_mean gives the paper's sum over an
    answer. ROLL takes the ratio of each token instead of the answer's.

    Metrics: pg_loss, ppo_kl, and taper: the weight.
    """
    check_shapes(logp=logp, logp_old=logp_old, advantage=advantage, segment=segment)
    log_ratio = (logp - logp_old).detach()
    answer = segment_sum(log_ratio, segment, row_count(segment))[segment]
    weight = torch.where(advantage > 0, torch.ones_like(answer), answer.clamp(max=0.0).exp())
    loss = -weight * advantage * logp
    return loss, {"pg_loss": loss.detach(), "ppo_kl": -log_ratio, "taper": weight}


def mirror_descent_loss(
    logp: Tensor, logp_old: Tensor, advantage: Tensor, segment: Tensor, *, tau: float = 0.1
) -> RowLoss:
    """Kimi k1.5: -A log pi(y) + tau / 2 (log pi(y) - log pi_old(y))^2, log-probs summed over the answer.

    Kimi team 2025 (arXiv 2501.12599), eq. 3, with A the reward minus its group's mean. ROLL squares
    the gap of each token instead. Metrics: pg_loss, and squared_gap: (log pi - log pi_old)^2.
    """
    check_shapes(logp=logp, logp_old=logp_old, advantage=advantage, segment=segment)
    rows = row_count(segment)
    total = segment_sum(logp, segment, rows)
    gap = total - segment_sum(logp_old, segment, rows)
    loss = -segment_first(advantage, segment, rows) * total + tau / 2 * gap.square()
    return RowLoss(loss, {"pg_loss": loss.detach(), "squared_gap": gap.detach().square()})


def fipo_surrogate(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    segment: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    half_life: float = 32.0,
    weight_low: float = 1.0,
    weight_high: float = 1.2,
    safe_ratio: float = 4.0,
) -> TokenLoss:
    """FIPO: the clipped surrogate with A f_t, f_t = clip(exp(sum_k>=t gamma^(k-t) log r_k)).

    arXiv 2603.19835: a token counts for more where what follows it is being reinforced. gamma =
    2^(-1 / half_life); f has no gradient and lies in [weight_low, weight_high]. Tokens whose ratio
    exceeds dual_clip are left out of the sum; where A < 0 and the ratio exceeds safe_ratio, f lies in
    [0.8, 1]. Metrics: those of clipped_surrogate, and future_weight: f.
    """
    check_shapes(logp=logp, logp_old=logp_old, advantage=advantage, segment=segment)
    if not 0 < weight_low <= weight_high or half_life <= 0:
        raise ValueError(
            f"0 < weight_low {weight_low} <= weight_high {weight_high}, half_life {half_life} > 0"
        )
    gap = (logp - logp_old).detach()
    ratio = _ratio(gap)
    counted = gap if dual_clip is None else gap.masked_fill(ratio > dual_clip, 0.0)
    future = discounted_returns(counted, segment, gamma=2.0 ** (-1.0 / half_life))
    weight = _ratio(future).clamp(weight_low, weight_high)
    weight = torch.where(
        (advantage < 0) & (ratio > safe_ratio), weight.clamp(min=0.8, max=1.0), weight
    )
    loss, metrics = clipped_surrogate(
        logp,
        logp_old,
        advantage * weight,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return loss, {**metrics, "future_weight": weight}


def chord_loss(logp: Tensor) -> TokenLoss:
    """CHORD's imitation of an expert: -p (1 - p) log p, p = exp(logp) without gradient.

    Zhang et al. 2025 (arXiv 2508.11408), eq. 8: what the policy is sure of, either way, is left as it is.
    For a batch of expert rows, beside a policy loss on its own samples. Metrics: nll, and phi: p (1 - p).
    """
    p = logp.detach().exp()
    phi = p * (1 - p)
    return -phi * logp, {"nll": -logp.detach(), "phi": phi}


def sdar_loss(
    logp: Tensor, logp_teacher: Tensor, *, coef: float = 0.1, gate_beta: float = 5.0
) -> TokenLoss:
    """SDAR: coef g (log pi_teacher - log pi), g = sigmoid(gate_beta (log pi_teacher - log pi)) without gradient.

    Lu et al. 2026 (arXiv 2605.15155), whose code's numbers these are: beside a policy loss on its own samples, a
    teacher (the policy once it has been told more, telling.py) is followed where it thinks more of a token than the
    policy does, and hardly where it thinks less. Metrics: teacher_gap, log pi_teacher - log pi; teacher_gate: g.
    """
    check_shapes(logp=logp, logp_teacher=logp_teacher)
    if gate_beta <= 0:
        raise ValueError(f"gate_beta {gate_beta} must be > 0")
    gap = logp_teacher - logp
    gate = torch.sigmoid(gate_beta * gap.detach())
    return coef * gate * gap, {"teacher_gap": gap.detach(), "teacher_gate": gate}


def real_loss(
    logp: Tensor,
    logp_old: Tensor,
    correct: Tensor,
    unit: Tensor,
    segment: Tensor,
    *,
    tau: float = 0.5,
) -> RowLoss:
    """REAL: rewards are labels and every group a classifier of its answers; there are no advantages.

    arXiv 2602.05630: with s the mean of logp - logp_old over an answer, a group's loss is
    log(1 + sum of exp(-s / tau) over correct ones) + log(1 + sum of exp(s / tau) over the others).
    Every row carries its group's loss. unit: the group, so that it stays in one microbatch.

    Metrics: pg_loss, and score: s.
    """
    check_shapes(logp=logp, logp_old=logp_old, correct=correct, unit=unit, segment=segment)
    if tau <= 0:
        raise ValueError(f"tau {tau} must be > 0")
    rows = row_count(segment)
    score = segment_mean(logp - logp_old, segment, rows)
    present = segment_count(segment, rows) > 0
    good = segment_first(correct.to(torch.int64), segment, rows) > 0
    groups, group = torch.unique(segment_first(unit, segment, rows), return_inverse=True)
    loss = torch.zeros_like(score)
    for rows_here, sign in ((present & good, -1.0), (present & ~good, 1.0)):
        logit = torch.where(rows_here, sign * score / tau, torch.full_like(score, -torch.inf))
        loss = loss + softplus(_group_logsumexp(logit, group, len(groups)))[group]
    loss = torch.where(present, loss, torch.zeros_like(loss))
    return RowLoss(loss, {"pg_loss": loss.detach(), "score": score.detach()})


def _group_logsumexp(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """log sum exp of x [R] over each group; a group without any finite one gets the least number there is."""
    least = torch.finfo(x.dtype).min
    largest = x.detach().new_full((groups,), least).scatter_reduce(0, group, x.detach(), "amax")
    total = torch.zeros_like(largest).index_add(0, group, (x - largest[group]).exp())
    return torch.where(total > 0, largest + total.clamp(min=torch.finfo(x.dtype).tiny).log(), least)
