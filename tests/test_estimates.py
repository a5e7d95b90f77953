"""Estimates of evaluation against counting by hand, and by drawing every subset."""

import itertools
import math

import pytest
import torch

from fsdprl.estimates import mean_ci95, pass_at_k


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int):
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [1] * passed + [0] * (n - passed)
        subsets = [any(some) for some in itertools.combinations(answers, k)]
        expected = sum(subsets) / len(subsets)
        assert float(pass_at_k(torch.tensor([passed]), torch.tensor([n]), k)) == pytest.approx(
            expected
        )


def test_pass_at_k_edges():
    found = pass_at_k(torch.tensor([0, 1, 3, 500]), torch.tensor([2, 2, 8, 1000]), 4)
    assert found.isnan().tolist() == [True, True, False, False]
    assert float(found[2]) == pytest.approx(1 - 5 / 70)
    with pytest.raises(ValueError, match="pass@0"):
        pass_at_k(torch.tensor([1]), torch.tensor([2]), 0)
    with pytest.raises(ValueError, match="no more answers"):
        pass_at_k(torch.tensor([3]), torch.tensor([2]), 1)


def test_confidence_intervals():
    mean, half = mean_ci95(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert (mean, half) == (0.5, pytest.approx(1.96 * math.sqrt(1 / 3) / 2))
    assert mean_ci95(torch.tensor([1.0, math.nan, 0.0]))[0] == 0.5
    assert mean_ci95(torch.ones(10)) == (1.0, pytest.approx(3.8416 / 13.8416))
    assert mean_ci95(torch.full((10,), 0.3, dtype=torch.float64))[1] == 0.0
    assert math.isnan(mean_ci95(torch.ones(1))[1]) and math.isnan(mean_ci95(torch.ones(0))[0])
