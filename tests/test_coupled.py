"""Batch-coupled preference losses: equal to the coupled formulas, and row-local once they have their column."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn.functional import logsigmoid

from fsdprl.coupled import (
    aot_loss,
    aot_targets,
    aot_unpaired_loss,
    aot_unpaired_targets,
    kto_loss,
)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch(seed, pairs=5):
    """Token columns of 2 * pairs rows in mixed order, and the per-row sums the controller sees."""
    torch.manual_seed(seed)
    rows = 2 * pairs
    segment = torch.repeat_interleave(torch.arange(rows), torch.randint(1, 6, (rows,)))
    logp, ref = -2 * torch.rand(2, len(segment), dtype=torch.float64)
    order = torch.randperm(rows)
    chosen, unit = (order % 2 == 0), order // 2 + 100

    def row_sum(x):
        return torch.zeros(rows, dtype=torch.float64).index_add(0, segment, x)

    return logp, ref, segment, chosen, unit, row_sum


def sides(x, chosen, unit):
    """Row numbers [N] as chosen [P] and rejected [P], pairs in order of their unit."""
    better, worse = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    return x[better[unit[better].argsort()]], x[worse[unit[worse].argsort()]]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_aot_is_the_sort_over_the_whole_batch(label_smoothing):
    logp, ref, segment, chosen, unit, row_sum = batch(0)
    logp.requires_grad_()
    # The coupled formula: sort both log-ratios over the batch, subtract.
    (pc, pr), (rc, rr) = (sides(row_sum(x), chosen, unit) for x in (logp, ref))
    delta = 0.3 * ((pc - pr).sort().values - (rc - rr).sort().values)
    coupled = -(1 - label_smoothing) * logsigmoid(delta) - label_smoothing * logsigmoid(-delta)
    (expected,) = torch.autograd.grad(coupled.mean(), logp)

    target = aot_targets(row_sum(logp.detach()), row_sum(ref), chosen, unit)
    tokens = [x[segment] for x in (target, chosen, unit)]
    result = aot_loss(logp, ref, *tokens, segment, beta=0.3, label_smoothing=label_smoothing)
    assert result.loss.mean().item() == pytest.approx(coupled.mean().item(), abs=1e-14)
    (gradient,) = torch.autograd.grad(result.loss.mean(), logp)
    assert torch.allclose(gradient, expected, atol=1e-15)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_aot_unpaired_is_the_sort_of_each_side(label_smoothing):
    logp, ref, segment, chosen, _unit, row_sum = batch(1)
    logp.requires_grad_()
    ratio = row_sum(logp - ref)
    delta = 0.3 * (ratio[chosen].sort().values - ratio[~chosen].sort().values)
    coupled = -(1 - label_smoothing) * logsigmoid(delta) - label_smoothing * logsigmoid(-delta)
    (expected,) = torch.autograd.grad(coupled.mean(), logp)

    target = aot_unpaired_targets(row_sum((logp - ref).detach()), chosen)
    result = aot_unpaired_loss(
        logp,
        ref,
        target[segment],
        chosen[segment],
        segment,
        beta=0.3,
        label_smoothing=label_smoothing,
    )
    assert result.loss.mean().item() == pytest.approx(coupled.mean().item(), abs=1e-14)
    (gradient,) = torch.autograd.grad(result.loss.mean(), logp)
    assert torch.allclose(gradient, expected, atol=1e-15)


def test_aot_metrics_are_those_of_dpo():
    segment, chosen = torch.tensor([0, 0, 1]), torch.tensor([True, True, False])
    unit, target = torch.tensor([6, 6, 6]), t(0.5, 0.5, 0.5)
    result = aot_loss(t(-1, -2, -4), t(-2, -2, -3), target, chosen, unit, segment, beta=0.1)
    assert result.loss.tolist() == pytest.approx([math.log1p(math.exp(-0.1 * (1 - 0.5)))] * 2)
    assert result.metrics["chosen_reward"].tolist() == pytest.approx([0.1, 0.1])
    assert result.metrics["reject_reward"].tolist() == pytest.approx([-0.1, -0.1])


def test_unequal_sides_are_refused():
    with pytest.raises(ValueError, match="2 chosen and 1 rejected"):
        aot_unpaired_targets(t(1, 2, 3), torch.tensor([True, True, False]))


KTO = (
    t(-1.0, -1.0, -2.0, -3.0),
    t(-1.5, -1.5, -1.0, -2.5),
    torch.tensor([True, True, False, True]),
    torch.tensor([0, 0, 1, 3]),
)


def sigma(x):
    return 1 / (1 + math.exp(-x))


def test_kto_by_hand():
    # x: 1 (desirable), -1 (not), -.5 (desirable); row 2 has no loss tokens.
    result = kto_loss(*KTO, beta=0.5, baseline=0.2, desirable_weight=2.0, undesirable_weight=3.0)
    expected = [2 * (1 - sigma(0.4)), 3 * (1 - sigma(0.6)), 2 * (1 - sigma(-0.35))]
    assert result.loss[[0, 1, 3]].tolist() == pytest.approx(expected)
    assert result.loss.isfinite().all()
    assert result.metrics["acc"][[0, 1, 3]].tolist() == [1, 1, 0]
    assert result.metrics["reward"][[0, 1, 3]].tolist() == pytest.approx([0.5, -0.5, -0.25])
    assert result.metrics["desirable"].tolist() == [1, 0, 0, 1]


def test_kto_gradient_and_options():
    logp, *rest = KTO
    assert gradcheck(
        lambda x: kto_loss(x, *rest, baseline=0.3).loss, (logp.clone().requires_grad_(),)
    )
    before = kto_loss(*KTO).loss
    for option in ("beta", "baseline", "desirable_weight", "undesirable_weight"):
        assert not torch.allclose(before, kto_loss(*KTO, **{option: 0.7}).loss), option
    with pytest.raises(ValueError, match="one shape"):
        kto_loss(logp, rest[0], rest[1][:1], rest[2])
