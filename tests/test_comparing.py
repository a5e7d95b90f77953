"""Two runs are the same, or the first thing that is not is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fsdprl.comparing import is_measured, metric_differences, run_differences

ROOT = Path(__file__).resolve().parents[1]


def a_run(folder: Path, rows: list[dict[str, Any]], weights: bytes = b"1234") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    step = folder / "checkpoints" / "step-000002"
    (step / "trainer").mkdir(parents=True)
    (step / "model.safetensors").write_bytes(weights)
    (step / "trainer" / "optimizer.safetensors").write_bytes(b"5678")
    (folder / "checkpoints" / "latest").symlink_to("step-000002")
    return folder


def test_what_measures_the_machine():
    measured = [
        "timing/all",
        "memory/train_peak_gb",
        "wire/sent",
        "wire/peek",
        "vllm_tps",
        "e2e_tps",
    ]
    assert all(map(is_measured, measured))
    assert not any(map(is_measured, ["actor/loss", "tokens", "rollout/cache_hit_rate", "step"]))


def test_equal_runs_differ_in_nothing(tmp_path):
    a = a_run(tmp_path / "a", [{"step": 0, "actor/loss": 0.5, "timing/all": 1.0, "wire/sent": 10}])
    b = a_run(tmp_path / "b", [{"step": 0, "actor/loss": 0.5, "timing/all": 2.0}])
    assert run_differences(a, b) == []


def test_every_difference_is_named(tmp_path):
    a = a_run(tmp_path / "a", [{"step": 0, "x": 0.5}, {"step": 1, "x": 1.0, "y": 2.0}])
    b = a_run(tmp_path / "b", [{"step": 0, "x": 0.5}, {"step": 1, "x": 1.25}, {"step": 2}], b"1235")
    (b / "checkpoints/latest/trainer/optimizer.safetensors").unlink()
    assert run_differences(a, b) == [
        "steps: 2 lines, 0 to 1 and 3 lines, 0 to 2",
        "step 1: x: 1.0 and 1.25",
        "step 1: y: 2.0 and None",
        "checkpoint: model.safetensors: other bytes",
        f"checkpoint: trainer/optimizer.safetensors: not in {b}/checkpoints/latest",
    ]


def test_a_tolerance_is_relative_and_of_numbers():
    a, b = [{"step": 0, "x": 1000.0, "y": None}], [{"step": 0, "x": 1000.9, "y": 1.0}]
    assert metric_differences(a, b, 1e-3) == ["step 0: y: None and 1.0"]
    assert metric_differences(a, b, 1e-4)[0] == "step 0: x: 1000.0 and 1000.9"
    tiny, other = [{"step": 0, "kl": 1e-9}], [{"step": 0, "kl": -1e-7}]
    assert metric_differences(tiny, other, 1e-3) == [] != metric_differences(tiny, other, 1e-5)


def test_the_script_says_it_with_its_exit_code(tmp_path):
    a, b = (a_run(tmp_path / name, [{"step": 0, "x": 1.0}]) for name in "ab")
    script = [sys.executable, str(ROOT / "scripts" / "compare_runs")]
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
    same = subprocess.run([*script, a, b], capture_output=True, text=True, timeout=60, env=env)
    said = "identical: 1 lines of metrics, the bytes of step-000002\n"
    assert (same.returncode, same.stdout) == (0, said), same.stderr
    (b / "checkpoints/latest/model.safetensors").write_bytes(b"")
    other = subprocess.run([*script, a, b], capture_output=True, text=True, timeout=60, env=env)
    assert (other.returncode, other.stdout) == (1, "checkpoint: model.safetensors: other bytes\n")
