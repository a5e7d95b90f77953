"""Told to go within a step, killed after a checkpoint, started again: the run nobody disturbed, to the byte."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdprl.comparing import metric_differences, run_differences
from fsdprl.records import read_json, read_lines
from tests import tiny
from tests.ranks.jobs import Job
from tests.recipes.processes import RECIPES, start, task, words
from tests.warm import WarmJob

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
STEPS, EVERY = 12, 3
ALWAYS = {
    "steps": STEPS, "seed": 3, "eval-every": 4, "run.save-every": EVERY, "run.keep": 2,
    "run.deterministic": True, "sharding.min-num-params": 0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "grpo": {"lr": 1e-2, "kl-coef": 0.05, "follow-every": 5, "follow-share": 0.5},
    "ppo": {"lr": 1e-3, "critic-lr": 1e-2, "kl-coef": 0.1, "kl-target": 0.01, "kl-horizon": 50},
    "dapo": {"lr": 1e-2, "prompts-per-round": 7, "when-short": "error", "max-rounds": 0},
    "dpo": {"lr": 1e-2, "follow-every": 5, "follow-share": 0.5},
    "sft": {"data-workers": 1},
}
"""What else has a state to lose: a reference that moves, a KL controller, groups carried over, data processes."""
USUAL = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What torchrun passes on to its ranks: it knows nothing of SIGUSR1 by itself."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return task(tmp_path_factory.mktemp("task"))


def begin(typed: list[str], ranks: int) -> Job | WarmJob:
    """One rank as a process forked with everything imported, several under torchrun."""
    return start([USUAL, *typed], ranks) if ranks else WarmJob(typed)


def finish(typed: list[str], ranks: int) -> None:
    """Start, and see it end well."""
    end = begin(typed, ranks).end(280.0)
    assert end.code == 0, end.err[-3000:]


def until(job: Job | WarmJob, happened: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < limit and job.process.poll() is None, job.end(5.0).err
        time.sleep(0.003)


def told_to_go(typed: list[str], ranks: int, out: Path, number: signal.Signals) -> int:
    """Start, and send a signal after two steps. Returns the steps in the checkpoint that was left."""
    job = begin(typed, ranks)
    until(job, lambda: len(read_lines(out / "metrics.jsonl")) >= 2)
    job.process.send_signal(number)
    end = job.end(25.0)  # what a scheduler gives a job, less a margin
    assert end.code != 0 and f"fsdprl: interrupted by {number.name}" in end.err, end.err
    status = read_json(out / "status.json")
    assert (status["state"], status["resumable"]) == ("interrupted", True)
    assert 2 <= status["saved"] < STEPS, status
    return status["saved"]


def killed(typed: list[str], ranks: int, out: Path) -> None:
    """Start again, and kill after the next checkpoint."""
    before = newest(out)
    job = begin(typed, ranks)
    until(job, lambda: newest(out) > before)
    job.process.kill()
    assert job.end(25.0).code == -signal.SIGKILL
    assert newest(out) < STEPS


def newest(out: Path) -> int:
    names = [path.name for path in (out / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def disturbed(
    name: str,
    files: dict[str, str],
    folder: Path,
    *,
    ranks: int = 0,
    number: signal.Signals = signal.SIGTERM,
    **flags: Any,
) -> Path:
    """A run that was told to go, killed, and finished, each time by the same command."""
    flags = ALWAYS | {"lr": 1e-2} | OWN.get(name, {}) | flags
    whole = begin(words(name, files, folder / "whole", **flags), ranks)
    out = folder / "run"
    typed = words(name, files, out, **flags)
    saved = told_to_go(typed, ranks, out, number)
    killed(typed, ranks, out)
    finish(typed, ranks)
    assert whole.end(280.0).code == 0
    resumed = [event["step"] for event in read_json(out / "config.json")["resumed"]]
    assert resumed[0] == saved and len(resumed) == 2 and resumed[1] > saved
    check_same(folder / "whole", out)
    return out


def check_same(whole: Path, out: Path) -> None:
    """Metrics, checkpoint, and on as many ranks also what was sampled, to the byte."""
    assert run_differences(whole, out) == []
    for file in (whole / "completions").glob("rank-*.jsonl"):
        assert (out / "completions" / file.name).read_bytes() == file.read_bytes()


def case(name: str, ranks: int, number: signal.Signals, *, slow: bool = True) -> Any:
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(name, ranks, number, id=f"{name}-{ranks or 1}-{number.name}", marks=marks)


@pytest.mark.parametrize(
    ("name", "ranks", "number"),
    [
        case("grpo", 2, signal.SIGUSR1),
        case("grpo", 0, signal.SIGINT),
        case("grpo", 2, signal.SIGTERM),
        case("ppo", 0, signal.SIGTERM, slow=False),
        case("dapo", 2, signal.SIGTERM),
        *(case(name, 0, signal.SIGTERM) for name in RECIPES if name != "ppo"),
    ],
)
def test_a_disturbed_run_is_the_undisturbed_one(files, tmp_path, name, ranks, number):
    out = disturbed(name, files, tmp_path, ranks=ranks, number=number)
    last = out / "checkpoints" / "latest"
    state = read_json(last / "run.json")
    if name == "ppo":
        assert (last / "critic" / "trainer" / "optimizer.safetensors").is_file()
        assert state["states"]["kl"]["coef"] != 0.1
    if name == "dapo":
        assert read_json(last / "pool" / "rows.json")["cursor"] > STEPS * 8
        assert list((last / "pool").glob("rank-*.rows")), os.listdir(last / "pool")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_unfinished_answers_are_saved_and_go_on(files, tmp_path, ranks):
    """Groups wait in every checkpoint that the run goes on from."""
    files = files | {"model": str(tiny.checkpoint("qwen3"))}  # answers of any length
    flags = {"rollout-splits": 3, "prompts-per-round": 12, "max-new-tokens": 36}
    out = disturbed("dapo", files, tmp_path, ranks=ranks, **flags)
    steps = read_lines(out / "metrics.jsonl")
    waiting = [row["partial/waiting"] for row in steps if "partial/waiting" in row]
    resumed = [event["step"] for event in read_json(out / "config.json")["resumed"]]
    assert len(waiting) == STEPS and all(waiting[step - 1] > 0 for step in resumed)
    last = out / "checkpoints" / "latest" / "pool"
    table = read_json(last / "rows.json")
    assert len(table["waiting"]["ranks"]) == 4 * waiting[-1] > 0
    assert list((last / "waiting").glob("rank-*.rows"))


@pytest.mark.slow
def test_a_bfloat16_checkpoint_goes_on_from_its_float32_masters(files, tmp_path):
    narrow = tmp_path / "narrow"
    shutil.copytree(files["model"], narrow)
    tensors = load_file(narrow / "model.safetensors")
    narrowed = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(narrowed, narrow / "model.safetensors", {"format": "pt"})
    out = disturbed("sft", files | {"model": str(narrow)}, tmp_path, lr=1e-4)
    last = out / "checkpoints" / "latest"
    assert {t.dtype for t in load_file(last / "model.safetensors").values()} == {torch.bfloat16}
    masters = load_file(last / "trainer" / "masters.safetensors")
    assert {t.dtype for t in masters.values()} == {torch.float32}
    assert any((t != t.bfloat16()).any() for t in masters.values())


# ---- torchrun's own restarts, a second signal, other numbers of ranks


def rank_of(job: Job, rank: int) -> int:
    """The process of a rank."""
    for pid in job.processes():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == job.process.pid and f"RANK={rank}".encode() in environment:
            return pid
    raise AssertionError(job.processes())


@pytest.mark.slow
def test_torchrun_restarts_a_run_in_which_a_rank_was_killed(files, tmp_path):
    flags = ALWAYS | {"lr": 1e-2, "run.resume": "never"}
    finish(words("grpo", files, tmp_path / "whole", **flags), 2)
    out = tmp_path / "run"
    job = start(["--max-restarts=1", *words("grpo", files, out, **flags)], 2)
    until(job, lambda: newest(out) > 0)
    os.kill(rank_of(job, 1), signal.SIGKILL)
    end = job.end(120.0)
    assert end.code == 0, end.err
    assert "fsdprl: rank 1 on " in end.err and " died " in end.err
    assert [event["step"] for event in read_json(out / "config.json")["resumed"]] >= [EVERY]
    assert read_json(out / "status.json")["state"] == "finished"
    check_same(tmp_path / "whole", out)


@pytest.mark.slow
def test_a_second_signal_exits_at_once(files, tmp_path):
    flags = {"rewards": "tests.recipes.grades:stuck", "reward.timeout-s": 300, "steps": 4}
    job = WarmJob(words("grpo", files, tmp_path, **flags, **{"eval-every": 0}))
    until(job, lambda: len(read_lines(tmp_path / "metrics.jsonl")) >= 2)
    time.sleep(1.0)
    job.process.send_signal(signal.SIGTERM)  # waits for the ranks, which are stuck in grading
    time.sleep(2.0)  # sooner would count as the same signal, passed on by torchrun
    assert job.process.poll() is None
    began = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.end(5.0).code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 2.0
    job.end(20.0)


TOLERANCE = 2e-3
"""Of metrics, relatively, between a run on one number of ranks and the same run that went on with another: sums in
float32 add up in another order, and AdamW's first steps make of the last bit of a small gradient a visible one."""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_another_number_of_ranks_takes_the_same_data_and_nearly_the_same_numbers(
    files, tmp_path, before, after
):
    flags = ALWAYS | {"lr": 1e-4, "eval-every": 0, "run.deterministic": False}
    finish(words("grpo", files, tmp_path / "whole", **flags), before)
    out = tmp_path / "run"
    typed = words("grpo", files, out, **flags)
    killed(typed, before, out)
    finish(typed, after)
    (event,) = read_json(out / "config.json")["resumed"]
    assert event["world_size"] == (after or 1) and event["step"] >= EVERY
    assert asked(out) == asked(tmp_path / "whole")
    rows = [read_lines(folder / "metrics.jsonl") for folder in (tmp_path / "whole", out)]
    assert metric_differences(*rows, TOLERANCE) == []


def asked(out: Path) -> list[tuple[int, str]]:
    """The prompts of each step, on whichever rank they were answered."""
    rows = [row for file in (out / "completions").glob("rank-*") for row in read_lines(file)]
    return sorted((row["step"], row["prompt"]) for row in rows)
