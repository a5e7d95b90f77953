"""The optimizer against torch's own, by hand, and in what it refuses."""

import math

import pytest
import solo
import tiny
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdprl.loss_scale import GROW_AFTER, LossScale
from fsdprl.optim import NonFiniteError, Optimizer

RATES = (1e-2, 3e-3, 2e-2)


def whole(model):
    return {n: p.full_tensor().clone() for n, p in model.named_parameters()}


def accumulate(model, seed=0):
    """A gradient of ordinary size, from two microbatches."""
    for part in (seed, seed + 100):
        logp, _ = model(solo.packed(9, 4, 30, seed=part))
        logp.sum().backward()


def copies(model):
    """The model's parameters and gradients as plain tensors for torch's optimizers."""
    made = {}
    for name, parameter in model.named_parameters():
        made[name] = nn.Parameter(parameter.full_tensor().detach().clone())
        made[name].grad = parameter.grad.full_tensor().clone()
    return made


@pytest.mark.parametrize("architecture", ["qwen2_tied", "qwen3_moe"])
def test_adamw_equals_torch(architecture):
    """Three steps, decay on matrices only, clipping (torch adds 1e-6 to the norm), changing rates."""
    model = solo.load(tiny.checkpoint(architecture), dtype="float64")
    optimizer = Optimizer(model, betas=(0.9, 0.95), eps=1e-6)
    accumulate(model)
    plain = copies(model)
    model.zero_grad()
    groups = [
        {"params": [p for p in plain.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
    for seed, rate in enumerate(RATES):
        accumulate(model, seed)
        for name, copy in copies(model).items():
            plain[name].grad = copy.grad
        norm = nn.utils.clip_grad_norm_(plain.values(), 1.5)
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        metrics = optimizer.step(lr=rate, weight_decay=0.1, max_grad_norm=1.5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
        assert float(norm) > 1.5
        assert all(parameter.grad is None for parameter in model.parameters())
        for name, value in whole(model).items():
            torch.testing.assert_close(value, plain[name].detach(), rtol=0, atol=1e-9)


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
        self.vector = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        self.unused = nn.Parameter(torch.tensor([7.0], dtype=torch.float64))
        self.frozen = nn.Parameter(torch.tensor([8.0]), requires_grad=False)

    def push(self, matrix, vector):
        self.matrix.grad = torch.tensor([matrix], dtype=torch.float64)
        self.vector.grad = torch.tensor([vector], dtype=torch.float64)


def test_sgd_by_hand():
    """w <- w (1 - lr decay) - lr g; the norm of (3, 4, 12) is 13."""
    toy = Toy()
    optimizer = Optimizer(toy, kind="sgd")
    toy.push([3.0, 4.0], 12.0)
    assert optimizer.step(lr=0.1, weight_decay=0.5)["grad_norm"] == 13.0
    torch.testing.assert_close(
        toy.matrix.data, torch.tensor([[0.95 - 0.3, -1.9 - 0.4]], dtype=torch.float64)
    )
    assert toy.vector.item() == pytest.approx(3.0 - 1.2)
    assert toy.unused.item() == 7.0 and toy.frozen.item() == 8.0
    assert optimizer.state_tensors().keys() == {"steps"}


def test_clipping_by_hand():
    """A norm of 13 clipped to 6.5 halves the gradient; a limit above the norm changes nothing."""
    for limit, share in ((6.5, 0.5), (20.0, 1.0), (0.0, 1.0), (None, 1.0)):
        toy = Toy()
        toy.push([3.0, 4.0], 12.0)
        metrics = Optimizer(toy, kind="sgd").step(lr=0.1, max_grad_norm=limit)
        assert metrics["grad_norm"] == 13.0
        assert toy.vector.item() == pytest.approx(3.0 - 1.2 * share)


def test_first_adamw_step_by_hand():
    """Bias correction makes the first step lr * sign(g), after decay lr * 0.1 of a matrix."""
    toy = Toy()
    optimizer = Optimizer(toy, eps=0.0)
    toy.push([3.0, -4.0], 12.0)
    optimizer.step(lr=0.01, weight_decay=0.1)
    want = torch.tensor([[0.999 - 0.01, -1.998 + 0.01]], dtype=torch.float64)
    torch.testing.assert_close(toy.matrix.data, want, rtol=0, atol=1e-8)
    assert toy.vector.item() == pytest.approx(2.99)
    assert float(optimizer.steps) == 1.0


def test_norm_of_many_float32_values_is_exact():
    """A million squares summed in float32 alone are off by 1e-5 and more."""
    toy = nn.Module()
    toy.wide = nn.Parameter(torch.zeros(1001, 1003))
    toy.wide.grad = torch.full((1001, 1003), 1e-3) * torch.arange(1003)
    want = math.sqrt(1001 * sum((1e-3 * i) ** 2 for i in range(1003)))
    norm = Optimizer(toy, kind="sgd").step(lr=0.0)["grad_norm"]
    assert norm == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_stops_before_any_change(bad):
    model = solo.load(tiny.checkpoint("qwen3"))
    optimizer = Optimizer(model)
    accumulate(model)
    optimizer.step(lr=1e-2, max_grad_norm=1.0)
    before = whole(model)
    state = {n: t.clone() for n, t in optimizer.state_tensors().items()}
    accumulate(model)
    name = "hf.model.layers.1.mlp.up_proj.weight"
    dict(model.named_parameters())[name].grad.to_local()[3, 4] = bad
    with pytest.raises(NonFiniteError, match=f"{name}.*no weight has changed"):
        optimizer.step(lr=1e-2, max_grad_norm=1.0)
    for name, value in whole(model).items():
        assert torch.equal(value, before[name]), name
    for name, value in optimizer.state_tensors().items():
        assert torch.equal(_plain(value), _plain(state[name])), name
    optimizer.zero_grad()
    accumulate(model)
    assert math.isfinite(optimizer.step(lr=1e-2)["grad_norm"])


def small_gradient(dtype, scale):
    """Gradient of a loss with weights as small as a mean over many tokens makes them, unscaled again."""
    model = solo.load(tiny.checkpoint("qwen3"), dtype=dtype)
    logp, _ = model(solo.packed(9, 4, 30))
    (logp.sum() * 1e-6 * scale).backward()
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]) / scale


def test_small_gradients_survive_float16():
    want = small_gradient("float32", 1.0)
    scale = Optimizer(solo.load(tiny.checkpoint("qwen3"), dtype="float16")).loss_scale
    off = [(small_gradient("float16", by) - want).norm() / want.norm() for by in (scale, 1.0)]
    assert scale == 2.0**15
    assert off[0] < 0.02
    assert off[1] > 0.2, "without scaling this test would show nothing"


def test_an_overflow_in_float16_leaves_the_step_out_and_halves_the_scale():
    model = solo.load(tiny.checkpoint("qwen3"), dtype="float16")
    optimizer = Optimizer(model, kind="sgd")
    before = whole(model)
    logp, _ = model(solo.packed(9))
    (logp.sum() * 1e6 * optimizer.loss_scale).backward()
    assert optimizer.step(lr=1e-2) == {"loss_scale": 2.0**14}
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    assert float(optimizer.steps) == 0.0
    logp, _ = model(solo.packed(9))
    (logp.mean() * 0.05 * optimizer.loss_scale).backward()
    norm = math.sqrt(
        sum(float((p.grad.full_tensor() / 2.0**14).square().sum()) for p in model.parameters())
    )
    stepped = optimizer.step(lr=1e-2, max_grad_norm=norm / 2)
    assert stepped == {"grad_norm": pytest.approx(norm, rel=1e-5), "loss_scale": 2.0**14}
    moved = math.sqrt(sum(float((v - before[n]).square().sum()) for n, v in whole(model).items()))
    assert moved == pytest.approx(1e-2 * norm / 2, rel=1e-2)


def test_a_loss_scale_ends_at_one_and_grows_after_many_good_steps():
    scale = LossScale()
    assert all(scale.overflowed() for _ in range(15))
    assert scale.value == 1.0
    assert not scale.overflowed(), "a gradient that is not finite unscaled either is an error"
    for _ in range(2 * GROW_AFTER):
        scale.held()
    assert scale.value == 4.0


def test_float16_saves_its_scale():
    model = solo.load(tiny.checkpoint("qwen3"), dtype="float16")
    optimizer, resumed = Optimizer(model), Optimizer(model)
    optimizer.scale.overflowed()
    resumed.load_state_tensors(optimizer.state_tensors())
    assert resumed.loss_scale == 2.0**14


def _plain(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_state_continues_where_it_was_saved():
    path = tiny.checkpoint("qwen3")
    first = solo.load(path)
    optimizer = Optimizer(first)
    accumulate(first)
    optimizer.step(lr=1e-2)
    saved = {n: _plain(t).clone() for n, t in optimizer.state_tensors().items()}
    weights = whole(first)
    second = solo.load(path, seed=1)
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            parameter.to_local().copy_(weights[name])
    resumed = Optimizer(second)
    resumed.load_state_tensors(saved)
    for model, continued in ((first, optimizer), (second, resumed)):
        accumulate(model, seed=5)
        continued.step(lr=1e-2)
    assert float(resumed.steps) == 2.0
    for name, value in whole(second).items():
        assert torch.equal(value, whole(first)[name]), name


def test_built_after_inference_it_still_sees_the_shards():
    model = solo.load(tiny.checkpoint("qwen3"))
    with torch.no_grad():
        model(solo.packed(5))
    moments = Optimizer(model).state_tensors()
    names = [name for name, _ in model.named_parameters()]
    assert {f"exp_avg.{n}" for n in names} | {f"exp_avg_sq.{n}" for n in names} == set(moments) - {
        "steps"
    }
    assert all(isinstance(t, DTensor) for n, t in moments.items() if n != "steps")


def test_frozen_models_have_no_state():
    model = solo.load(tiny.checkpoint("qwen3"), trainable=False)
    assert Optimizer(model).state_tensors().keys() == {"steps"}
