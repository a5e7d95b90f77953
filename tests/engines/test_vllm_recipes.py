"""recipes/grpo.py with the real vLLM in its ranks: what runs, repeats, and learns."""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest

from fsdprl.comparing import run_differences
from tests.recipes.processes import GRADE, ROOT, run, series, start, task, words
from tests.run_job import without_times

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
SPARE = {
    "engine.sleep-level": 2,
    "sharding.offload-model": "True",
    "sharding.min-num-params": 0,  # shards, however small the model
}
VLLM = {"engine.kind": "vllm", "engine.kv-cache-memory-bytes": 64 << 20}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return task(tmp_path_factory.mktemp("task"))


def answers(out: Path, step: int = 0) -> list[tuple[str, str, float]]:
    """What was sampled in a step, on all ranks."""
    rows: list[dict[str, Any]] = []
    for path in sorted((out / "completions").glob("rank-*.jsonl")):
        rows += map(json.loads, path.read_text().splitlines())
    return sorted((r["prompt"], r["response"], r["reward"]) for r in rows if r["step"] == step)


def test_two_ranks_train_with_an_engine_each(files: dict[str, str], tmp_path: Path):
    metrics = run(
        "grpo", files, tmp_path, ranks=2, timeout_s=600, steps=2, lr=1e-3, **VLLM, **SPARE
    )
    assert json.loads((tmp_path / "config.json").read_text())["engine"] == "vllm"
    assert len(answers(tmp_path)) == len(answers(tmp_path, 1)) == 32
    assert answers(tmp_path) != answers(tmp_path, 1)
    for name in ("timing/rollout", "timing/resharding_to_infer", "vllm_tps"):
        assert min(series(metrics, name)) > 0
    # the same weights, and the same arithmetic in float32
    assert max(map(abs, series(metrics, "rollout/kl"))) < 1e-5
    assert max(series(metrics, "rollout/max_abs_logp_diff")) < 5e-5
    assert min(series(metrics, "rollout/ess")) > 0.9999
    assert set(series(metrics, "rollout/preemptions")) == {0.0}
    assert all(0 <= rate < 1 for rate in series(metrics, "rollout/cache_hit_rate"))


@pytest.mark.slow
def test_a_run_repeats_and_ranks_do_not_matter(files: dict[str, str], tmp_path: Path):
    """The same seed gives the same numbers to the last bit, and other ranks the same samples."""
    runs = {name: tmp_path / name for name in ("first", "again", "ranks")}
    found = {
        name: run(
            "grpo", files, out, ranks=2 * (name == "ranks"), timeout_s=600, steps=3, lr=1e-3, **VLLM
        )
        for name, out in runs.items()
    }
    assert without_times(runs["first"]) == without_times(runs["again"])
    assert answers(runs["first"], 2) == answers(runs["again"], 2)
    assert answers(runs["first"]) == answers(runs["ranks"])
    rewards = [series(found[name], "reward/mean") for name in ("first", "ranks")]
    assert rewards[0][0] == rewards[1][0]


@pytest.mark.slow
def test_reward_rises(files: dict[str, str], tmp_path: Path):
    flags = {"steps": 20, "prompts-per-step": 16, "group-size": 8, "lr": 3e-3, "eval-every": 0}
    flags |= {"correction.kind": "tis"}
    rewards = series(run("grpo", files, tmp_path, timeout_s=600, **flags, **VLLM), "reward/mean")
    assert rewards[0] < 0.35 and sum(rewards[-3:]) / 3 > 0.7, rewards


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_byte(files: dict[str, str], tmp_path: Path):
    """As with the built-in engine: the weights are pulled anew before the first answer."""
    flags = {"steps": 6, "lr": 1e-2, "run.save-every": 2, "run.deterministic": True} | VLLM
    run("grpo", files, tmp_path / "whole", timeout_s=600, **flags)
    out = tmp_path / "run"
    job = start(words("grpo", files, out, **flags))
    limit = time.monotonic() + 300
    while not (out / "checkpoints" / "step-000002").exists():
        assert time.monotonic() < limit and job.process.poll() is None, job.end(5.0).err
        time.sleep(0.003)
    job.process.kill()
    job.end(60.0)
    run("grpo", files, out, timeout_s=600, **flags)
    (event,) = json.loads((out / "config.json").read_text())["resumed"]
    assert 2 <= event["step"] < 6
    assert run_differences(tmp_path / "whole", out) == []
    assert [answers(out, step) for step in range(6)] == [
        answers(tmp_path / "whole", step) for step in range(6)
    ]


@pytest.mark.slow
def test_conversations(files: dict[str, str], tmp_path: Path):
    """Two turns with a question between them: the trainer's log-probs of the model's own tokens are vLLM's."""
    metrics = run(
        "grpo_self_correct", files, tmp_path, ranks=2, timeout_s=600, steps=2, lr=1e-3,
        max_new_tokens=60, **VLLM, **SPARE,
    )  # fmt: skip
    assert min(series(metrics, "turns/mean")) > 1.1
    assert max(map(abs, series(metrics, "rollout/kl"))) < 1e-5
    assert max(series(metrics, "rollout/max_abs_logp_diff")) < 5e-5
    lines = (tmp_path / "completions" / "rank-00000.jsonl").read_text().splitlines()
    roles = [[turn["role"] for turn in json.loads(line)["turns"]] for line in lines]
    assert ["assistant", "user", "assistant"] in roles


@pytest.mark.slow
def test_a_checkpoint_is_evaluated(files: dict[str, str], tmp_path: Path):
    flags = {
        "model": files["model"], "data": f"{files['prompts']}#8", "samples": 2, "max-new-tokens": 8,
        "max-prompt-length": 40, "rewards": f"{GRADE}digits", "out": tmp_path, **VLLM,
    }  # fmt: skip
    typed = [str(ROOT / "scripts" / "evaluate")]
    for flag, value in flags.items():
        typed += [f"--{flag}", str(value)]
    end = start(typed).end(300.0)
    assert end.code == 0, end.err[-3000:]
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["prompts"] == 8 and 0 < found["eval/mean@2"] < 0.6
    assert (tmp_path / "table.md").read_text().startswith("| source")
