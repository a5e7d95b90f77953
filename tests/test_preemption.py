"""A signal loses nothing: the step it meets is saved as it began, or finished first and then saved."""

import importlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from run_job import Job, checkpoints, isolated, without_times

import fsdprl
import fsdprl.run
from fsdprl.errors import Interrupted
from fsdprl.plan import Plan
from fsdprl.records import read_json

Strike = Callable[[Job, int, str], None]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolated(monkeypatch):
        yield


def train(out: Path, strike: Strike = lambda *_: None, *, steady: bool = True) -> Job:
    """The loop of a recipe whose small state moves before its model does; saves every 2 steps."""
    job = Job(out).open()

    def between(name: str, *, rank: int, step: int) -> None:
        strike(job, step, "between")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdprl.run, "reached", between)
        return _train(job, strike, steady=steady)


def _train(job: Job, strike: Strike, *, steady: bool) -> Job:
    job.model.steady = steady  # pyright: ignore[reportAttributeAccessIssue]
    job.run.track(policy=job.model, count=job.count)
    plan = Plan(rows=100, prompts_per_step=4, group_size=2, minibatches=2, steps=6)
    kind, message = "finished", ""
    try:
        for step in job.run.steps(plan):
            job.count.n += 10
            strike(job, step, "rollout")
            job.model.value += 1.0
            job.controller.changed = True  # as model.optim_step does
            strike(job, step, "update")
            job.run.log({"critic/score/mean": job.model.value + job.count.n})
    except Interrupted as signalled:
        kind, message = "interrupted", str(signalled)
    job.end(kind, message)
    return job


def interrupt(at: int, where: str) -> Strike:
    """What launch does with a signal: raise it, or leave it to the run if the step has changed things."""

    def strike(job: Job, step: int, now: str) -> None:
        if (step, now) == (at, where):
            if not job.controller.changed:
                raise Interrupted(signal.SIGTERM)
            job.controller.leaving = Interrupted(signal.SIGTERM)

    return strike


@pytest.mark.parametrize(
    ("step", "where", "steady", "saved"),
    [
        (0, "rollout", True, None),  # nothing to lose yet
        (3, "rollout", True, 3),  # the weights the step began with
        (4, "rollout", True, 4),  # saved by the step before
        (2, "update", True, 3),  # finished first
        (2, "rollout", False, 3),  # a model that sampling changes: finished first
        (5, "update", True, 6),  # the last step
        (3, "between", True, 3),  # not begun: no small state may be of the step before
        (4, "between", True, 4),
        (3, "between", False, 3),
    ],
)
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, step: int, where: str, steady: bool, saved: int | None
):
    train(tmp_path / "whole")
    out = tmp_path / "run"
    train(out, interrupt(step, where), steady=steady)
    status = read_json(out / "status.json")
    assert (status["state"], status["resumable"]) == ("interrupted", True)
    assert status.get("saved") == saved
    assert saved is None or f"step-{saved:06d}" in checkpoints(out)
    again = train(out, steady=steady)
    assert again.run.restored == (saved or 0)
    assert (again.model.value, again.count.n) == (6.0, 60)
    assert without_times(out) == without_times(tmp_path / "whole")
    for name in ("model.safetensors", "trainer/adam.safetensors", "run.json", "manifest.json"):
        ours, theirs = (path / "checkpoints/latest" / name for path in (out, tmp_path / "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_script_without_a_run_is_left_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a signal leaves for the run to raise, nobody would raise where there is none."""
    module: Any = importlib.import_module("fsdprl.launch")
    monkeypatch.setattr(module, "threading", MagicMock())
    fsdprl.launch = module.launch  # importing has put the module there
    job = Job(tmp_path / "run")
    job.controller.changed = True
    lead = module.Lead(None, job.controller)
    lead._once.locked.return_value = False
    with pytest.raises(Interrupted):
        lead._on_signal(signal.SIGINT, None)
    job.open()
    lead._signal = None
    lead._on_signal(signal.SIGINT, None)
    assert isinstance(job.controller.leaving, Interrupted)
    module.threading.Timer.assert_called_once_with(
        module.STEP_S, lead._end, (job.controller.leaving,)
    )
    job.abandon()


def test_a_dead_rank_is_no_preemption(tmp_path: Path):
    """Its cause is another: no save that would wait for it."""
    job = Job(tmp_path / "run").open()
    job.model.steady = True  # pyright: ignore[reportAttributeAccessIssue]
    job.run.track(policy=job.model)
    plan = Plan(rows=100, prompts_per_step=4, group_size=2, minibatches=2, steps=6)
    for step in job.run.steps(plan):
        if step == 3:
            break
    job.end("died", "rank 1 died in rollout")
    assert checkpoints(tmp_path / "run") == ["latest", "step-000002"]
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["state"], status["saved"]) == ("failed", 2)


def test_a_save_that_fails_on_the_way_out_leaves_the_last_checkpoint(tmp_path: Path):
    def strike(job: Job, step: int, now: str) -> None:
        if (step, now) == (3, "rollout"):
            job.model.full = 1
            raise Interrupted(signal.SIGINT)

    train(tmp_path / "run", strike)
    assert read_json(tmp_path / "run" / "status.json")["saved"] == 2
    assert train(tmp_path / "run").run.restored == 2


def test_updates_left_out_before_a_signal_still_count(tmp_path: Path):
    """--run.skip-nonfinite bounds a run, however often it is interrupted; a step that is done again is not counted
    twice."""

    def strike(job: Job, step: int, now: str) -> None:
        if (step, now) in ((1, "update"), (3, "rollout")):
            job.controller.skipped += 1
        interrupt(3, "rollout")(job, step, now)

    train(tmp_path / "run", strike)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003" / "run.json"
    assert read_json(checkpoint)["skipped"] == 1
    seen: list[int] = []
    train(tmp_path / "run", lambda job, *_: seen.append(job.controller.skipped))
    assert set(seen) == {1}
