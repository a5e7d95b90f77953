"""Recipes learn, as shipped, on two ranks: what the quickstart shows, in fewer steps.

The margins leave room for every seed: five of five reached 0.9 in 60 steps, and on 256 held-out
problems the standard error is 0.03.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdprl.tasks.addition import write_dataset

ROOT = Path(__file__).resolve().parents[1]
SFT_STEPS, GRPO_STEPS = 500, 25

# Slow: a third of what all other tests take together. `just learn` runs it.
pytestmark = [pytest.mark.learn, pytest.mark.slow, pytest.mark.timeout(1500)]


def train(recipe: str, out: Path, **flags: object) -> list[dict[str, float]]:
    """Run a recipe on two ranks into `out`; returns its metrics, one dict a step."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "recipes" / recipe), f"--run.out={out}", "--dtype=float32", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    return write_dataset(tmp_path_factory.mktemp("addition"))


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory, data) -> Path:
    """A checkpoint that knows the format and forgets to carry."""
    folder = tmp_path_factory.mktemp("warm")
    script = [sys.executable, str(ROOT / "scripts" / "make_tiny_model.py"), str(folder / "tiny")]
    subprocess.run(script, check=True, timeout=120)
    metrics = train(
        "sft.py",
        folder / "sft",
        model=folder / "tiny",
        data=data["sft"],
        steps=SFT_STEPS,
        batch_size=64,
        lr=3e-3,
        max_length=64,
        eval_every=SFT_STEPS,
    )
    losses = [step["val/loss"] for step in metrics if "val/loss" in step]
    # Dropped carries are random: of a carry that is dropped 4 times in 5, nobody knows more than
    # its odds, about 0.05 nats a token here. 60 characters are worth 4.1 nats at the start.
    assert losses[0] > 3.5
    assert losses[-1] < 0.12
    return folder / "sft" / "checkpoints" / f"step-{SFT_STEPS:06d}"


def test_grpo_discovers_the_carry(tmp_path, data, warm_start):
    metrics = train(
        "grpo.py",
        tmp_path / "grpo",
        model=warm_start,
        data=data["train"],
        eval_data=data["heldout"],
        rewards="fsdprl.tasks.addition:reward",
        steps=GRPO_STEPS,
        lr=3e-4,
        warmup_steps=5,
        max_prompt_length=32,
        max_new_tokens=10,
        eval_every=GRPO_STEPS,
    )
    rewards = [step["eval/reward"] for step in metrics if "eval/reward" in step]
    assert 0.2 < rewards[0] < 0.55  # 3 problems of 10 have no carry
    assert rewards[-1] > 0.7
    assert rewards[-1] > rewards[0] + 0.25
