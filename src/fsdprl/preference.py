"""Losses over pairs of completions: DPO and its relatives, reference-free ones, reward models.

All are row-level (RowLoss of [R]; see losses.py for the contract). Columns, each [S]: `chosen` (bool,
whether the row is its pair's better completion), `unit` (integer, shared by the two rows of a pair
and by no other), `segment`. Both rows of a pair carry the pair's loss and metrics, so with
weights.row_mean the total is the mean over pairs. c and r: log pi - log pi_ref of the chosen and the
rejected completion, summed over loss tokens (pairwise.py).

Metrics, without gradient: acc (chosen reward above rejected reward), chosen_reward and reject_reward
(beta * c, beta * r), margin (their difference), chosen_logp, reject_logp, and nll, per token of the
chosen completion.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .losses import RowLoss, check_shapes
from .pairwise import OF_SCORES, PAIR_LOSSES, Pairs, Scores, find_pairs, smoothed
from .segments import (
    row_count,
    segment_count,
    segment_first,
    segment_mean,
    segment_position,
    segment_sum,
)

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

LARGEST_EXPONENT = 80.0
"""exp of a sum of log ratios stays finite in float32 below this."""

# ---- DPO and its relatives ---------------------------------------------------------------------


def dpo_loss(
    logp: Tensor,
    logp_ref: Tensor,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    *,
    losses: Sequence[str] = ("sigmoid",),
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    rpo_alpha: float = 0.0,
    ld_alpha: float = 1.0,
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.5,
    discopop_tau: float = 0.05,
    shift: float = 0.0,
) -> RowLoss:
    """Weighted sum of the named losses (PAIR_LOSSES) of each pair.

    losses, loss_weights: MPO (Wang et al. 2024) is ("sigmoid", "bco_pair", "sft") with 0.8, 0.2, 1;
    None weighs each by 1. rpo_alpha: adds rpo_alpha * nll of the chosen completion (RPO, Pang et al.
    2024). ld_alpha: factor on the log-probs of tokens beyond the length of the pair's shorter
    completion, in policy and reference (LD-DPO, Liu et al. 2024); 1 counts them fully.
    f_divergence, f_alpha: f-DPO (Wang et al. 2023). discopop_tau, shift: see discopop, bco_pair.

    Raises ValueError as check_dpo_options does, and for rows that do not pair up.
    """
    check_shapes(logp=logp, logp_ref=logp_ref, segment=segment)
    options = {
        "label_smoothing": label_smoothing,
        "discopop_tau": discopop_tau,
        "shift": shift,
    }
    check_dpo_options(losses, loss_weights, beta=beta, f_divergence=f_divergence, **options)
    rows = row_count(segment)
    pairs = find_pairs(chosen, unit, segment, rows)
    s, metrics = pair_scores(
        logp,
        logp_ref,
        segment,
        pairs,
        beta=beta,
        ld_alpha=ld_alpha,
        divergence=f_divergence,
        f_alpha=f_alpha,
    )
    loss = rpo_alpha * s.chosen_nll
    for name, weight in zip(losses, loss_weights or [1.0] * len(losses), strict=True):
        loss = loss + weight * _call(name, s, {"beta": beta, **options})
    return RowLoss(pairs.spread(loss), {k: pairs.spread(v) for k, v in metrics.items()})


def dpo_reference_free_loss(
    logp: Tensor,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    *,
    losses: Sequence[str] = ("sigmoid",),
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    rpo_alpha: float = 0.0,
    ld_alpha: float = 1.0,
    discopop_tau: float = 0.05,
    shift: float = 0.0,
) -> RowLoss:
    """dpo_loss against a uniform reference: c and r are log pi alone, no reference model needed."""
    return dpo_loss(
        logp,
        torch.zeros_like(logp),
        chosen,
        unit,
        segment,
        losses=losses,
        loss_weights=loss_weights,
        beta=beta,
        label_smoothing=label_smoothing,
        rpo_alpha=rpo_alpha,
        ld_alpha=ld_alpha,
        discopop_tau=discopop_tau,
        shift=shift,
    )


def dpo_wpo_loss(
    logp: Tensor,
    collision: Tensor,
    logp_ref: Tensor,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    *,
    losses: Sequence[str] = ("sigmoid",),
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    rpo_alpha: float = 0.0,
    ld_alpha: float = 1.0,
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.5,
    discopop_tau: float = 0.05,
    shift: float = 0.0,
) -> RowLoss:
    """dpo_loss of pairs weighed by how likely the policy would write both (WPO, Zhou et al. 2024, eq. 2).

    A pair's factor, without gradient, is the product over its completions of
    exp(mean over tokens of logp - collision): a token's probability, next to the mean probability
    sum_v p(v)^2 = exp(collision) of what the policy itself would draw there. It multiplies the losses
    and not rpo_alpha's likelihood. One metric more: wpo_factor.
    """
    check_shapes(logp=logp, collision=collision)
    plain = dpo_loss(
        logp,
        logp_ref,
        chosen,
        unit,
        segment,
        losses=losses,
        loss_weights=loss_weights,
        beta=beta,
        label_smoothing=label_smoothing,
        ld_alpha=ld_alpha,
        f_divergence=f_divergence,
        f_alpha=f_alpha,
        discopop_tau=discopop_tau,
        shift=shift,
    )
    rows = row_count(segment)
    pairs = find_pairs(chosen, unit, segment, rows)
    aligned = segment_mean((logp - collision).detach(), segment, rows)
    factor = pairs.spread((aligned[pairs.chosen] + aligned[pairs.rejected]).exp())
    nll = pairs.spread(-segment_mean(logp, segment, rows)[pairs.chosen])
    return RowLoss(factor * plain.loss + rpo_alpha * nll, plain.metrics | {"wpo_factor": factor})


def pair_scores(
    logp: Tensor,
    logp_ref: Tensor,
    segment: Tensor,
    pairs: Pairs,
    *,
    beta: float,
    ld_alpha: float = 1.0,
    divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.5,
) -> tuple[Scores, dict[str, Tensor]]:
    """Scores of each pair, and the metrics of this module's docstring, all [P]."""
    count = segment_count(segment, pairs.rows)
    share = _length_desensitized(logp, segment, count, pairs, ld_alpha)
    policy = segment_sum(share * logp, segment, pairs.rows)
    ratio = policy - segment_sum(share * logp_ref, segment, pairs.rows)
    score = _f_score(ratio, divergence, f_alpha)
    c, r = ratio[pairs.chosen], ratio[pairs.rejected]
    nll = -segment_sum(logp, segment, pairs.rows) / count.clamp(min=1)
    scores = Scores(
        chosen=c,
        rejected=r,
        chosen_score=score[pairs.chosen],
        rejected_score=score[pairs.rejected],
        chosen_tokens=count[pairs.chosen],
        rejected_tokens=count[pairs.rejected],
        chosen_nll=nll[pairs.chosen],
    )
    logps = {"chosen_logp": policy[pairs.chosen], "reject_logp": policy[pairs.rejected]}
    return scores, _metrics(beta * c, beta * r, nll=scores.chosen_nll, **logps)


def check_dpo_options(
    losses: Sequence[str],
    loss_weights: Sequence[float] | None = None,
    *,
    beta: float = 0.1,
    f_divergence: str = "reverse_kl",
    **options: float,
) -> None:
    """Raise ValueError for options that dpo_loss would have to ignore or could not follow.

    For recipes to call before anything starts. options: label_smoothing, discopop_tau, shift.
    """
    unknown = [name for name in losses if name not in PAIR_LOSSES]
    if unknown or not losses:
        hint = "; aot has a loss of its own, aot_loss" if "aot" in "".join(unknown) else ""
        what = repr(unknown[0]) if unknown else "an empty list"
        raise ValueError(f"losses: {what} is not among {', '.join(PAIR_LOSSES)}{hint}")
    if loss_weights is not None and len(loss_weights) != len(losses):
        raise ValueError(f"loss_weights: {len(loss_weights)} weights for {len(losses)} losses")
    if beta <= 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if f_divergence not in get_args(Divergence):
        raise ValueError(f"f_divergence: {f_divergence!r} is not in {get_args(Divergence)}")
    plain = sorted(set(losses) - OF_SCORES - {"sft"})
    if f_divergence != "reverse_kl" and plain:
        raise ValueError(f"f_divergence: {plain[0]} is defined for reverse_kl only")
    for name, value in options.items():
        takers = [loss for loss, fn in PAIR_LOSSES.items() if name in _hyperparameters(fn)]
        if not takers:
            raise ValueError(f"{name}: no preference loss takes it")
        default = _hyperparameters(PAIR_LOSSES[takers[0]])[name]
        if value != default and not set(takers) & set(losses):
            raise ValueError(
                f"{name} {value} has no effect on {', '.join(losses)}: it belongs to "
                f"{', '.join(takers)}"
            )
    one = torch.ones(1)
    for name in losses:  # what a loss says about its own options
        _call(name, Scores(one, one, one, one, one, one, one), {"beta": beta, **options})


def _call(name: str, s: Scores, options: dict[str, float]) -> Tensor:
    fn = PAIR_LOSSES[name]
    return fn(s, **{k: v for k, v in options.items() if k in _hyperparameters(fn)})


def _hyperparameters(fn: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(fn).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _metrics(chosen_reward: Tensor, reject_reward: Tensor, **more: Tensor) -> dict[str, Tensor]:
    shown = {
        "acc": (chosen_reward > reject_reward).to(chosen_reward),
        "chosen_reward": chosen_reward,
        "reject_reward": reject_reward,
        "margin": chosen_reward - reject_reward,
        **more,
    }
    return {name: values.detach() for name, values in shown.items()}


def _length_desensitized(
    logp: Tensor, segment: Tensor, count: Tensor, pairs: Pairs, ld_alpha: float
) -> Tensor:
    """Factor of each token: 1 up to the length of its pair's shorter completion, ld_alpha after."""
    shared = pairs.spread(torch.minimum(count[pairs.chosen], count[pairs.rejected]))
    beyond = segment_position(segment) >= shared[segment]
    return torch.ones_like(logp).masked_fill(beyond, ld_alpha)  # in logp's precision


def _f_score(log_ratio: Tensor, divergence: Divergence, alpha: float) -> Tensor:
    """f'(t) at t = exp(log_ratio): f-DPO's score of a completion."""
    if divergence == "forward_kl":  # 1 - 1 / t
        return -(-log_ratio).clamp(max=LARGEST_EXPONENT).expm1()
    if divergence == "js_divergence":  # log(2 t / (t + 1))
        return math.log(2.0) + logsigmoid(log_ratio)
    if divergence == "alpha_divergence" and alpha != 1.0:  # (t^(alpha - 1) - 1) / (alpha - 1)
        power = ((alpha - 1.0) * log_ratio).clamp(max=LARGEST_EXPONENT)
        return power.expm1() / (alpha - 1.0)
    return log_ratio


# ---- without a reference -----------------------------------------------------------------------


def cpo_loss(
    logp: Tensor,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    *,
    beta: float = 0.1,
    cpo_alpha: float = 1.0,
    label_smoothing: float = 0.0,
) -> RowLoss:
    """-log sigma(beta (log pi(chosen) - log pi(rejected))) + cpo_alpha * nll (CPO, Xu et al. 2024)."""
    s, metrics, pairs = _without_reference(logp, chosen, unit, segment, beta)
    loss = smoothed(beta * s.delta, label_smoothing) + cpo_alpha * s.chosen_nll
    return RowLoss(pairs.spread(loss), {k: pairs.spread(v) for k, v in metrics.items()})


def simpo_loss(
    logp: Tensor,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> RowLoss:
    """-log sigma(beta * (difference of mean log pi) - gamma) (SimPO, Meng et al. 2024, eq. 6).

    gamma: target margin, in units of beta * nats per token. Rewards are beta * mean log pi.
    """
    s, metrics, pairs = _without_reference(logp, chosen, unit, segment, beta, per_token=True)
    loss = smoothed(beta * s.token_delta - gamma, label_smoothing)
    return RowLoss(pairs.spread(loss), {k: pairs.spread(v) for k, v in metrics.items()})


def orpo_loss(
    logp: Tensor, chosen: Tensor, unit: Tensor, segment: Tensor, *, beta: float = 0.1
) -> RowLoss:
    """nll - beta * log sigma(log odds(chosen) - log odds(rejected)) (ORPO, Hong et al. 2024, eq. 6-7).

    odds = p / (1 - p), p = exp(mean log pi over the completion's tokens).
    """
    s, metrics, pairs = _without_reference(logp, chosen, unit, segment, beta, per_token=True)
    better, worse = -s.chosen_nll, s.rejected / s.rejected_tokens.clamp(min=1)
    odds_ratio = better - worse - _log1mexp(better) + _log1mexp(worse)
    loss = s.chosen_nll - beta * logsigmoid(odds_ratio)
    return RowLoss(pairs.spread(loss), {k: pairs.spread(v) for k, v in metrics.items()})


def _without_reference(
    logp: Tensor,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    beta: float,
    per_token: bool = False,
) -> tuple[Scores, dict[str, Tensor], Pairs]:
    check_shapes(logp=logp, segment=segment)
    pairs = find_pairs(chosen, unit, segment, row_count(segment))
    s, metrics = pair_scores(logp, torch.zeros_like(logp), segment, pairs, beta=beta)
    if per_token:
        c = beta * s.chosen / s.chosen_tokens.clamp(min=1)
        r = beta * s.rejected / s.rejected_tokens.clamp(min=1)
        metrics |= _metrics(c, r)
    return s, metrics, pairs


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0; x = 0 counts as the largest number below it."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453  # log 2: either form is exact on its side
    inner = torch.where(near, x, -1.0)
    outer = torch.where(near, -1.0, x)
    return torch.where(near, (-inner.expm1()).log(), (-outer.exp()).log1p())


# ---- reward models -----------------------------------------------------------------------------


def bradley_terry_loss(
    score: Tensor, chosen: Tensor, unit: Tensor, segment: Tensor, *, center: float = 0.0
) -> RowLoss:
    """-log sigma(score(chosen) - score(rejected)) + center * (sum of the two scores)^2.

    Bradley and Terry 1952; Ouyang et al. 2022, eq. 1. score [R]: the reward model's output, one a
    row. center: keeps scores around 0 (Eisenstein et al. 2023; 0.01 is usual). Metrics: acc,
    chosen_reward, reject_reward, margin.
    """
    return _bradley_terry(score, None, chosen, unit, segment, center)


def bradley_terry_margin_loss(
    score: Tensor,
    margin: Tensor,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    *,
    center: float = 0.0,
) -> RowLoss:
    """bradley_terry_loss with a margin the chosen score must win by (Touvron et al. 2023, eq. 2).

    margin: sample column, equal on both rows of a pair.
    """
    return _bradley_terry(score, margin, chosen, unit, segment, center)


def _bradley_terry(
    score: Tensor,
    margin: Tensor | None,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    center: float,
) -> RowLoss:
    pairs = find_pairs(chosen, unit, segment, len(score))
    better, worse = score[pairs.chosen], score[pairs.rejected]
    gap = better - worse
    if margin is not None:
        check_shapes(margin=margin, segment=segment)
        gap = gap - segment_first(margin, segment, len(score))[pairs.chosen]
    loss = -logsigmoid(gap) + center * (better + worse).square()
    metrics = _metrics(better, worse)
    return RowLoss(pairs.spread(loss), {k: pairs.spread(v) for k, v in metrics.items()})
