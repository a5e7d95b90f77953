"""Losses beside PPO's clip, against values worked by hand."""

import math

import pytest
import torch

from fsdprl.losses import clipped_surrogate, policy_gradient
from fsdprl.surrogates import (
    chord_loss,
    fipo_surrogate,
    mirror_descent_loss,
    real_loss,
    sapo_loss,
    sdar_loss,
    topr_loss,
)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sapo_by_hand():
    ratio, advantage = t(1.0, 1.5, 0.5, 1.5, 0.5), t(2, 1, 1, -1, -1)
    loss, metrics = sapo_loss(ratio.log(), torch.zeros(5).double(), advantage)
    # 4 / tau * sigmoid(tau (r - 1)), tau 1 for A > 0 and 1.05 for A < 0
    assert loss.tolist() == pytest.approx(
        [
            -4.0,
            -4 * sigmoid(0.5),
            -4 * sigmoid(-0.5),
            4 / 1.05 * sigmoid(0.525),
            4 / 1.05 * sigmoid(-0.525),
        ]
    )
    gate = [4 * sigmoid(x) * sigmoid(-x) for x in (0, 0.5, -0.5, 0.525, -0.525)]
    assert metrics["gate"].tolist() == pytest.approx(gate) and gate[0] == 1.0
    with pytest.raises(ValueError, match="tau_negative 0"):
        sapo_loss(ratio, ratio, ratio, tau_negative=0.0)


def test_on_policy_sapo_has_the_gradient_of_reinforce():
    advantage, gradients = t(1.5, -0.5, 2.0), []
    for loss in (
        lambda x: sapo_loss(x, x.detach(), advantage)[0],
        lambda x: policy_gradient(x, advantage)[0],
    ):
        logp = t(-1, -2, -0.5).requires_grad_()
        gradients.append(torch.autograd.grad(loss(logp).sum(), logp)[0])
    assert torch.allclose(*gradients)


def test_topr_by_hand():
    """Answers of 2, 2 and 1 tokens: good; bad and less likely (0.5 * 0.8); bad and more likely."""
    segment = torch.tensor([0, 0, 1, 1, 2])
    ratio, advantage = t(3.0, 2.0, 0.5, 0.8, 1.7), t(1, 1, -2, -2, -1)
    old = t(-1, -2, -3, -1, -2)
    logp = (old + ratio.log()).requires_grad_()
    loss, metrics = topr_loss(logp, old, advantage, segment)
    weight = [1, 1, 0.4, 0.4, 1]
    assert metrics["taper"].tolist() == pytest.approx(weight)
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-1, -1, 2 * 0.4, 2 * 0.4, 1])
    wanted = [-w * a * x for w, a, x in zip(weight, advantage, logp.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx([float(x) for x in wanted])


def test_sdar_by_hand():
    """Gaps of 0.2, 0 and -0.4 between the teacher and the policy; only the policy has a gradient, through no gate."""
    logp, teacher = t(-1.0, -2.0, -0.5).requires_grad_(), t(-0.8, -2.0, -0.9)
    loss, metrics = sdar_loss(logp, teacher, coef=0.1, gate_beta=5.0)
    gates = [sigmoid(1.0), 0.5, sigmoid(-2.0)]
    assert metrics["teacher_gate"].tolist() == pytest.approx(gates)
    assert metrics["teacher_gap"].tolist() == pytest.approx([0.2, 0.0, -0.4])
    expected = [0.1 * sigmoid(1.0) * 0.2, 0.0, -0.1 * sigmoid(-2.0) * 0.4]
    assert loss.tolist() == pytest.approx(expected)
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.1 * gate for gate in gates])
    with pytest.raises(ValueError, match="gate_beta 0"):
        sdar_loss(logp, teacher, gate_beta=0.0)


def test_mirror_descent_by_hand():
    """Sums of log-probs -3 and -1, old ones -4 and -0.5, tau 0.2."""
    segment = torch.tensor([0, 0, 1])
    result = mirror_descent_loss(t(-1, -2, -1), t(-1.5, -2.5, -0.5), t(2, 2, -1), segment, tau=0.2)
    assert result.loss.tolist() == pytest.approx([6 + 0.1 * 1.0, -1 + 0.1 * 0.25])
    assert result.metrics["squared_gap"].tolist() == pytest.approx([1.0, 0.25])


def test_fipo_weighs_a_token_by_what_follows_it():
    """gamma 0.5 (half-life 1); rows of 3 and 1 tokens."""
    segment = torch.tensor([0, 0, 0, 1])
    gap, advantage = t(0.1, -0.2, 0.3, -0.4), t(1, 1, 1, -1)
    options = {"half_life": 1.0, "weight_low": 0.8, "weight_high": 1.2}
    loss, metrics = fipo_surrogate(gap, torch.zeros(4).double(), advantage, segment, **options)
    future = [0.1 + 0.5 * (-0.2 + 0.5 * 0.3), -0.2 + 0.5 * 0.3, 0.3, -0.4]
    weight = [math.exp(future[0]), math.exp(future[1]), 1.2, 0.8]
    assert metrics["future_weight"].tolist() == pytest.approx(weight)
    plain, _ = clipped_surrogate(
        gap, torch.zeros(4).double(), advantage * t(*weight), clip_high=0.28
    )
    assert torch.allclose(loss, plain)


def test_fipo_leaves_out_what_has_run_away():
    """A ratio above the dual clip is not counted; a bad token of a high ratio is not amplified."""
    segment, zeros = torch.tensor([0, 0]), torch.zeros(2).double()
    options = {"half_life": 1.0, "dual_clip": 10.0, "weight_high": 1.5}
    _, metrics = fipo_surrogate(t(0.2, math.log(11)), zeros, t(1, 1), segment, **options)
    assert metrics["future_weight"].tolist() == pytest.approx([math.exp(0.2), 1.0])
    _, metrics = fipo_surrogate(t(math.log(5), 0.1), zeros, t(-1, -1), segment, **options)
    assert metrics["future_weight"].tolist() == pytest.approx([1.0, math.exp(0.1)])


def test_chord_by_hand():
    logp = t(0.5, 0.9, 0.01).log().requires_grad_()
    loss, metrics = chord_loss(logp)
    assert metrics["phi"].tolist() == pytest.approx([0.25, 0.09, 0.0099])
    assert loss.tolist() == pytest.approx(
        [0.25 * math.log(2), -0.09 * math.log(0.9), -0.0099 * math.log(0.01)]
    )
    loss.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-0.25, -0.09, -0.0099])


def test_real_by_hand():
    """A group with two good answers and a bad one, and one with a bad answer alone; tau 0.5."""
    segment = torch.tensor([0, 0, 1, 2, 3])
    unit = torch.tensor([7, 7, 7, 7, 9])
    correct = torch.tensor([True, True, False, True, False])
    logp = t(0.3, 0.1, -0.2, 0.4, 0.6)
    result = real_loss(logp, torch.zeros(5).double(), correct, unit, segment)
    s = [0.2, -0.2, 0.4, 0.6]
    assert result.metrics["score"].tolist() == pytest.approx(s)
    first = math.log(1 + math.exp(-s[0] / 0.5) + math.exp(-s[2] / 0.5))
    first += math.log(1 + math.exp(s[1] / 0.5))
    second = math.log(1 + math.exp(s[3] / 0.5))
    assert result.loss.tolist() == pytest.approx([first, first, first, second])


def test_real_gradient_is_bounded_and_stays_finite_far_away():
    """1 / tau is the most a row can get, however far its ratio has gone."""
    logp = t(-400, 300, 500, -600).requires_grad_()
    correct = torch.tensor([True, True, False, False])
    unit, segment = torch.tensor([1, 1, 1, 1]), torch.arange(4)
    result = real_loss(logp, torch.zeros(4).double(), correct, unit, segment, tau=0.5)
    (result.loss.sum() / 4).backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-2, 0, 2, 0])
