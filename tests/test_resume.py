"""A run that was stopped anywhere goes on as if nothing had been; damage is named; other runs are refused."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_job import (
    CONFIG,
    Count,
    Job,
    Killed,
    Model,
    checkpoints,
    isolated,
    kill_at,
    killed_at,
    steps_of,
    without_times,
)

from fsdprl import run as run_module
from fsdprl import run_checkpoints
from fsdprl.disk_room import checkpoint_bytes
from fsdprl.errors import UserError
from fsdprl.records import read_json
from fsdprl.run_checkpoints import Tracked, verify


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolated(monkeypatch):
        yield


# ---- resuming


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (1, 0), (2, 2), (3, 2), (5, 4)])
def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path: Path, step: int, kept: int):
    Job(tmp_path / "whole").train()
    out = tmp_path / "run"
    killed_at(out, step)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "critic/sc')  # torn by the kill
    job = Job(out).open()
    assert job.run.restored == kept
    for path in [out / "metrics.jsonl", *(out / "completions").glob("*.jsonl")]:
        assert not path.exists() or steps_of(path) == list(range(kept))
    job.train()
    assert (job.model.value, job.count.n) == (6.0, 60)
    assert without_times(out) == without_times(tmp_path / "whole")
    assert steps_of(out / "completions" / "rank-00001.jsonl") == list(range(6))
    for name in ("model.safetensors", "trainer/adam.safetensors", "run.json", "manifest.json"):
        ours, theirs = (path / "checkpoints/latest" / name for path in (out, tmp_path / "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_models_are_told_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By it ranks of another host know the copy that they were sent (ferry.here)."""
    killed_at(tmp_path / "run", 3)
    monkeypatch.chdir(tmp_path)
    job, folders = Job(Path("run")), list[Path]()
    load = job.model.load
    monkeypatch.setattr(job.model, "load", lambda folder: (folders.append(folder), load(folder)))
    job.train()
    assert folders == [(tmp_path / "run" / "checkpoints" / "step-000002").resolve()]


def test_a_finished_run_says_so(tmp_path: Path):
    Job(tmp_path / "run").train()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    job = Job(tmp_path / "run")
    with pytest.raises(SystemExit) as caught:
        job.open()
    assert caught.value.code == 0
    assert "this run is finished" in job.said.getvalue()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_can_be_given_more_steps(tmp_path: Path):
    out = tmp_path / "run"
    Job(out).train(6)
    job = Job(out, config=CONFIG | {"steps": 8}).train(8)
    assert "--steps: 6 before, 8 from here on" in job.said.getvalue()
    assert steps_of(out / "metrics.jsonl") == list(range(8))
    assert read_json(out / "config.json")["resumed"] == [
        {"step": 6, "world_size": 2, "changes": {"steps": [6, 8]}}
    ]


@pytest.mark.parametrize("back", [False, True])
def test_a_finished_run_that_goes_on_is_finished_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
):
    """Killed before its first step: else the folder would hold the new config and the old end."""
    out = tmp_path / "run"
    Job(out).train()
    steps = 6 if back else 8
    resume = str(out / "checkpoints" / "step-000002") if back else "auto"
    job = Job(out, config=CONFIG | {"steps": steps}, resume=resume)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run_module, "Hosts", lambda *_: kill_at(0)(0))
        job.open()
    again = Job(out, config=CONFIG | {"steps": steps}).train(steps)
    assert (again.run.restored, again.model.value) == (2 if back else 6, steps)


def test_another_config_is_refused_with_the_differences(tmp_path: Path):
    out = tmp_path / "run"
    killed_at(out, 3)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other = {"model": "m", "lr": 0.25, "steps": 6, "sharding": {"replicate": 2}, "clip": 1}
    with pytest.raises(UserError) as caught:
        Job(out, config=other).open()
    said = str(caught.value)
    assert "holds a run of another config" in said
    assert "--lr: 0.5 there, 0.25 now" in said
    assert "--clip: None there, 1 now" in said
    assert "replicate" not in said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_layout_may_change_on_the_way(tmp_path: Path):
    killed_at(tmp_path / "run", 3)
    job = Job(tmp_path / "run", config=CONFIG | {"sharding": {"replicate": 2}}, log_every=2).open()
    assert job.run.restored == 2
    assert "--sharding.replicate: 1 before, 2 from here on" in job.said.getvalue()
    job.abandon()


def test_never_refuses_an_occupied_folder(tmp_path: Path):
    Job(tmp_path / "run", resume="never").train()
    with pytest.raises(UserError, match=r"holds a run already, and --run.resume is never"):
        Job(tmp_path / "run", resume="never").open()


def test_a_folder_without_a_finished_step_protects_nothing(tmp_path: Path):
    killed_at(tmp_path / "run", 0)
    job = Job(tmp_path / "run", config=CONFIG | {"lr": 9.0}, resume="never").train()
    assert job.model.value == 6.0
    assert read_json(tmp_path / "run" / "config.json")["config"]["lr"] == 9.0
    assert steps_of(tmp_path / "run" / "completions" / "rank-00000.jsonl") == list(range(6))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        Job(tmp_path / "run").open()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        Job(tmp_path / "file").open()


def test_two_jobs_do_not_share_a_folder(tmp_path: Path):
    first = Job(tmp_path / "run").open()
    with pytest.raises(UserError, match=f"process {os.getpid()} on .* is training in this folder"):
        Job(tmp_path / "run").open()
    first.abandon()
    Job(tmp_path / "run").open().abandon()


def test_a_changed_recipe_is_kept_beside_the_old_one(tmp_path: Path):
    out = tmp_path / "run"
    killed_at(out, 3)
    (tmp_path / "grpo.py").write_text("print('mended')\n")
    with pytest.raises(UserError) as caught:
        Job(out).open()
    assert "the recipe grpo.py has changed:\n      -print('recipe')\n      +print('mended')" in str(
        caught.value
    )
    assert "--run.allow recipe" in str(caught.value)
    job = Job(out, allow=("recipe",)).open()
    assert "the recipe grpo.py has changed" in job.said.getvalue()
    assert (out / "grpo.py").read_text() == "print('recipe')\n"
    assert (out / "grpo-from-step-000002.py").read_text() == "print('mended')\n"
    job.abandon()


def test_starting_from_another_runs_checkpoint(tmp_path: Path):
    Job(tmp_path / "old").train()
    given = str(tmp_path / "old" / "checkpoints" / "step-000004")
    new = tmp_path / "new"
    other = CONFIG | {"lr": 9.0}
    killed_at(new, 5, config=other, resume=given)
    assert steps_of(new / "metrics.jsonl") == [4]
    job = Job(new, config=other, resume=given).train(8)  # the same command again
    assert job.model.value == 8.0
    assert steps_of(new / "metrics.jsonl") == [4, 5, 6, 7]
    with pytest.raises(UserError, match=r"--run.resume nonsense: neither"):
        Job(tmp_path / "third", resume="nonsense").open()


def test_going_back_to_an_older_checkpoint(tmp_path: Path):
    out = tmp_path / "run"
    Job(out).train()
    job = Job(out, resume=str(out / "checkpoints" / "step-000002")).train()
    assert job.model.value == 6.0
    assert steps_of(out / "metrics.jsonl") == list(range(6))
    assert checkpoints(out) == [
        "latest", "step-000002", "step-000004", "step-000006",
        "unused-0-step-000004", "unused-0-step-000006",
    ]  # fmt: skip


def test_what_a_run_went_back_from_is_not_met_again(tmp_path: Path):
    out = tmp_path / "run"
    Job(out).train()
    killed_at(out, 3, resume=str(out / "checkpoints" / "step-000002"))
    job = Job(out).open()
    assert job.run.restored == 2
    job.abandon()


def test_a_second_model_has_a_folder_of_its_own(tmp_path: Path):
    out = tmp_path / "run"
    for steps in (2, 4):
        job, critic = Job(out, config=CONFIG | {"steps": steps}).open(), Model()
        job.run.tracked.add("policy", job.model)
        job.run.track(critic=critic)
        job.run.track = lambda **_: None
        job.train(steps, during=lambda step, critic=critic: setattr(critic, "value", step + 100.0))
    last = out / "checkpoints" / "latest"
    assert (last / "model.safetensors").read_text() == "4.0"
    assert (last / "critic" / "model.safetensors").read_text() == "103.0"
    assert (job.model.value, critic.value) == (4.0, 103.0)


def test_what_stays_as_it_is_is_not_saved():
    tracked = Tracked()
    tracked.add("reference", None)
    tracked.add("other", SimpleNamespace(constant=True))
    assert not tracked.models and not tracked.states


def test_what_is_tracked_must_be_in_the_checkpoint(tmp_path: Path):
    killed_at(tmp_path / "run", 3)
    job = Job(tmp_path / "run").open()
    job.run.track(critic=Model())
    with pytest.raises(
        UserError, match="holds policy, count, but the recipe tracks critic, policy"
    ):
        job.train()
    job.abandon()


@pytest.mark.parametrize(
    ("thing", "said"),
    [(object(), r"needs save\(dir\)"), (Count, r"needs save\(dir\)")],
)
def test_things_that_cannot_be_tracked(tmp_path: Path, thing: object, said: str):
    job = Job(tmp_path / "run").open()
    with pytest.raises(UserError, match=said):
        job.run.track(kl=thing if not isinstance(thing, type) else 3)
    job.run.track(count=Count())
    with pytest.raises(UserError, match="already tracked"):
        job.run.track(count=Count())
    job.abandon()


def test_state_that_is_not_json_is_named(tmp_path: Path):
    job = Job(tmp_path / "run").open()
    job.count.state_dict = lambda: {"n": {1, 2}}  # pyright: ignore
    with pytest.raises(UserError, match=r"run.track\(count=...\): its state_dict\(\) is not JSON"):
        job.train()
    job.abandon()


# ---- damage


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda c: (c / "model.safetensors").write_text("4"), "has 1 bytes, not 3"),
    "bit": (lambda c: flip_a_bit(c / "model.safetensors"), "model.safetensors have changed"),
    "missing": (lambda c: (c / "trainer/adam.safetensors").unlink(), "adam.safetensors is missing"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
    "bad manifest": (
        lambda c: (c / "manifest.json").write_text("{"),
        "manifest.json is missing or",
    ),
    "emptied": (lambda c: (shutil.rmtree(c), c.mkdir()), "manifest.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, damage: str):
    out = tmp_path / "run"
    killed_at(out, 5)
    spoil, fault = DAMAGE[damage]
    spoil(out / "checkpoints" / "step-000004")
    job = Job(out).open()
    assert job.run.restored == 2
    assert f"{out}/checkpoints/step-000004 is damaged: " in job.said.getvalue()
    assert fault in job.said.getvalue()
    job.train()
    assert job.model.value == 6.0
    assert verify(out / "checkpoints" / "step-000004") == ""
    assert steps_of(out / "metrics.jsonl") == list(range(6))


def test_no_whole_checkpoint_left(tmp_path: Path):
    out = tmp_path / "run"
    killed_at(out, 5)
    for path in (out / "checkpoints").glob("step-*"):
        flip_a_bit(path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"step-000004 is damaged.*step-000002 is damaged.*No whole"
    ):
        Job(out).open()


def test_a_save_that_died_leaves_the_old_checkpoint(tmp_path: Path):
    out = tmp_path / "run"
    job = Job(out)

    def during(step: int) -> None:
        if step == 3:
            job.model.save = lambda folder: kill_at(0)(0)  # pyright: ignore

    with pytest.raises(Killed):
        job.train(during=during)
    job.abandon()
    assert checkpoints(out) == [".step-000004.part", "latest", "step-000002"]
    again = Job(out).train()
    assert again.model.value == 6.0
    assert checkpoints(out) == ["latest", "step-000002", "step-000004", "step-000006"]


@pytest.mark.parametrize("step", [4, 6])
def test_a_kill_before_latest_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int):
    """The last checkpoint has no later one to move it."""
    out, point = tmp_path / "run", run_checkpoints.point

    def killed(link: Path, name: str) -> None:
        if name == f"step-{step:06d}":
            raise Killed
        point(link, name)

    job = Job(out)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run_checkpoints, "point", killed)
        job.train()
    job.abandon()
    latest = out / "checkpoints" / "latest"
    assert latest.resolve().name == f"step-{step - 2:06d}"
    again = Job(out).open()
    assert again.run.restored == step and latest.resolve().name == f"step-{step:06d}"
    again.train()
    assert latest.resolve().name == "step-000006"


def test_no_link_leads_to_a_damaged_checkpoint(tmp_path: Path):
    out = tmp_path / "run"
    killed_at(out, 5)
    checkpoint = out / "checkpoints" / "step-000004"
    run_checkpoints.point(checkpoint.with_name("best"), checkpoint.name)
    flip_a_bit(checkpoint / "model.safetensors")
    Job(out).open().abandon()
    assert (out / "checkpoints" / "latest").resolve().name == "step-000002"
    assert checkpoints(out) == ["latest", "step-000002", "unused-0-step-000004"]


def test_a_full_disk_keeps_the_old_checkpoint_and_is_tried_again(tmp_path: Path):
    out = tmp_path / "run"
    job = Job(out)

    def during(step: int) -> None:
        if step == 3:
            job.model.full = 1

    job.train(5, during=during)
    assert "saving a checkpoint: No space left on device; trying again" in job.said.getvalue()
    assert checkpoints(out) == ["latest", "step-000002", "step-000005"]
    assert steps_of(out / "metrics.jsonl") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("failures", [1, 2])
def test_the_last_checkpoint_is_tried_again_at_once(tmp_path: Path, failures: int):
    out = tmp_path / "run"
    job = Job(out, save_every=0)
    job.train(3, during=lambda step: setattr(job.model, "full", failures if step == 2 else 0))
    assert verify(out / "checkpoints" / "step-000003") == ""
    assert steps_of(out / "metrics.jsonl") == [0, 1, 2]
    assert read_json(out / "status.json")["state"] == "finished"


def test_a_run_without_its_last_checkpoint_does_not_count_as_finished(tmp_path: Path):
    out = tmp_path / "run"
    job = Job(out, save_every=2)
    with pytest.raises(UserError, match="3 times in a row"):
        job.train(3, during=lambda step: setattr(job.model, "full", 9 if step == 2 else 0))
    job.end("user", "No space left")
    assert read_json(out / "status.json")["state"] == "failed"
    again = Job(out).train(3)
    assert again.run.restored == 2
    assert verify(out / "checkpoints" / "step-000003") == ""


def test_a_disk_that_stays_full_ends_the_run_with_the_old_checkpoint_whole(tmp_path: Path):
    out = tmp_path / "run"
    job = Job(out)

    def during(step: int) -> None:
        if step == 3:
            job.model.full = 9

    with pytest.raises(UserError, match="3 times in a row"):
        job.train(20, during=during)
    assert job.run.step == 5
    job.end("user", "No space left")
    assert verify(out / "checkpoints" / "step-000002") == ""
    assert Job(out).train().model.value == 6.0


def test_too_little_room_is_found_before_ranks_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "run"
    job = Job(out)
    saved: list[int] = []

    def during(step: int) -> None:
        if step == 3:
            usage = type("Usage", (), {"free": 1})
            monkeypatch.setattr("fsdprl.run_saves.shutil.disk_usage", lambda path: usage)
            job.model.save = lambda folder: saved.append(step)  # pyright: ignore
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        job.train(during=during)
    assert saved == []
    assert "No space left on device" in job.said.getvalue()
    job.abandon()


def a_model(folder: Path, dtype: str, size: int) -> str:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(size))
    (folder / "consolidated.safetensors").write_bytes(bytes(size))  # the same once more
    (folder / "config.json").write_text(f'{{"dtype": "{dtype}"}}')
    return str(folder)


def test_what_a_checkpoint_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights, masters where the weights are narrower, and two moments; a critic's as well."""
    half = a_model(tmp_path / "half", "bfloat16", 1000)
    full = a_model(tmp_path / "full", "float32", 2000)
    assert checkpoint_bytes({"model": half}) == 7000
    assert checkpoint_bytes({"model": full}) == 6000
    assert checkpoint_bytes({"model": half, "critic": full}) == 13_000
    assert checkpoint_bytes({"model": half, "critic": ""}) == 14_000
    assert checkpoint_bytes({"model": "of/hub"}) == checkpoint_bytes({"model": ""}) == 0
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    a_model(tmp_path / "hub/models--of--hub/snapshots/abc", "bfloat16", 10)
    (tmp_path / "hub/models--of--hub/refs").mkdir()
    (tmp_path / "hub/models--of--hub/refs/main").write_text("abc")
    assert checkpoint_bytes({"model": "of/hub"}) == 70


def test_room_for_two_checkpoints_is_demanded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For one if only one is saved, or one is there already."""

    def free(size: int) -> None:
        fake = type("Usage", (), {"free": size})
        monkeypatch.setattr("fsdprl.disk_room.shutil.disk_usage", lambda path: fake)

    config = CONFIG | {"model": a_model(tmp_path / "m", "bfloat16", 1000)}
    out = tmp_path / "run"
    free(13_999)
    with pytest.raises(
        UserError, match=r"two checkpoints may take 1\.4e-05 GB .*--run\.save-every 0"
    ):
        Job(out, config=config, save_every=2).open()
    assert not out.exists()
    Job(tmp_path / "last-only", config=config, save_every=0).train()
    free(14_000)
    killed_at(out, 3, config=config, save_every=2)
    free(7000)
    Job(out, config=config, save_every=2).train()
    free(6999)
    with pytest.raises(UserError, match=r"a checkpoint may take 7e-06 GB and the disk has 7e-06"):
        Job(tmp_path / "last", config=config, save_every=0).open()
    assert not (tmp_path / "last").exists()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    out = tmp_path / "run"
    Job(out, save_every=1, keep=2).train()
    assert checkpoints(out) == ["latest", "step-000005", "step-000006"]


def test_save_at_the_end_only(tmp_path: Path):
    Job(tmp_path / "run", save_every=0).train()
    assert checkpoints(tmp_path / "run") == ["latest", "step-000006"]


def test_metrics_that_never_reach_the_disk_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = Job(tmp_path / "run", save_every=0).open()

    def full(sync: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job.run.lines, "_write", full)
    with pytest.raises(UserError, match=r"metrics.jsonl: No space left"):
        job.train()
    assert job.run.step == 2
    job.abandon()


# ---- a real process, really killed

CHILD = """
import os, sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from run_job import Job, Undrawn
from fsdprl import run as run_module
run_module.Plots = Undrawn
where, step = {where!r}, 3
job = Job(Path({out!r}))
def during(now):
    if where == "step" and now == step:
        os.kill(os.getpid(), 9)
    if where == "save" and now == step:
        job.model.save = lambda folder: os.kill(os.getpid(), 9)
    if where == "commit" and now == step:
        job.run.folder.checkpoints.commit = lambda *_: os.kill(os.getpid(), 9)
job.train(during=during)
"""


@pytest.mark.parametrize("where", ["step", "save", "commit"])
def test_sigkill_and_the_same_command_again(tmp_path: Path, where: str):
    Job(tmp_path / "whole").train()
    out = tmp_path / "run"
    source = CHILD.format(tests=str(Path(__file__).parent), where=where, out=str(out))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", source], env=env, timeout=60, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert read_json(out / "status.json")["state"] == "running"
    job = Job(out).train()
    assert "continuing" in job.said.getvalue()
    assert without_times(out) == without_times(tmp_path / "whole")
    assert (out / "checkpoints/latest/manifest.json").read_bytes() == (
        tmp_path / "whole/checkpoints/latest/manifest.json"
    ).read_bytes()
