"""What a sampled evaluation says: unbiased estimates, and how sure they are."""

import math

import torch
from torch import Tensor


def pass_at_k(passed_P: Tensor, sampled_P: Tensor, k: int) -> Tensor:
    """Chance that at least one of k answers to a prompt passes, float64 [P], estimated from n >= k answers.

    1 - C(n - c, k) / C(n, k) for c passed of n sampled answers: unbiased (Chen et al. 2021, arXiv:2107.03374,
    equation 1). NaN where n < k. Raises ValueError for k < 1 or where c > n.
    """
    if k < 1 or bool((passed_P > sampled_P).any()):
        raise ValueError(
            f"pass@{k}: k must be at least 1, and no more answers can pass than there are"
        )
    made = [
        1.0 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan
        for c, n in zip(passed_P.tolist(), sampled_P.tolist(), strict=True)
    ]
    return torch.tensor(made, dtype=torch.float64)


def mean_ci95(values_P: Tensor) -> tuple[float, float]:
    """(mean, half-width of its 95 % confidence interval) over prompts; NaN prompts are left out.

    1.96 standard errors, prompts being the independent draws: several answers to one prompt must first be averaged
    (Miller 2024, arXiv:2411.00640). Where all values are the same, 0 or 1, that would be no width at all: then
    Wilson's interval (1927), as seen from the mean. Half-width NaN for fewer than two prompts.
    """
    values = values_P[~values_P.isnan()].double()
    count = len(values)
    if not count:
        return math.nan, math.nan
    mean = float(values.mean())
    if count < 2:
        return mean, math.nan
    if bool((values == values[0]).all()) and mean in (0.0, 1.0):
        z2 = 1.96**2
        return mean, z2 / (count + z2)
    return mean, 1.96 * float(values.std()) / math.sqrt(count)
