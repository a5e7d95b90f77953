"""Metrics are called what the guides and TRL call them, and recipes/METRICS.md names every one."""

import functools
import re
from typing import Any

import pytest

import fsdprl as rl
from tests.recipes import stage
from tests.recipes.processes import RECIPES
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
TRL = {
    "rewards/accuracies": "acc", "rewards/chosen": "chosen_reward", "rewards/rejected": "reject_reward",
    "rewards/margins": "margin", "logps/chosen": "chosen_logp", "logps/rejected": "reject_logp", "nll_loss": "nll",
}  # fmt: skip
GROUPED = (
    "grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "dapo", "grpo_tools", "grpo_self_correct",
)  # fmt: skip
WITHOUT_KL = ("dapo", "grpo_tools", "grpo_self_correct")
SWIFT = {
    "reward", "reward_std", "frac_reward_zero_std",
    *(f"rewards/{name}/{how}" for name in ("begins", "letters") for how in ("mean", "std")),
    *(f"clip_ratio/{which}" for which in ("region_mean", "low_mean", "low_min", "high_mean", "high_max")),
    *(f"completions/{how}_{what}" for how in OVER for what in ("length", "terminated_length")),
    "completions/clipped_ratio",
}  # fmt: skip
CORRECTED = {
    "kl", "k3_kl", "chi2_token", "chi2_seq", "ess", "is_weight_mean", "clipped_frac", "ppl_ratio",
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff",
    "log_ppl_diff_max", "log_ppl_diff_min",
}  # fmt: skip
ENTROPY = {f"entropy/{how}" for how in OVER}


def everything(name: str, files: dict[str, str]) -> dict[str, Any]:
    """A short run with whatever has metrics of its own turned on."""
    fields = base(name, files) | {"eval_every": 1, "run": rl.RunOptions(log_entropy=True)}
    known = stage.recipe(name).Config.__dataclass_fields__
    more: dict[str, Any] = {
        "kl_coef": 0.1, "kl_in": "loss", "entropy_coef": 0.1, "dual_clip": 3.0, "eval_samples": 2,
        "correction": rl.CorrectionOptions(kind="tis"), "router_aux_coef": 0.1, "max_new_tokens": 70,
        "rollout_splits": 2, "sft_alpha": 0.5,
    }  # fmt: skip
    return fields | {field: value for field, value in more.items() if field in known}


@functools.cache
def names(name: str, stage_files: tuple[tuple[str, str], ...]) -> frozenset[str]:
    with pytest.MonkeyPatch.context() as patch:
        played = play(name, patch, **everything(name, dict(stage_files)))
    assert played.error == ""
    return frozenset(logged for _, logged, _ in played.logged)


def logged(name: str, files: dict[str, str], **fields: Any) -> dict[str, list[float]]:
    """Metric -> its values, of a run of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        played = play(name, patch, **base(name, files) | fields)
    assert played.error == ""
    return {metric: played.values(metric) for _, metric, _ in played.logged}


@pytest.mark.parametrize("name", GROUPED)
def test_recipes_with_rewards_have_the_names_of_ms_swift(name: str, files: dict[str, str]):
    plain = logged(name, files, max_new_tokens=70).keys()
    family = "dapo" if name == "dapo" else "grpo"
    assert plain >= SWIFT | {f"{family}/score/{how}" for how in OVER}
    unasked = {"kl", "actor/entropy", *ENTROPY}
    assert plain & unasked == ({"kl"} if name == "reinforce_pp" else set())  # has one by default
    asked = names(name, tuple(files.items()))
    assert asked >= SWIFT | ENTROPY | (set() if name in WITHOUT_KL else {"kl"})
    corrected = {f"rollout_correction/{what}" for what in CORRECTED}
    correcting = "correction" in stage.recipe(name).Config.__dataclass_fields__
    assert asked & corrected == (corrected if correcting else set()) and not plain & corrected


@pytest.mark.parametrize("name", GROUPED)
def test_one_number_has_the_same_value_under_both_names(name: str, files: dict[str, str]):
    more = {} if name in WITHOUT_KL else {"kl_coef": 0.1}
    more |= {"ratio_high": 1.01} if name == "cispo" else {"clip_high": 0.005}
    played = logged(name, files, run=rl.RunOptions(log_entropy=True), minibatches=4, **more)
    same = {
        "reward": "reward/mean", f"{'dapo' if name == 'dapo' else 'grpo'}/score/max": "reward/max",
        "rewards/begins/mean": "begins_rewards/mean", "entropy/mean": "actor/entropy",
        "clip_ratio/region_mean": "actor/pg_clipfrac", "clip_ratio/low_mean": "actor/pg_clipfrac_low",
        "clip_ratio/high_mean": "actor/pg_clipfrac_high", "completions/mean_length": "response_length/mean",
        "completions/clipped_ratio": "response_length/truncated",
    }  # fmt: skip
    same |= {"kl": "actor/kl_loss"} if "actor/kl_loss" in played else {}
    for theirs, ours in same.items():
        assert played[theirs] == pytest.approx(played[ours]), theirs
    updates = zip(*(played[f"clip_ratio/{it}"] for it in ("low_min", "low_mean")), strict=True)
    assert all(least <= mean for least, mean in updates)
    updates = zip(*(played[f"clip_ratio/{it}"] for it in ("high_max", "high_mean")), strict=True)
    assert all(most >= mean for most, mean in updates)
    assert max(played["clip_ratio/region_mean"]) > 0
    for least, mean, most in zip(
        *(played[f"entropy/{it}"] for it in ("min", "mean", "max")), strict=True
    ):
        assert least < mean < most


def test_an_entropy_that_is_only_looked_at_changes_nothing(files: dict[str, str]):
    with pytest.MonkeyPatch.context() as patch:
        plain = play("grpo", patch, **base("grpo", files)).weights
        looked = play("grpo", patch, **base("grpo", files), run=rl.RunOptions(log_entropy=True))
    assert looked.weights == plain and len(looked.values("entropy/mean")) == 4


def test_ppo(files: dict[str, str]):
    assert names("ppo", tuple(files.items())) >= PPO


def test_dapo(files: dict[str, str]):
    wanted = {
        "train/num_gen_batches",
        "train/filtered_share",
        "train/carried_groups",
        "begins_rewards/mean",
    }
    assert wanted <= names("dapo", tuple(files.items()))


def test_dpo(files: dict[str, str]):
    found = names("dpo", tuple(files.items()))
    assert {f"actor/{name}" for name in PAIRS | {"lr", "grad_norm"}} <= found
    assert {f"val/{name}" for name in PAIRS} <= found
    played = logged("dpo", files)
    for theirs, ours in TRL.items():
        assert played[theirs] == pytest.approx(played[f"actor/{ours}"]), theirs


MEASURED = (
    "timing/",
    "memory/",
    "wire/",
    "rollout/prompt",
    "rollout/cache",
    "rollout/preempt",
    "reward/",
)
"""Documented names that a run, an engine or a failure makes, beside those of recipes."""
SPELT = re.compile(r"\{([^}]*)\}")


def spelt(pattern: str) -> list[str]:
    """`a/{b,c}` is a/b and a/c."""
    part = SPELT.search(pattern)
    if not part:
        return [pattern]
    head, tail = pattern[: part.start()], pattern[part.end() :]
    return [name for it in part[1].split(",") for name in spelt(head + it + tail)]


def documented() -> dict[str, re.Pattern[str]]:
    """Name in METRICS.md -> what it stands for; words in capitals stand for a name."""
    rows = re.findall(r"^\| (`.*?`) \|", (stage.ROOT / "recipes" / "METRICS.md").read_text(), re.M)
    listed = [name for row in rows for it in re.findall(r"`(.*?)`", row) for name in spelt(it)]
    assert len(listed) == len(set(listed))
    patterns = {name: re.sub(r"[A-Z]{4,}", r"[\\w@./]+?", name) for name in listed}
    return {name: re.compile(pattern) for name, pattern in patterns.items()}


def undocumented(found: set[str]) -> set[str]:
    known = documented().values()
    return {name for name in found if not any(pattern.fullmatch(name) for pattern in known)}


def test_the_list_of_metrics_is_that_of_the_recipes(files: dict[str, str]):
    found = {"train/num_gen_batches"}.union(*(names(it, tuple(files.items())) for it in RECIPES))
    assert undocumented(found) == set()
    unused = {
        name
        for name, pattern in documented().items()
        if not name.startswith(MEASURED) and not any(map(pattern.fullmatch, found))
    }
    assert unused == {"turns/shared", "actor/loss_scale", "actor/skipped_updates", "tokens"} | {
        f"{part}_tps" for part in ("e2e", "update", "vllm")
    }
