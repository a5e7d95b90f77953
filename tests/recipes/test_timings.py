"""Seconds of a real step of every recipe that uses a reference: names, definitions and the identity of timing/all."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.processes import run, task
from tests.recipes.test_metric_names import undocumented

pytestmark = [pytest.mark.learn, pytest.mark.slow, pytest.mark.timeout(300)]

REFERENCED = ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo", "distill")
PAIRED = ("dpo", "kto")
PARTS = (
    "rollout", "old_log_p", "update", "reference_model", "resharding_to_train", "resharding_to_infer", "critic_model",
    "update_critic",
)  # fmt: skip
SAMPLED = (
    "rollout", "old_log_p", "adv", "resharding_to_infer", "resharding_to_train",
    "non_overlap_reference_model", "non_overlap_adv",
)  # fmt: skip
ALWAYS = ("all", "update", "reference_model", "ref_onload", "ref_offload")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return task(tmp_path_factory.mktemp("task"))


def seconds(step: dict[str, Any]) -> dict[str, float]:
    return {
        n.removeprefix("timing/"): value for n, value in step.items() if n.startswith("timing/")
    }


@pytest.mark.parametrize("name", [*REFERENCED, *PAIRED])
def test_a_step_with_a_reference(name: str, files: dict[str, str], tmp_path: Path):
    more: dict[str, Any] = {"kl-coef": 0.1} if name in REFERENCED and name != "distill" else {}
    more |= {"sharding.offload-model": "True", "eval-every": 0}
    step = run(name, files, tmp_path / "run", **more)[1]
    assert undocumented(step.keys() - {"step"}) == set()
    took = seconds(step)
    assert set(ALWAYS) <= took.keys() and all(value >= 0 for value in took.values())
    assert 0 <= took["controller_overhead"] < 0.5
    if name in REFERENCED:
        check_sampled(name, step, took)


def check_sampled(name: str, step: dict[str, Any], took: dict[str, float]) -> None:
    """32 answers: what they took, and tokens a second."""
    wanted = {*SAMPLED, *(() if name == "distill" else ("rule_reward", "non_overlap_rule_reward"))}
    wanted |= {"kl"} if name in ("rloo", "reinforce_pp", "ppo") else set()
    wanted |= {"critic_model", "update_critic"} if name == "ppo" else set()
    assert wanted <= took.keys(), wanted - took.keys()
    beside = [took.get(f"non_overlap_{part}", 0.0) for part in ("rule_reward", "reference_model")]
    assert took["all"] >= sum(took.get(part, 0.0) for part in PARTS) + max(beside)
    tokens = 32 * (step["response_length/mean"] + step["prompt_length/mean"])
    assert step["tokens"] == pytest.approx(tokens)
    for rate, part in {"e2e_tps": "all", "update_tps": "update", "vllm_tps": "rollout"}.items():
        assert step[rate] == pytest.approx(tokens / took[part])
