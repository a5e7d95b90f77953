"""Every loss there is, found and not listed, so that a test over all of them misses none."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdprl import coupled, losses, preference, surrogates
from fsdprl.losses import RowLoss, TokenLoss
from tests.recipes.stage import ROOT, recipe

DIFFERENTIATED = ("logp", "entropy", "balance", "logp_top", "value", "score")
"""Columns of the forward pass that have a gradient; a loss's first column is one of them."""


def functions(module: Any) -> dict[str, Callable[..., Any]]:
    """Public functions of a module whose first parameter is such a column."""
    found = {}
    for name, function in vars(module).items():
        own = inspect.isfunction(function) and function.__module__ == module.__name__
        if own and not name.startswith("_"):
            first = next(iter(inspect.signature(function).parameters), "")
            if first in DIFFERENTIATED:
                found[name] = function
    return found


def library_losses() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for module in (losses, surrogates, preference, coupled):
        for name, function in functions(module).items():
            if inspect.signature(function).return_annotation in (RowLoss, TokenLoss):
                found[name] = function
    return found


def recipe_losses() -> dict[str, Callable[..., Any]]:
    """Those that a recipe defines itself, as `recipe.name`."""
    names = [path.stem for path in sorted(Path(ROOT, "recipes").glob("*.py"))]
    return {f"{stem}.{name}": f for stem in names for name, f in functions(recipe(stem)).items()}


def every_loss() -> dict[str, Callable[..., Any]]:
    return library_losses() | recipe_losses()


def settings(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def columns(seed: int) -> dict[str, Tensor]:
    """One microbatch in float64 with every column a loss may name: 4 pairs, rows of 1 to 5 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (8,), generator=draw)
    segment = torch.arange(8).repeat_interleave(lengths)

    def noise(scale: float = 1.0, count: int = len(segment)) -> Tensor:
        return scale * torch.randn(count, generator=draw, dtype=torch.float64)

    old = -0.1 - noise().abs()
    rows = torch.arange(8)
    sample = {
        "advantage": noise(count=8),
        "aot_target": noise(count=8),
        "margin": noise(count=8).abs().view(4, 2).mean(1).repeat_interleave(2),
        "unit": rows // 2 + 30,
        "chosen": rows % 2 == 1,
        "desirable": rows % 3 == 0,
        "correct": rows % 3 != 0,
    }

    def words(count: int = 4) -> Tensor:
        """Log-probs of four words of each token, which leave something to others."""
        chances = torch.rand(len(segment), count, generator=draw, dtype=torch.float64) + 0.1
        return (chances / (chances.sum(1, keepdim=True) + 0.5)).log()

    return {
        "segment": segment,
        "logp": (old + noise(0.4)).clamp(max=-1e-3),
        "logp_old": old,
        "logp_ref": old + noise(0.5),
        "logp_teacher": old + noise(0.5),
        "entropy": noise().abs(),
        "collision": -noise(0.3).abs(),
        "balance": 2 + noise().abs(),
        "value": noise(),
        "value_old": noise(),
        "returns": noise(),
        "is_weight": noise().abs(),
        "score": noise(count=8),
        **{name: values[segment] for name, values in sample.items()},
        "logp_top": words(),
        "logp_teacher_top": words(),
    }
