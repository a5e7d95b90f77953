"""What must hold for every loss of the library and of the recipes: gradient, options, metrics."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fsdprl.functions import positional_names
from fsdprl.losses import RowLoss
from fsdprl.pairwise import PAIR_LOSSES
from fsdprl.preference import dpo_loss
from tests.every_loss import DIFFERENTIATED, columns, every_loss, settings

NEEDED: dict[str, dict[str, Any]] = {
    "kl_penalty": {"coef": 1.0},
    "entropy_bonus": {"coef": 1.0},
    "router_balance_loss": {"coef": 1.0},
    **{
        f"{recipe}.surrogate": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
        for recipe in ("grpo", "grpo_tools", "grpo_self_correct")
    },
}
"""Options without a default."""
SMOOTHED = {"label_smoothing": 0.01}
OTHER: dict[str, Any] = {
    "clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.3, "ratio_low": 0.8, "ratio_high": 1.1, "coef": 0.5,
    "kind": "k2", "clamp": True, "clip": 0.9, "beta": 0.4, "label_smoothing": 0.2, "rpo_alpha": 1.0, "ld_alpha": 0.3,
    "f_divergence": "forward_kl", "losses": ["ipo"], "cpo_alpha": 0.3, "gamma": 0.2, "center": 0.1, "baseline": 0.7,
    "desirable_weight": 2.0, "undesirable_weight": 2.0, "loss_weights": [0.5], "f_alpha": 0.2, "discopop_tau": 0.5,
    "shift": 0.5, "tau": 0.2, "tau_positive": 2.0, "tau_negative": 2.0, "half_life": 2.0, "weight_low": 0.9,
    "weight_high": 1.05, "safe_ratio": 1.02, "gate_beta": 1.0,
}  # fmt: skip
"""Option -> another value. A new option fails here until it has one."""
CONTEXT: dict[str, dict[str, Any]] = {
    "f_alpha": {"f_divergence": "alpha_divergence"},
    "discopop_tau": {"losses": ["discopop"]},
    "shift": {"losses": ["bco_pair"]},
}
"""What else must be set for an option to mean something."""
EVERY = pytest.mark.parametrize("name", every_loss())


def call(name: str, over: dict[str, Tensor], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    function = every_loss()[name]
    result = function(
        *(over[column] for column in positional_names(partial(function, **NEEDED.get(name, {})))),
        **NEEDED.get(name, {}) | options,
    )
    return (result.loss, result.metrics) if isinstance(result, RowLoss) else result


def differentiated(name: str) -> list[str]:
    return [c for c in inspect.signature(every_loss()[name]).parameters if c in DIFFERENTIATED]


def replayed(
    function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tensor]:
    """`function`, in which every detach gives what it gave in the first call: a constant, as the gradient takes it."""
    kept: list[Tensor] = []
    detach, turn = Tensor.detach, {"at": -1}

    def constant(x: Tensor) -> Tensor:
        if turn["at"] < 0:
            kept.append(detach(x).clone())
            return kept[-1]
        turn["at"] += 1
        return kept[turn["at"] - 1]

    def again(*inputs: Tensor) -> Tensor:
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "detach", constant)
            loss = function(*inputs)
        turn["at"] = 0
        return loss

    return again


@EVERY
@pytest.mark.parametrize("seed", range(2))
def test_gradient_is_that_of_finite_differences(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
):
    over = columns(seed)
    wrt = differentiated(name)
    inputs = [over[column].clone().requires_grad_() for column in wrt]

    def loss(*inputs: Tensor) -> Tensor:
        return call(name, over | dict(zip(wrt, inputs, strict=True)))[0]

    constant = replayed(loss, monkeypatch)
    constant(*inputs)
    assert gradcheck(constant, inputs, atol=1e-7)
    gradients = torch.autograd.grad(loss(*inputs).sum(), inputs)
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, f in every_loss().items() for option in settings(f)],
)
def test_every_option_changes_the_loss(name: str, option: str):
    """On some of three batches, and on rows far from the reference where a bound must bite."""
    context = {
        k: v for k, v in CONTEXT.get(option, {}).items() if k in settings(every_loss()[name])
    }
    moved = []
    for seed in range(3):
        over = columns(seed)
        if option == "clamp":
            over["logp"] = 30 * over["logp"]
        before = call(name, over, **context)[0]
        moved.append(
            not torch.allclose(before, call(name, over, **context | {option: OTHER[option]})[0])
        )
    assert any(moved), f"{name}: {option} does nothing"


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, option) for kind, f in PAIR_LOSSES.items() for option in settings(f)],
)
def test_every_option_of_a_pair_loss_changes_it(kind: str, option: str):
    over = columns(5)
    base = SMOOTHED if "label_smoothing" in settings(PAIR_LOSSES[kind]) else {}
    tensors = [over[column] for column in positional_names(dpo_loss)]
    before = dpo_loss(*tensors, losses=[kind], **base).loss
    assert not torch.allclose(
        before, dpo_loss(*tensors, losses=[kind], **base | {option: OTHER[option]}).loss
    )


@EVERY
def test_metrics_are_one_a_token_or_row_without_gradient(name: str):
    over = columns(1)
    for column in differentiated(name):
        over[column].requires_grad_()
    loss, metrics = call(name, over)
    assert loss.requires_grad and metrics and loss.ndim == 1
    for metric, values in metrics.items():
        assert values.shape == loss.shape, metric
        assert "." in name or not values.requires_grad, metric  # a worker detaches a recipe's


@EVERY
def test_no_rows_give_a_finite_zero(name: str):
    over = {column: values[:0] for column, values in columns(0).items()}
    inputs = [over[column].clone().requires_grad_() for column in differentiated(name)]
    loss, metrics = call(name, over | dict(zip(differentiated(name), inputs, strict=True)))
    loss.sum().backward()
    assert loss.sum() == 0 and all(len(values) == 0 for values in metrics.values())
