"""A run is continued by what began it: every difference is named, and only what is allowed by name passes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_job import CONFIG, Job, Killed, isolated, kill_at, killed_at, steps_of

from fsdprl import run_changes
from fsdprl.errors import UserError
from fsdprl.records import read_json
from fsdprl.world import World


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolated(monkeypatch):
        yield


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A run's options, which name data, a model with a tokenizer, and a file of rewards."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text('{"merges": []}')
    (model / "model.safetensors").write_bytes(bytes(64))
    (tmp_path / "mine.py").write_text("def reward(sample): return 1.0\n")
    return CONFIG | {
        "data": str(tmp_path / "data.jsonl"),
        "model": str(model),
        "rewards": [f"{tmp_path}/mine.py:reward", "accuracy"],
        "system": "be kind",
    }


CHANGES = {
    "data": ("data.jsonl", "--data: {0}/data.jsonl: other contents"),
    "model": ("model/tokenizer.json", "--model: {0}/model/tokenizer.json: other contents"),
    "rewards": ("mine.py", "--rewards: {0}/mine.py: other contents"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_files_are_named_and_refused_unless_allowed(tmp_path, config, name):
    out = tmp_path / "run"
    killed_at(out, 3, config=config)
    before = (out / "metrics.jsonl").read_bytes()
    file, said = CHANGES[name]
    (tmp_path / file).write_text("something else\n")
    with pytest.raises(UserError) as caught:
        Job(out, config=config).open()
    assert said.format(tmp_path) in str(caught.value)
    assert str(caught.value).endswith(f"to go on here all the same: --run.allow {name}")
    assert (out / "metrics.jsonl").read_bytes() == before
    job = Job(out, config=config, allow=(name,)).open()
    assert said.format(tmp_path) in job.said.getvalue() and job.run.restored == 2
    job.abandon()
    Job(out, config=config).open().abandon()  # allowed once, it is the run's


def test_a_file_more_and_a_file_less(tmp_path, config):
    out = tmp_path / "run"
    killed_at(out, 3, config=config)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError) as caught:
        Job(out, config=config).open()
    for line in ("model/chat_template.jinja: new", "model/tokenizer.json: gone"):
        assert line in str(caught.value)


def test_all_differences_stand_in_one_message_and_are_allowed_one_by_one(tmp_path, config):
    out = tmp_path / "run"
    killed_at(out, 3, config=config)
    other = config | {"lr": 0.25, "system": "be terse"}
    with pytest.raises(UserError) as caught:
        Job(out, config=other, allow=("lr",)).open()
    said = str(caught.value)
    assert "--system: 'be kind' there, 'be terse' now" in said and "--lr" not in said
    job = Job(out, config=other, allow=("lr", "system")).open()
    assert "--lr: 0.5 before, 0.25 from here on" in job.said.getvalue()
    assert read_json(out / "config.json")["resumed"][0]["changes"] == {
        "lr": [0.5, 0.25], "system": ["be kind", "be terse"],
    }  # fmt: skip
    job.abandon()


def test_a_name_that_is_no_option(tmp_path, config):
    with pytest.raises(UserError, match=r"--run.allow systm: no option.*did you mean system\?"):
        Job(tmp_path / "run", config=config, allow=("systm",)).open()


def test_a_path_that_changed_is_one_difference(tmp_path, config):
    killed_at(tmp_path / "run", 3, config=config)
    copy = tmp_path / "copy.jsonl"
    copy.write_text((tmp_path / "data.jsonl").read_text())
    with pytest.raises(UserError) as caught:
        Job(tmp_path / "run", config=config | {"data": str(copy)}).open()
    assert str(caught.value).count("data.jsonl") == 1
    job = Job(tmp_path / "run", config=config | {"data": str(copy)}, allow=("data",)).open()
    job.abandon()


def test_other_versions_are_said(tmp_path):
    out = tmp_path / "run"
    killed_at(out, 3)
    facts = json.loads((out / "config.json").read_text())
    now = facts["versions"]["torch"]
    facts["versions"]["torch"] = "1.0"
    (out / "config.json").write_text(json.dumps(facts))
    job = Job(out).open()
    assert f"torch 1.0 before, {now} from here on" in job.said.getvalue()
    job.abandon()


def test_only_the_first_changed_lines_of_a_recipe_are_shown(tmp_path):
    old, new = tmp_path / "a.py", tmp_path / "b.py"
    old.write_text("".join(f"x{i} = 0\n" for i in range(20)))
    new.write_text("".join(f"x{i} = {i % 5}\n" for i in range(20)))
    (change,) = run_changes.of_recipe(old, new, "1", "2")
    assert change.name == "recipe" and change.text.count("\n") == 7
    assert "and 26 more lines" in change.text  # 16 lines replaced are 32, of which 6 stand there


# ---- parts of a checkpoint


def given(tmp_path: Path) -> str:
    """A checkpoint after 4 steps of another run."""
    Job(tmp_path / "old").train()
    return str(tmp_path / "old" / "checkpoints" / "step-000004")


def test_weights_only(tmp_path):
    out = tmp_path / "new"
    options = {"resume": given(tmp_path), "forget": ("optimizer", "rng", "progress")}
    job = Job(out, config=CONFIG | {"lr": 9.0}, **options)
    job.model.load_weights = job.model.load  # pyright: ignore[reportAttributeAccessIssue]
    job.train(6)
    assert (job.model.value, job.count.n) == (10.0, 60)  # 4 + 6; counted from 0
    assert steps_of(out / "metrics.jsonl") == list(range(6))
    assert job.run.controller.redrawn == 1
    assert "not restored: optimizer, progress, rng" in job.said.getvalue()
    assert read_json(out / "checkpoints/latest/run.json")["redrawn"] == 1


def test_the_same_command_again_forgets_nothing_twice(tmp_path):
    options = {"resume": given(tmp_path), "forget": ("rng",)}
    out = tmp_path / "new"
    job = Job(out, **options)
    job.train(6)
    job = Job(out, config=CONFIG | {"steps": 8}, **options).train(8)
    assert job.run.restored == 6 and job.run.controller.redrawn == 1
    assert (job.model.value, job.count.n) == (8.0, 80)


def test_a_restart_before_the_next_checkpoint_forgets_again(tmp_path):
    """torchrun --max-restarts, after the run went back to a checkpoint of its own."""
    out = tmp_path / "run"
    Job(out).train()
    options = {"resume": str(out / "checkpoints" / "step-000002"), "forget": ("rng",)}
    killed_at(out, 3, **options)
    for restart, restored in ((1, 2), (2, 4)):
        job = Job(out, **options)
        job.controller.world = World(size=2, local_size=2, restart=restart)
        with pytest.raises(Killed):
            job.train(during=kill_at(5))
        job.abandon()
        assert (job.run.restored, job.run.controller.redrawn) == (restored, 1)


@pytest.mark.parametrize("own", [True, False])
def test_a_restart_does_not_need_what_the_run_began_from(tmp_path, own: bool):
    """--run.keep, of this run or the other one, may have deleted it."""
    out = tmp_path / "run"
    Job(out if own else tmp_path / "old").train()
    checkpoint = (out if own else tmp_path / "old") / "checkpoints" / "step-000002"
    options = {"resume": str(checkpoint), "keep": 1}
    killed_at(out, 5, **options)
    shutil.rmtree(checkpoint, ignore_errors=True)
    job = Job(out, **options)
    job.controller.world = World(size=2, local_size=2, restart=int(own))
    job.train()
    assert (job.run.restored, job.model.value) == (4, 6.0)
    config = CONFIG | {"steps": 8}
    if own:  # not a restart: it would go back
        with pytest.raises(UserError, match=r"step-000002: neither auto"):
            Job(out, config=config, **options).open()
    else:
        assert Job(out, config=config, **options).train(8).run.restored == 6


def test_without_the_optimizer(tmp_path):
    job = Job(tmp_path / "new", resume=given(tmp_path), forget=("optimizer",)).open()
    asked: list[Path] = []
    job.model.load_weights = asked.append  # pyright: ignore[reportAttributeAccessIssue]
    job.train(6)
    assert [path.name for path in asked] == ["step-000004"]
    assert job.run.restored == 4 and job.count.n == 60


def test_forgetting_needs_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"give --run.resume CHECKPOINT"):
        Job(tmp_path / "new", forget=("optimizer",)).open()
    out = tmp_path / "run"
    Job(out).train()
    own = str(out / "checkpoints" / "step-000002")
    with pytest.raises(UserError, match=r"which then begins anew: give another --run.out"):
        Job(out, resume=own, forget=("progress",)).open()


def test_a_restart_by_torchrun_continues_whatever_resume_says(tmp_path):
    out = tmp_path / "run"
    killed_at(out, 5, resume="never")
    again = Job(out, resume="never")
    again.controller.world = type(again.controller.world)(size=2, local_size=2, restart=1)
    assert again.open().run.restored == 4
    again.abandon()
    back = Job(out, resume=str(out / "checkpoints" / "step-000002"))
    back.controller.world = again.controller.world
    assert back.open().run.restored == 4  # back to it once, not after every restart
    back.abandon()
