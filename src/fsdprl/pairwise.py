"""Preference losses of one pair of completions: tensors over P pairs in, [P] out, not reduced.

c and r are log pi - log pi_ref of the chosen and the rejected completion, summed over loss tokens;
delta is c - r, or the difference of an f-divergence's scores; sigma is the logistic function.
preference.py turns rows of tokens into these scores and mixes the losses by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .losses import check_shapes
from .segments import segment_count, segment_first


@dataclass(frozen=True)
class Pairs:
    """Where the two rows of each pair are. chosen, rejected: row ordinals [P]."""

    chosen: Tensor
    rejected: Tensor
    rows: int

    def spread(self, x: Tensor) -> Tensor:
        """[P] -> [R]: each pair's number on both of its rows."""
        at_chosen = x.new_zeros(self.rows).index_add(0, self.chosen, x)
        return at_chosen.index_add(0, self.rejected, x)


def find_pairs(chosen: Tensor, unit: Tensor, segment: Tensor, rows: int) -> Pairs:
    """Match chosen and rejected rows by unit.

    Raises ValueError if a unit is not exactly one chosen and one rejected row with loss tokens.
    """
    check_shapes(chosen=chosen, unit=unit, segment=segment)
    present = segment_count(segment, rows).nonzero().flatten()
    better = segment_first(chosen.to(torch.int64), segment, rows)[present]
    units, pair = torch.unique(segment_first(unit, segment, rows)[present], return_inverse=True)
    winners = torch.zeros_like(units, dtype=torch.int64).index_add(0, pair, better)
    both = torch.zeros_like(winners).index_add(0, pair, torch.ones_like(pair))
    wrong = ((winners != 1) | (both != 2)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"unit {units[first].item()} has {int(winners[first])} chosen of {int(both[first])} rows "
            f"with loss tokens: a pair is one chosen and one rejected row of the same `unit`"
        )
    order = torch.argsort(2 * pair + (1 - better))
    return Pairs(present[order[0::2]], present[order[1::2]], rows)


@dataclass(frozen=True)
class Scores:
    """What a pair loss may look at. Every tensor is [P]."""

    chosen: Tensor
    """c."""
    rejected: Tensor
    """r."""
    chosen_score: Tensor
    """f'(exp c) of the f-divergence; c itself for reverse KL."""
    rejected_score: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_nll: Tensor
    """Mean of -log pi over the chosen completion's tokens."""

    @property
    def delta(self) -> Tensor:
        return self.chosen_score - self.rejected_score

    @property
    def token_delta(self) -> Tensor:
        """Difference of scores per token."""
        chosen = self.chosen_score / self.chosen_tokens.clamp(min=1)
        return chosen - self.rejected_score / self.rejected_tokens.clamp(min=1)


def smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    """-log sigma(x) under labels that are wrong with probability label_smoothing."""
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def sigmoid(s: Scores, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigma(beta delta): DPO (Rafailov et al. 2023, eq. 7).

    label_smoothing: probability that the label is wrong (cDPO, Mitchell 2023).
    """
    return smoothed(beta * s.delta, label_smoothing)


def sigmoid_norm(s: Scores, *, beta: float) -> Tensor:
    """-log sigma of beta times the difference of scores per token (length-normalised DPO)."""
    return -logsigmoid(beta * s.token_delta)


def robust(s: Scores, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO made unbiased under labels flipped at a known rate (rDPO, Chowdhury et al. 2024).

    label_smoothing: that rate, below 0.5.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"robust needs label_smoothing in [0, 0.5), got {label_smoothing}")
    x = beta * s.delta
    clean, flipped = logsigmoid(x), logsigmoid(-x)
    return -((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def hinge(s: Scores, *, beta: float) -> Tensor:
    """max(0, 1 - beta delta): SLiC (Zhao et al. 2023) on DPO's margin, RSO (Liu et al. 2023)."""
    return torch.relu(1 - beta * s.delta)


def ipo(s: Scores, *, beta: float) -> Tensor:
    """(difference of scores per token - 1 / (2 beta))^2: IPO (Azar et al. 2023, eq. 17).

    Per token, as its authors ran it. For sums over tokens see ipo_sum: equal beta, another strength.
    """
    return (s.token_delta - 1 / (2 * beta)).square()


def ipo_sum(s: Scores, *, beta: float) -> Tensor:
    """(delta - 1 / (2 beta))^2: IPO over sums of tokens, as ROLL has it."""
    return (s.delta - 1 / (2 * beta)).square()


def exo_pair(s: Scores, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Reverse KL from the softmax of scores to labels (1 - eps, eps) (EXO, Ji et al. 2024, eq. 16).

    label_smoothing: eps, which must be positive (1e-3 is usual).
    """
    if not 0 < label_smoothing < 1:
        raise ValueError(f"exo_pair needs label_smoothing in (0, 1), got {label_smoothing}")
    win, lose = logsigmoid(beta * s.delta), logsigmoid(-beta * s.delta)
    return win.exp() * (win - math.log1p(-label_smoothing)) + lose.exp() * (
        lose - math.log(label_smoothing)
    )


def nca_pair(s: Scores, *, beta: float) -> Tensor:
    """-log sigma(beta c) - (log sigma(-beta c) + log sigma(-beta r)) / 2 (NCA, Chen et al. 2024)."""
    c, r = beta * s.chosen, beta * s.rejected
    return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


def bco_pair(s: Scores, *, beta: float, shift: float = 0.0) -> Tensor:
    """-log sigma(beta c - shift) - log sigma(-(beta r - shift)) (BCO, Jung et al. 2024, eq. 9).

    shift: running mean of beta c and beta r (a pass without gradient, kept by the recipe), or 0.
    """
    return -logsigmoid(beta * s.chosen - shift) - logsigmoid(shift - beta * s.rejected)


def sppo_hard(s: Scores, *, beta: float) -> Tensor:
    """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2 (SPPO, Wu et al. 2024, eq. 4.7, hard labels)."""
    return (s.chosen - 0.5 / beta).square() + (s.rejected + 0.5 / beta).square()


def apo_zero(s: Scores, *, beta: float) -> Tensor:
    """1 - sigma(beta c) + sigma(beta r): chosen up, rejected down (APO, D'Oosterlinck 2024, eq. 7)."""
    return 1 - torch.sigmoid(beta * s.chosen) + torch.sigmoid(beta * s.rejected)


def apo_down(s: Scores, *, beta: float) -> Tensor:
    """sigma(beta c) + 1 - sigma(beta (c - r)): down with both, rejected more (APO, eq. 8)."""
    return torch.sigmoid(beta * s.chosen) + 1 - torch.sigmoid(beta * (s.chosen - s.rejected))


def discopop(s: Scores, *, beta: float, discopop_tau: float = 0.05) -> Tensor:
    """Logistic loss blended into exp(-x) by sigma(x / tau), x = beta delta (Lu et al. 2024, eq. 5)."""
    x = beta * s.delta
    blend = torch.sigmoid(x / discopop_tau)
    return -logsigmoid(x) * (1 - blend) + (-x).exp() * blend


def sft(s: Scores) -> Tensor:
    """Mean of -log pi over the chosen completion's tokens."""
    return s.chosen_nll


PAIR_LOSSES: dict[str, Callable[..., Tensor]] = {
    fn.__name__: fn
    for fn in (
        sigmoid,
        sigmoid_norm,
        robust,
        hinge,
        ipo,
        ipo_sum,
        exo_pair,
        nca_pair,
        bco_pair,
        sppo_hard,
        apo_zero,
        apo_down,
        discopop,
        sft,
    )
}
"""Losses that dpo_loss mixes by name."""

OF_SCORES = {"sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "ipo_sum", "exo_pair", "discopop"}
"""Losses of the f-divergence's scores; the others are defined for reverse KL only."""
