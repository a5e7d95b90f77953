"""KL estimates and controllers against worked values."""

import math

import pytest
import torch

from fsdprl.kl import AdaptiveKL, FixedKL, kl_estimate


def estimate(logp, ref, kind, **options):
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (logp, ref)]
    return kl_estimate(*tensors, kind=kind, **options).item()


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        (-1.2, {"k1": 0.2, "abs": 0.2, "k2": 0.02, "k3": 0.018731}),
        (-0.5, {"k1": -0.5, "abs": 0.5, "k2": 0.125, "k3": 0.148721}),
    ],
)
def test_golden_values(ref, expected):
    for kind, value in expected.items():
        assert estimate(-1.0, ref, kind) == pytest.approx(value, abs=5e-7)


def test_k3_is_exact_near_zero():
    # exp(d) - d - 1 loses every digit in float32 at d = 1e-4; the estimate must not.
    d = torch.tensor([1e-4], dtype=torch.float32)
    assert kl_estimate(torch.zeros(1), d, kind="k3").item() == pytest.approx(5e-9, rel=1e-2)


def test_clamp_is_an_option():
    assert estimate(-30.0, 0.0, "k3", clamp=True) == 10.0
    assert estimate(0.0, -30.0, "k1", clamp=True) == 10.0
    assert estimate(-3.0, 0.0, "k3") == pytest.approx(math.exp(3) - 4)
    assert estimate(-30.0, 0.0, "k3") > 1e12


def test_refusals():
    with pytest.raises(ValueError, match="differ"):
        kl_estimate(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="full")  # pyright: ignore


def test_expectation_and_gradient_over_a_whole_distribution():
    """k1 and k3 average to the KL; k2's gradient, on policy, is that of the KL."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    kl = (logp.exp() * (logp - reference)).sum()
    for kind in ("k1", "k3"):
        mean = (logp.exp() * kl_estimate(logp, reference, kind=kind)).sum()
        assert mean.item() == pytest.approx(kl.item(), abs=1e-12)
    expected = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    k2 = (logp.exp().detach() * kl_estimate(logp, reference, kind="k2")).sum()
    assert torch.allclose(torch.autograd.grad(k2, logits)[0], expected, atol=1e-12)


def test_adaptive_controller():
    control = AdaptiveKL(0.01, target=100.0, horizon=1000)
    assert control.update(150.0, 256) == pytest.approx(0.010512)
    # The error is cut at 20 % on either side.
    assert AdaptiveKL(1.0, 1.0, 1000).update(1e9, 1000) == pytest.approx(1.2)
    assert AdaptiveKL(1.0, 1.0, 1000).update(0.0, 1000) == pytest.approx(0.8)
    assert AdaptiveKL(1.0, 1.0, 1000).update(1.1, 500) == pytest.approx(1.05)
    with pytest.raises(ValueError, match="target"):
        AdaptiveKL(1.0, target=0.0)


def test_controllers_resume():
    control = AdaptiveKL(0.01, target=100.0, horizon=1000)
    control.update(150.0, 256)
    resumed = AdaptiveKL(0.01, target=100.0, horizon=1000)
    resumed.load_state_dict(control.state_dict())
    assert resumed.update(80.0, 10) == control.update(80.0, 10)
    fixed = FixedKL(0.5)
    assert fixed.update(99.0, 10) == 0.5
    fixed.load_state_dict({"coef": 0.25})
    assert fixed.update(0.0, 1) == 0.5 and fixed.state_dict() == {"coef": 0.5}  # as the flag says
