"""Checkpoints written behind the training's back: what is on the disk is what was copied, and nobody waited for it."""

import errno
import hashlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import solo
import tiny
import torch
from run_job import CONFIG, Job, Killed, checkpoints, isolated, steps_of
from safetensors.torch import load_file

from fsdprl import learn, run_checkpoints, run_saves, writing
from fsdprl.errors import Interrupted, UserError
from fsdprl.manifest import MANIFEST, seal, verify
from fsdprl.optim import Optimizer
from fsdprl.plan import Plan
from fsdprl.precomputed import PrecomputedReference
from fsdprl.records import read_json, read_lines
from fsdprl.worker import Worker

real_write = writing.write_snapshot


@pytest.fixture
def rank() -> Worker:
    """One rank with a bfloat16 checkpoint in training: float32 masters, and moments that are not zero."""
    path = str(tiny.checkpoint("qwen3", dtype=torch.bfloat16))
    network = solo.load(path)
    optimizer = Optimizer(network)
    worker = Worker()
    worker.models["policy"] = learn.Model(network, path, None, optimizer)
    train(worker)
    return worker


def train(worker: Worker) -> None:
    """One optimizer step in which every weight moves."""
    m = worker.models["policy"]
    for parameter in m.network.parameters():
        parameter.grad = torch.ones_like(parameter)
    m.optimizer.step(lr=1e-3)


def state(worker: Worker) -> dict[str, torch.Tensor]:
    m = worker.models["policy"]
    named = {name: p.full_tensor().clone() for name, p in m.network.hf.named_parameters()}  # type: ignore[attr-defined]
    moments = m.optimizer.state_tensors().items()
    return named | {
        name: (t.full_tensor() if name != "steps" else t).clone() for name, t in moments
    }  # type: ignore[attr-defined]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk takes nothing before it is set."""
    opened = threading.Event()

    def slow(*args: Any) -> Any:
        assert opened.wait(20)
        return real_write(*args)

    monkeypatch.setattr(writing, "write_snapshot", slow)
    yield opened
    opened.set()


def test_training_goes_on_and_the_checkpoint_is_of_the_moment(rank, gate, tmp_path):
    before = state(rank)
    writing.save(rank, model="policy", out=str(tmp_path), background=True)
    for _ in range(3):
        assert writing.poll(rank, wait=False) == {"done": False}
        train(rank)
    assert not list(tmp_path.iterdir())
    gate.set()
    told = writing.poll(rank, wait=True)
    assert told["done"] and told["error"] is None
    assert writing.poll(rank, wait=False) == told  # asked again: the same
    assert any((before[name] != value).any() for name, value in state(rank).items())
    seal(tmp_path, 1, {str(Path(p).relative_to(tmp_path)): f for p, f in told["files"].items()})
    assert verify(tmp_path) == ""
    assert "trainer/masters.safetensors" in read_json(tmp_path / MANIFEST)["files"]
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    learn.load(rank, model="policy", path=str(tmp_path))
    after = state(rank)
    assert all(torch.equal(before[name], after[name]) for name in before)  # float32, not bfloat16


def test_in_the_background_and_at_once_give_the_same_bytes(rank, tmp_path):
    for name, background in (("a", False), ("b", True)):
        writing.save(rank, model="policy", out=str(tmp_path / name), background=background)
        told = writing.poll(rank, wait=True)
        files = {
            str(Path(path).relative_to(tmp_path / name)): f for path, f in told["files"].items()
        }
        seal(tmp_path / name, 1, files)
    assert read_json(tmp_path / "a" / MANIFEST) == read_json(tmp_path / "b" / MANIFEST)
    assert verify(tmp_path / "a") == verify(tmp_path / "b") == ""


def test_what_the_disk_refuses_is_told_and_what_is_a_bug_is_raised(rank, tmp_path, monkeypatch):
    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(writing, "write_snapshot", refuse)
    writing.save(rank, model="policy", out=str(tmp_path), background=True)
    told = writing.poll(rank, wait=True)
    assert told["error"] == [errno.ENOSPC, "No space left on device", "model.safetensors"]
    monkeypatch.setattr(writing, "write_snapshot", lambda *_: 1 / 0)
    writing.save(rank, model="policy", out=str(tmp_path), background=True)
    with pytest.raises(ZeroDivisionError):
        writing.poll(rank, wait=True)


# ---- a run whose ranks write slowly


class Slow:
    """A model whose ranks are still writing until `finish`; `refuse`: the disk took nothing."""

    def __init__(self) -> None:
        self.value, self.copied, self.folder = 0.0, 0.0, Path()
        self.writing = False
        self.refuse = 0
        self.begun: list[bool] = []

    def begin_save(self, folder: Path, *, background: bool) -> None:
        assert not self.writing, "two at a time"
        self.folder, self.copied, self.writing = Path(folder).resolve(), self.value, True
        self.begun.append(background)

    def save(self, folder: Path) -> None:
        raise AssertionError("begin_save is there")

    def load(self, folder: Path) -> None:
        self.value = float((folder / "model.safetensors").read_text())

    def poll(self, *, wait: bool, finished: bool) -> dict[str, Any]:
        if self.writing and not (wait or finished):
            return {"done": False}
        if self.writing:
            self.writing = False
            if self.refuse:
                self.refuse -= 1
                return {"done": True, "files": {}, "error": [errno.ENOSPC, "No space left", "m"]}
            (self.folder / "model.safetensors").write_text(repr(self.copied))
        return {"done": True, "files": {}, "error": None}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolated(monkeypatch):
        monkeypatch.setattr(run_saves, "POLL_S", 0.0)
        yield


Finished = Callable[[int, Slow], bool]


opened: list[Job] = []


def train_run(
    out: Path,
    finished: Finished,
    model: Slow | None = None,
    during: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Any:
    """Six steps that save after every second one; `finished` says during which steps ranks are done writing."""
    job, model = Job(out, **options).open(), model or Slow()
    opened.append(job)
    seen: list[tuple[int, list[str]]] = []

    def call(verb: str, payload: dict[str, Any], **_: Any) -> Any:
        replies = [None]
        if verb == "saves.poll":
            replies = [model.poll(**payload, finished=finished(job.run.step, model))]
        return SimpleNamespace(wait=lambda: replies)

    job.controller.call = call  # pyright: ignore[reportAttributeAccessIssue]
    job.run.track(policy=model)
    plan = Plan(rows=100, prompts_per_step=4, group_size=2, minibatches=2, steps=6)
    for step in job.run.steps(plan):
        model.value += 1.0
        job.run.log({"critic/score/mean": model.value})
        during(step)
        seen.append((step, [path.name for path in (out / "checkpoints").glob("step-*")]))
    job.end()
    return SimpleNamespace(job=job, model=model, seen=seen)


def test_a_checkpoint_counts_once_all_ranks_have_written_it(tmp_path):
    done = train_run(tmp_path / "run", finished=lambda step, _: step >= 3, save_every=2)
    # begun at the end of step 1: steps 2 went on without it, in step 3 it counts
    assert done.seen[:4] == [(0, []), (1, []), (2, []), (3, ["step-000002"])]
    assert checkpoints(tmp_path / "run") == ["latest", "step-000002", "step-000004", "step-000006"]
    for step in (2, 4, 6):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        assert verify(folder) == "" and (folder / "model.safetensors").read_text() == f"{step}.0"
    assert done.model.begun == [True, True, False]  # nothing goes on behind the last one


def test_ranks_that_never_finish_by_themselves_are_waited_for(tmp_path):
    done = train_run(tmp_path / "run", finished=lambda *_: False, save_every=2)
    assert done.seen[3] == (3, [])  # not before the next save, which waits
    assert done.seen[4] == (4, ["step-000002"])
    assert checkpoints(tmp_path / "run") == ["latest", "step-000002", "step-000004", "step-000006"]
    assert read_json(tmp_path / "run" / "status.json")["state"] == "finished"


def test_a_full_disk_in_the_background_is_said_in_the_next_step_and_tried_again(tmp_path):
    model = Slow()
    model.refuse = 1
    done = train_run(tmp_path / "run", lambda *_: True, model, save_every=3)
    said = done.job.said.getvalue()
    assert "saving a checkpoint: No space left (rank 0); trying again after the next step" in said
    assert checkpoints(tmp_path / "run") == ["latest", "step-000004", "step-000006"]
    assert steps_of(tmp_path / "run" / "metrics.jsonl") == list(range(6))


def test_a_disk_that_stays_full_in_the_background_ends_the_run(tmp_path):
    model = Slow()
    model.refuse = 99
    with pytest.raises(Exception, match=r"No space left .*3 times in a row"):
        train_run(tmp_path / "run", lambda *_: True, model, save_every=1)
    assert checkpoints(tmp_path / "run") == [".step-000003.part"]


def test_a_signal_that_meets_the_question_whether_all_is_written(tmp_path):
    """The answer is lost with it, and asked for again on the way out."""

    class Struck(Slow):
        def poll(self, *, wait: bool, finished: bool) -> dict[str, Any]:
            reply = super().poll(wait=wait, finished=finished)
            if not wait:
                raise Interrupted(signal.SIGTERM)
            return reply

    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train_run(out, lambda *_: True, Struck(), save_every=2)
    assert checkpoints(out) == [".step-000002.part"]
    opened[-1].end("interrupted", "interrupted by SIGTERM")
    assert checkpoints(out) == ["latest", "step-000002"]
    assert verify(out / "checkpoints" / "step-000002") == ""
    assert read_json(out / "status.json")["saved"] == 2


def test_a_signal_in_the_last_try_is_followed_by_another(tmp_path):
    """After a full disk the last checkpoint is tried again. What the ranks have begun for it is ended first."""

    class Struck(Slow):
        def begin_save(self, folder: Path, *, background: bool) -> None:
            super().begin_save(folder, background=background)
            if len(self.begun) == 2:
                raise Interrupted(signal.SIGTERM)

    out, model = tmp_path / "run", Struck()
    model.refuse = 1
    with pytest.raises(Interrupted):
        train_run(out, lambda *_: True, model, save_every=0)
    opened[-1].end("interrupted", "interrupted by SIGTERM")
    assert checkpoints(out) == ["latest", "step-000006"]
    assert verify(out / "checkpoints" / "step-000006") == ""
    assert "no checkpoint" not in opened[-1].said.getvalue()


def test_a_failure_of_the_recipe_does_not_cost_the_checkpoint_under_way(tmp_path):
    def fall(step: int) -> None:
        if step == 2:
            raise ZeroDivisionError

    out = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        train_run(out, lambda *_: False, save_every=2, during=fall)
    assert checkpoints(out) == [".step-000002.part"]
    opened[-1].end("error", "ZeroDivisionError")
    assert checkpoints(out) == ["latest", "step-000002"]
    assert read_json(out / "status.json")["state"] == "failed"


def test_off_means_off(tmp_path):
    done = train_run(tmp_path / "run", lambda *_: True, save_every=2, background_save=False)
    assert done.model.begun == [False] * 3


def test_the_stall_is_timed(tmp_path):
    class Copying(Slow):
        def begin_save(self, folder: Path, *, background: bool) -> None:
            super().begin_save(folder, background=background)
            time.sleep(0.05)

    train_run(tmp_path / "run", lambda *_: True, Copying(), save_every=2)
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("timing/save", 0.0) >= 0.05 for row in rows] == [False, True] * 3


# ---- the manifest


def test_ranges_of_several_ranks_are_verified_each(tmp_path):
    def part(data: bytes, *spans: tuple[int, int]) -> list[dict[str, Any]]:
        tally = writing.Tally()
        for start, stop in spans:
            tally.add(start, memoryview(data)[start:stop])
        return tally.facts()

    data = bytes(range(100))
    (tmp_path / "f").write_bytes(data)
    parts = [*part(data, (0, 10), (40, 60)), *part(data, (10, 40), (60, 80), (80, 100))]
    assert parts[1]["ranges"] == [[10, 40], [60, 100]]
    seal(tmp_path, 3, {"f": parts})
    assert verify(tmp_path) == ""
    for position in range(100):
        (tmp_path / "f").write_bytes(data[:position] + b"\xff" + data[position + 1 :])
        assert verify(tmp_path) == "the contents of f have changed (sha256)"
    with pytest.raises(OSError, match="f has 100 bytes, of which 80 were written in one piece"):
        seal(tmp_path, 3, {"f": [parts[0], *part(data, (10, 40), (60, 80))]})


def test_a_large_file_has_parts_for_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdprl.safetensors_file.PART_BYTES", 30)
    data, tally = bytes(range(100)), writing.Tally()
    for start, stop in ((0, 25), (25, 80), (80, 100)):
        tally.add(start, memoryview(data)[start:stop])
    parts = tally.facts()
    assert [p["ranges"] for p in parts] == [[[0, 30]], [[30, 60]], [[60, 90]], [[90, 100]]]
    assert [p["sha256"] for p in parts] == [
        hashlib.sha256(data[p["ranges"][0][0] : p["ranges"][0][1]]).hexdigest() for p in parts
    ]
    (tmp_path / "f").write_bytes(data)
    seal(tmp_path, 3, {"f": parts})
    assert verify(tmp_path) == ""


def test_a_disk_that_refuses_a_precomputed_reference(tmp_path):
    """As an OSError, after which the run tries again. Computed it is steady, as tracked models say."""
    sets: Any = SimpleNamespace(offset=0, source=range(1000))
    reference = PrecomputedReference(Any, sets)  # type: ignore[arg-type]
    assert not reference.steady
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            reference.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    reference.sums = torch.arange(1000).double()
    reference.save(tmp_path)
    again = PrecomputedReference(Any, sets)  # type: ignore[arg-type]
    again.load(tmp_path)
    assert again.steady and torch.equal(again.sums, reference.sums)


# ---- the best one


def trained(out: Path, values: dict[int, float], steps: int = 6, **options: Any) -> Job:
    """A run that measures `eval/reward` at these steps, `steps` itself after the loop."""
    job = Job(out, **({"save_every": 1, "keep_best": "eval/reward"} | options)).open()

    def measure(step: int) -> None:
        if step in values:
            job.run.log({"eval/reward": values[step], "eval/loss": values[step]})

    job.train(steps, during=measure, end=False)
    measure(steps)
    job.end()
    return job


def best_of(out: Path) -> str:
    return (out / "checkpoints" / "best").resolve().name


REWARDS = {0: 9.0, 1: 1.0, 2: 5.0, 3: 2.0, 4: 5.0, 6: 3.0}


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    trained(tmp_path / "run", REWARDS, keep=1)
    # step 0 has no checkpoint, and of equals the first counts
    assert best_of(tmp_path / "run") == "step-000002"
    assert checkpoints(tmp_path / "run") == ["best", "latest", "step-000002", "step-000006"]
    trained(tmp_path / "low", REWARDS, keep=1, keep_best="eval/loss")
    assert best_of(tmp_path / "low") == "step-000001"
    trained(tmp_path / "min", REWARDS, keep=2, keep_best="eval/reward:min")
    assert checkpoints(tmp_path / "min") == [
        "best", "latest", "step-000001", "step-000005", "step-000006",
    ]  # fmt: skip


def test_the_last_step_may_be_the_best(tmp_path):
    trained(tmp_path / "run", REWARDS | {6: 7.0}, keep=1)
    assert checkpoints(tmp_path / "run") == ["best", "latest", "step-000006"]


def test_the_step_that_stop_makes_the_last_one_may_be_the_best(tmp_path):
    out = tmp_path / "run"
    job = Job(out, save_every=2, keep_best="eval/reward").open()
    job.train(6, during=lambda step: job.run.stop() if step == 2 else None, end=False)
    job.run.log({"eval/reward": 1.0})
    job.end()
    assert best_of(out) == "step-000003"


@pytest.mark.parametrize("failures", [1, 2])
def test_a_full_disk_as_the_best_is_pointed_at(
    tmp_path, monkeypatch: pytest.MonkeyPatch, failures: int
):
    point, left = run_checkpoints.point, [failures]

    def full(link: Path, name: str) -> None:
        if link.name == "best":
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        point(link, name)

    monkeypatch.setattr(run_checkpoints, "point", full)
    job = trained(tmp_path / "run", {2: 5.0, 5: 1.0}, keep=1)
    assert "/best: No space left on device; trying again later" in job.said.getvalue()
    assert best_of(tmp_path / "run") == "step-000002"
    assert checkpoints(tmp_path / "run") == ["best", "latest", "step-000002", "step-000006"]


def test_only_steps_that_save_count(tmp_path):
    trained(tmp_path / "run", REWARDS, save_every=3)
    assert best_of(tmp_path / "run") == "step-000006"


def test_a_resumed_run_remembers_the_best(tmp_path):
    out = tmp_path / "run"
    job = Job(out, save_every=1, keep=1, keep_best="eval/reward").open()

    def stop(step: int) -> None:
        if step in REWARDS:
            job.run.log({"eval/reward": REWARDS[step]})
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        job.train(6, during=stop)
    job.abandon()
    assert checkpoints(out) == ["best", "latest", "step-000002", "step-000004"]
    trained(out, {6: 4.0}, keep=1)
    assert checkpoints(out) == ["best", "latest", "step-000002", "step-000006"]


@pytest.mark.parametrize("before", [{"keep": 0}, {"keep": 0, "keep_best": ""}])
def test_keeping_fewer_from_here_on_does_not_cost_the_best_one(tmp_path, before: dict[str, Any]):
    """Nor does a wish for the best that comes later: the ones before it in the file were better once."""
    out = tmp_path / "run"
    trained(out, {1: 1.0, 2: 2.0, 3: 9.0, 4: 3.0}, **before)
    assert len(checkpoints(out)) == 7 + ("keep_best" not in before)
    more = {"config": CONFIG | {"steps": 7}, "keep": 1, "keep_best": "eval/reward"}
    Job(out, save_every=1, **more).train(7)
    assert best_of(out) == "step-000003"
    assert checkpoints(out) == ["best", "latest", "step-000003", "step-000007"]


def test_a_wish_without_a_name(tmp_path):
    with pytest.raises(UserError, match=r"--run.keep-best :min: name a metric"):
        trained(tmp_path / "run", {}, keep_best=":min")


def test_a_changed_manifest_is_found(tmp_path):
    (tmp_path / "f").write_bytes(b"1234")
    seal(tmp_path, 12, {})
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text.replace('"step": 12', '"step": 13'))
    assert verify(tmp_path) == "the contents of manifest.json have changed (sha256)"
    (tmp_path / MANIFEST).write_text(text.removesuffix("\n"))  # to the byte, like any other file
    assert verify(tmp_path) == "the contents of manifest.json have changed (sha256)"
