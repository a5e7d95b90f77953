"""Evaluation of a sampler that answers as told: estimates, sources, what is left out; and the script."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from datafiles import write_lines

from fsdprl.batch import Batch, Lease
from fsdprl.data.prompt import Prompt
from fsdprl.errors import UserError
from fsdprl.evaluation import Evaluator, estimated, evaluate

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "evaluate"


class Sampler:
    """Gives each answer the score that the test wants."""

    def __init__(self, scores: list[list[float]]) -> None:
        self.scores, self.asked = torch.tensor(scores, dtype=torch.float64), {}

    def generate(self, prompts, *, n, phase, **how):
        self.asked = {"n": n, "phase": phase} | how
        count = len(prompts) * n
        columns = {
            "length": torch.arange(count),
            "truncated": torch.arange(count) % 2 == 0,
            "masked": torch.zeros(count, dtype=torch.bool),
            "right_rewards": self.scores.flatten(),
        }
        return Batch.of(Lease(torch.zeros(count, dtype=torch.int64)), columns)


class Rewards:
    weights = {"right": 2.0, "other": 1.0}  # noqa: RUF012

    def __call__(self, batch):
        batch["masked"] = batch["right_rewards"].isnan()
        return 2.0 * batch["right_rewards"].nan_to_num(0.0)


def prompts(*sources: str) -> list[Prompt]:
    return [
        Prompt(np.zeros(1, np.int32), "p", meta={"data_source": s} if s else {}) for s in sources
    ]


def test_estimates_by_source():
    nan = float("nan")
    sampler = Sampler([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, nan, 0.5]])
    made = estimated(sampler, Rewards(), prompts("a", "a", "b/c", "b/c"), samples=4)
    assert sampler.asked == {"n": 4, "phase": "eval"}
    pass_2 = [1 - 3 / 6, 1.0, 0.0, 1 - 1 / 3]  # the last one has three answers, of which one passes
    assert made.metrics["eval/pass@2"] == pytest.approx(sum(pass_2) / 4)
    assert made.metrics["eval/pass@4"] == pytest.approx(2 / 3)  # three prompts have four answers
    assert made.metrics["eval/mean@4"] == pytest.approx((0.25 + 1 + 0 + 0.5) / 4)
    assert made.metrics["eval/reward"] == pytest.approx((0.25 + 1 + 0 + 0.5) / 2)
    assert made.metrics["eval/a/pass@1"] == pytest.approx(0.625)
    assert made.metrics["eval/b_c/pass@1"] == pytest.approx((0 + 1 / 3) / 2)
    spread = torch.tensor([0.25, 1.0, 0.0, 1 / 3]).double().std()
    assert made.metrics["eval/pass@1/ci95"] == pytest.approx(1.96 * float(spread) / 2)
    assert made.metrics["eval/truncated"] == 0.5 and made.metrics["eval/response_length"] == 7.5
    lines = made.lines()
    assert lines[0].startswith("| source | prompts | reward") and len(lines) == 5
    assert "| b_c    | 2       |" in lines[4] and len({len(line) for line in lines}) == 1


def test_greedy_and_mistakes(monkeypatch):
    sampler = Sampler([[1], [0]])
    logged, shown = [], []
    run = SimpleNamespace(log=logged.append, show=shown.append)
    sampler_answers = estimated(sampler, Rewards(), prompts("", ""), samples=0)
    assert sampler.asked == {"n": 1, "phase": "eval", "temperature": 0.0}
    assert "eval/pass@1" in sampler_answers.metrics and list(sampler_answers.table) == ["all"]
    with pytest.raises(UserError, match=r"pass@8 needs at least 8 answers to a prompt, not 1"):
        estimated(sampler, Rewards(), prompts("", ""), samples=1, ks=[8])
    monkeypatch.setattr(Batch, "peek", lambda self, count: [{"reward": float(self["reward"][0])}])
    evaluate(run, sampler, Rewards(), prompts("", ""), samples=1)
    assert logged[0]["eval/reward"] == 1.0 and shown == [[{"reward": 2.0}]]


def test_evaluations_of_a_loop_and_after_it(monkeypatch):
    """Steps 0, 3 and 6, each of the weights that were pulled for it, and those after the last step."""
    monkeypatch.setattr(Batch, "peek", lambda self, count: [])
    sampler = Sampler([[1], [0]])
    pulled, asked, logged = [], [], []
    sampler.pull = lambda: pulled.append(len(logged))  # pyright: ignore[reportAttributeAccessIssue]
    run = SimpleNamespace(log=logged.append, show=lambda rows: None)
    held_out = SimpleNamespace(first=lambda count: asked.append(count) or prompts("", ""))
    often: dict = {"every": 3, "prompts": 2, "samples": 1}
    evaluate = Evaluator(run, sampler, Rewards(), held_out, **often)  # pyright: ignore[reportArgumentType]
    seen = []
    for step in range(8):
        evaluate(step)
        seen.append(len(logged))
    assert seen == [1, 1, 1, 2, 2, 2, 3, 3] and not pulled
    evaluate.last()
    assert len(logged) == 4 and pulled == [3] and asked == [2] * 4
    never = Evaluator(run, sampler, Rewards(), held_out, **often | {"every": 0})  # pyright: ignore[reportArgumentType]
    never(0)
    never.last()
    assert len(logged) == 4 and pulled == [3]


@pytest.mark.ranks
def test_the_script_on_two_ranks(tmp_path: Path):
    """A model of random weights: a reward that every answer gets, and one by the answer's first character."""
    model = tiny.checkpoint()
    rows = [
        {"question": f"{i}+1=", "answer": i + 1, "source": "odd" if i % 2 else "even"}
        for i in range(6)
    ]
    data = write_lines(tmp_path / "test.jsonl", rows)
    (tmp_path / "mine.py").write_text(
        "def always(sample):\n    return 1.0 if len(sample.ids) else 0.0\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT),
               "--model", str(model), "--data", data, "--rewards", f"{tmp_path}/mine.py:always", "numeric",
               "--tools", "calculator", "--samples", "3", "--max-new-tokens", "4", "--max-prompt-length", "100",
               "--out", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert (
        metrics["eval/pass@3"] == 1.0
        and metrics["eval/odd/mean@3"] == 1.0
        and metrics["prompts"] == 6
    )
    assert 0 < metrics["eval/pass@1/ci95"] < 0.5 and metrics["eval/turns"] == 1.0
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in done.stdout and "| even " in table
    lines = [
        json.loads(line)
        for path in (tmp_path / "out" / "completions").iterdir()
        for line in path.open()
    ]
    assert len(lines) == 18 and {"always_rewards", "numeric_rewards", "reward"} <= set(lines[0])
