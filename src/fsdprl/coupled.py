"""Preference losses that couple the rows of a batch: AOT's sort, KTO's baseline.

The coupled quantity comes from a pass without gradient (logprobs, then Batch.row_sum), is computed
on the controller over the whole batch, and returns as a sample column or a number. So the loss stays
row-local, and does not depend on ranks or microbatches. Losses follow the contract in losses.py.
"""

import torch
from torch import Tensor

from .losses import RowLoss, check_shapes
from .pairwise import find_pairs, smoothed
from .preference import pair_scores
from .segments import row_count, segment_first, segment_sum


def aot_loss(
    logp: Tensor,
    logp_ref: Tensor,
    aot_target: Tensor,
    chosen: Tensor,
    unit: Tensor,
    segment: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> RowLoss:
    """-log sigma(beta (log pi(chosen) - log pi(rejected) - target)) (AOT, Melnyk et al. 2024).

    aot_target: sample column from aot_targets; the paper's sort over the batch happened there.
    """
    check_shapes(logp=logp, logp_ref=logp_ref, aot_target=aot_target, segment=segment)
    pairs = find_pairs(chosen, unit, segment, row_count(segment))
    _, metrics = pair_scores(logp, logp_ref, segment, pairs, beta=beta)
    policy = segment_sum(logp, segment, pairs.rows)
    target = segment_first(aot_target, segment, pairs.rows)[pairs.chosen]
    delta = policy[pairs.chosen] - policy[pairs.rejected] - target
    loss = smoothed(beta * delta, label_smoothing)
    return RowLoss(pairs.spread(loss), {k: pairs.spread(v) for k, v in metrics.items()})


def aot_unpaired_loss(
    logp: Tensor,
    logp_ref: Tensor,
    aot_target: Tensor,
    chosen: Tensor,
    segment: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> RowLoss:
    """-log sigma(beta (c - r)) of the k-th smallest c and the k-th smallest r of the batch.

    AOT for unpaired data (Melnyk et al. 2024). aot_target: sample column from aot_unpaired_targets,
    the ratio of the row that this one is matched with. Metrics: reward (beta * ratio), chosen_share.
    """
    check_shapes(
        logp=logp, logp_ref=logp_ref, aot_target=aot_target, chosen=chosen, segment=segment
    )
    rows = row_count(segment)
    ratio = segment_sum(logp - logp_ref, segment, rows)
    better = segment_first(chosen, segment, rows).to(torch.bool)
    gap = ratio - segment_first(aot_target, segment, rows)
    loss = smoothed(beta * torch.where(better, gap, -gap), label_smoothing)
    # Each row moves one side of its match, and the partner's row the other: twice the gradient at
    # half the weight, so that the mean over rows has the gradient of the mean over matches.
    loss = 2 * loss - loss.detach()
    metrics = {"reward": beta * ratio.detach(), "chosen_share": better.to(ratio)}
    return RowLoss(loss, metrics)


def aot_targets(logp: Tensor, logp_ref: Tensor, chosen: Tensor, unit: Tensor) -> Tensor:
    """Reference log-ratio of equal rank for each pair, [N], on the controller.

    logp, logp_ref: log-probs of each completion, summed over its tokens (Batch.row_sum of a pass
    without gradient). Both differences chosen - rejected are sorted over the batch; the k-th smallest
    of the policy is matched with the k-th smallest of the reference.
    """
    rows = torch.arange(len(logp))
    pairs = find_pairs(chosen, unit, rows, len(logp))
    policy = logp[pairs.chosen] - logp[pairs.rejected]
    reference = logp_ref[pairs.chosen] - logp_ref[pairs.rejected]
    matched = torch.empty_like(reference)
    matched[policy.argsort(stable=True)] = reference.sort().values
    return pairs.spread(matched)


def aot_unpaired_targets(ratio: Tensor, chosen: Tensor) -> Tensor:
    """Ratio of equal rank on the other side for each row, [N], on the controller.

    ratio: log pi - log pi_ref of each completion, summed over its tokens. Raises ValueError unless as
    many rows are chosen as rejected.
    """
    better, worse = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    if len(better) != len(worse):
        raise ValueError(f"{len(better)} chosen and {len(worse)} rejected rows cannot be matched")
    better = better[ratio[better].argsort(stable=True)]
    worse = worse[ratio[worse].argsort(stable=True)]
    matched = torch.empty_like(ratio)
    matched[better], matched[worse] = ratio[worse], ratio[better]
    return matched


def kto_loss(
    logp: Tensor,
    logp_ref: Tensor,
    desirable: Tensor,
    segment: Tensor,
    *,
    beta: float = 0.1,
    baseline: float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> RowLoss:
    """1 - sigma(beta (x - z)) for desirable rows, 1 - sigma(beta (z - x)) for the others.

    KTO (Ethayarajh et al. 2024, eq. 8); x is log pi - log pi_ref of the row. baseline: z, the mean of
    x over mismatched prompts and answers, at least 0, from a pass without gradient; 0 throughout is
    APO-zero for unpaired data. Metrics: acc, reward (beta * x), desirable.
    """
    check_shapes(logp=logp, logp_ref=logp_ref, desirable=desirable, segment=segment)
    rows = row_count(segment)
    gap = segment_sum(logp - logp_ref, segment, rows) - baseline
    good = segment_first(desirable, segment, rows).to(torch.bool)
    loss = torch.where(
        good,
        desirable_weight * (1 - torch.sigmoid(beta * gap)),
        undesirable_weight * (1 - torch.sigmoid(-beta * gap)),
    )
    metrics = {
        "acc": ((gap > 0) == good).to(gap),
        "reward": beta * (gap + baseline),
        "desirable": good.to(gap),
    }
    return RowLoss(loss, {name: values.detach() for name, values in metrics.items()})
