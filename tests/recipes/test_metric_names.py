"""Metrics are called what the PPO guide calls them, and DAPO's and the preference recipes' what theirs do."""

import pytest

from tests.recipes.stage import play
from tests.recipes.test_flags import base, files

__all__ = ["files"]  # a fixture

OVER = ("mean", "max", "min")
PPO = {
    "actor/entropy", "actor/kl_loss", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm",
    "actor/lr", "critic/lr", "critic/grad_norm", "critic/vf_loss", "critic/vf_clipfrac", "actor/kl", "actor/kl_coef",
    "begins_rewards/mean", "letters_rewards/mean",
    *(f"critic/{name}/{how}" for name in ("score", "rewards", "advantages", "returns", "values") for how in OVER),
    *(f"{name}_length/{how}" for name in ("response", "prompt") for how in OVER),
}  # fmt: skip
PAIRS = {
    "loss",
    "acc",
    "chosen_reward",
    "reject_reward",
    "margin",
    "chosen_logp",
    "reject_logp",
    "nll",
}


def test_ppo(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    more = {"kl_coef": 0.1, "kl_in": "loss", "entropy_coef": 0.1}
    played = play("ppo", monkeypatch, **base("ppo", files) | more)
    assert {name for _, name, _ in played.logged} >= PPO


def test_dapo(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    played = play("dapo", monkeypatch, **base("dapo", files))
    wanted = {
        "train/num_gen_batches",
        "train/filtered_share",
        "train/carried_groups",
        "begins_rewards/mean",
    }
    assert wanted <= {name for _, name, _ in played.logged}


def test_dpo(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    played = play("dpo", monkeypatch, **base("dpo", files) | {"eval_every": 1})
    names = {name for _, name, _ in played.logged}
    assert {f"actor/{name}" for name in PAIRS | {"lr", "grad_norm"}} <= names
    assert {f"val/{name}" for name in PAIRS} <= names
