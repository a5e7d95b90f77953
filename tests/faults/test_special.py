"""Rows of the matrix that need something beside the job: a judge, another user, a small disk, a broken tracker."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdprl.comparing import repeatable
from fsdprl.records import read_json, read_lines
from fsdprl.sandbox import Limits, run_python
from tests.faults import trial
from tests.faults.table import KILL
from tests.recipes.processes import ROOT
from tests.test_judge import server  # noqa: F401

pytestmark = [pytest.mark.ranks, pytest.mark.faults, pytest.mark.timeout(300)]
BOTH = pytest.mark.parametrize("ranks", [1, 2])


@BOTH
def test_row_13_a_judge_in_trouble(ranks: int, tmp_path: Path, server: Any):  # noqa: F811
    """Overload, errors and bad JSON are tried again; an answer without a verdict is masked, never 0."""
    silent = "without a verdict"
    seen: list[str] = []

    def script(asked: str) -> Any:
        seen.append(asked)
        return {0: 429, 1: 500, 2: "{bad"}.get(
            len(seen) - 1, silent if len(seen) % 16 == 0 else "Score: 7"
        )

    server.script = script
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    rewards = f"judge(url='{url}', model='m')"
    ended = trial.run(tmp_path / "run", ranks, rewards=rewards, **{"reward.max-failed-share": 0.5})
    assert ended.code == 0, ended.said
    metrics = read_lines(ended.folder / "metrics.jsonl")
    assert len(metrics) == trial.STEPS
    scores = [
        row["reward"]
        for path in (ended.folder / "completions").glob("rank-*")
        for row in read_lines(path)
    ]
    assert 0.0 not in scores and len(set(scores) - {None}) == 1, scores


NOBODY = 65534


def test_row_14_what_a_model_wrote_is_contained():
    """Fork bombs, memory, network, the environment, the parent: without root, whom process limits do not bind.

    Where another user cannot read this Python, only the cell drops root: the programs themselves are nobody's.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_sandbox.py",
    ]
    given: dict[str, Any] = {"cwd": ROOT, "timeout": 250, "capture_output": True, "text": True}
    given["env"] = os.environ | {"HOME": "/tmp", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    other = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
    try:
        ended = subprocess.run(command, **given, **other)
    except PermissionError:
        ended = subprocess.run(command, **given)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-2000:]
    assert "skipped" not in ended.stdout, ended.stdout
    assert run_python("import os; print(os.getuid())", "", Limits()).out.strip() != "0"


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real file system of a few megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = getattr(request, "param", "12m")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("small_disk", ["2m", "5m"], indirect=True)
@BOTH
def test_row_08_a_disk_too_small_for_two_checkpoints(ranks: int, small_disk: Path):
    """Said before the model, or torch, is loaded; a checkpoint of this model takes 3 MB."""
    ended = trial.run(small_disk / "run", ranks)
    assert ended.code == (2 if ranks == 1 else 1), ended.said
    said = re.findall(
        r"fsdprl: --run\.out .*two checkpoints may take 0\.0059\d* GB .* GB free", ended.said
    )
    assert len(said) == 1, ended.said
    assert ended.seconds < 10 * ended.crowd
    assert not (small_disk / "run").exists()


@BOTH
def test_row_30_a_disk_that_is_full(ranks: int, tmp_path: Path, small_disk: Path):
    """The checkpoint before it stays whole, the save is tried again, and the third failure ends the run."""
    out = small_disk / "run"
    out.parent.mkdir(exist_ok=True)
    model = sum(path.stat().st_size for path in Path(trial.files()["model"]).glob("*.safetensors"))
    job, began = trial.begin(out, ranks, steps=8)
    job.until(out / "checkpoints" / "step-000001" / "manifest.json")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        file.truncate(file.tell() - (1 << 18))  # room for lines of metrics, not for a checkpoint
    ended = trial.end(job, began, out)
    said = ended.said
    assert ended.code in (1, 2), said
    assert "No space left on device" in said and "trying again after the next step" in said
    assert "3 times in a row" in said and "the same command again" in said
    first = sorted((out / "checkpoints").glob("step-*"))[0]
    assert (first / "model.safetensors").stat().st_size >= model
    filler.unlink()
    again = trial.run(out, ranks, steps=trial.STEPS)
    assert again.code == 0, again.said
    trial.check_identical(out, trial.undisturbed(ranks))


@BOTH
def test_row_30_a_folder_that_turns_read_only(ranks: int, tmp_path: Path):
    """In the midst of a run: the checkpoint stays whole, and once it can be written again the run goes on."""
    out = tmp_path / "run"
    job, began = trial.begin(out, ranks, steps=40)
    job.until(out / "checkpoints" / "step-000001" / "manifest.json")
    frozen = ["chattr", "+i", str(out / "checkpoints")]
    if (refused := subprocess.run(frozen, capture_output=True, text=True)).returncode:
        job.process.kill()
        pytest.skip(f"a folder cannot be made read-only for root here: {refused.stderr.strip()}")
    try:
        ended = trial.end(job, began, out)
    finally:
        subprocess.run(["chattr", "-i", str(out / "checkpoints")], check=True)
    assert ended.code in (1, 2), ended.said
    assert "saving a checkpoint: Operation not permitted" in ended.said, ended.said
    assert "3 times in a row" in ended.said and "the same command again" in ended.said
    again = trial.run(out, ranks, steps=trial.STEPS)
    assert again.code == 0, again.said
    trial.check_identical(out, trial.undisturbed(ranks))


def prompts(out: Path) -> list[list[str]]:
    """What was asked in each step, in any order: ranks write their own."""
    rows = [row for path in (out / "completions").glob("rank-*.jsonl") for row in read_lines(path)]
    return [sorted(r["prompt"] for r in rows if r["step"] == step) for step in range(trial.STEPS)]


def test_row_33_another_number_of_ranks(tmp_path: Path):
    """The same data in the same order; metrics as far as sums of other shards agree."""
    out, whole = tmp_path / "run", trial.undisturbed(1)
    assert trial.run(out, 1, fault=KILL).code == -9
    ended = trial.run(out, 2)
    assert ended.code == 0 and "continuing" in ended.said, ended.said
    assert prompts(out) == prompts(whole)
    for mine, other in zip(
        *(read_lines(path / "metrics.jsonl") for path in (out, whole)), strict=True
    ):
        for name, value in repeatable(other).items():
            if (
                name.startswith(("actor/", "critic/", "response_length/", "reward"))
                and value is not None
            ):
                assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-5), (mine["step"], name)


OTHERS = {
    "lr": ({"lr": 2e-6}, r"--lr: 1e-06 there, 2e-06 now"),
    "seed": ({"seed": 3}, r"--seed: 0 there, 3 now"),
    "batch": ({"prompts-per-step": 8}, r"--prompts-per-step: 4 there, 8 now"),
    "data": (
        {"prompt-key": "question"},
        r"--prompt-key: prompt there, question now|'prompt' there",
    ),
}


@BOTH
def test_row_33_another_run_is_refused(ranks: int, tmp_path: Path):
    """With every difference, at once, and nothing of the folder touched."""
    out = Path(shutil.copytree(trial.undisturbed(ranks), tmp_path / "run"))
    before = contents(out)
    for flags, says in OTHERS.values():
        ended = trial.run(out, ranks, **flags)
        assert ended.code == (2 if ranks == 1 else 1), ended.said
        assert len(re.findall(says, ended.said)) == 1, ended.said
        assert ended.seconds < 10 * ended.crowd
    assert before == contents(out)


def contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", ["data", "model"])
def test_row_33_the_same_names_with_other_contents(what: str, tmp_path: Path):
    """A row of the data, or the tokenizer, is not what it was: refused by name, until --run.allow says so."""
    given = {"data": "prompts", "model": "model"}
    source = Path(trial.files()[given[what]])
    mine = tmp_path / source.name
    shutil.copy(source, mine) if source.is_file() else shutil.copytree(source, mine)
    out, flags = tmp_path / "run", {what: mine}
    assert trial.run(out, 1, fault=KILL, **flags).code == -9
    file = mine if what == "data" else mine / "tokenizer_config.json"
    file.write_text(file.read_text().replace("1", "2", 1) + "\n")
    before = contents(out / "checkpoints")
    ended = trial.run(out, 1, **flags)
    assert ended.code == 2 and f"--{what}: {file}: other contents" in ended.said, ended.said
    assert f"--run.allow {what}" in ended.said and before == contents(out / "checkpoints")
    ended = trial.run(out, 1, **flags, **{"run.allow": what})
    assert ended.code == 0, ended.said


BROKEN = {
    "start": "raise RuntimeError('no network')",
    "run": """
import os, time
class Run:
    def log(self, *_, **__): os._exit(3)
    def finish(self): pass
class Api: api_key = None
def init(**_): return Run()
""",
    "end": """
import time
class Run:
    def log(self, *_, **__): pass
    def finish(self): time.sleep(600)
class Api: api_key = None
def init(**_): return Run()
""",
}


@BOTH
@pytest.mark.parametrize("when", BROKEN)
def test_row_34_a_tracker_that_fails(
    when: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before, while and after training: the records here are complete all the same."""
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / "wandb.py").write_text(BROKEN[when])
    out = tmp_path / "run"
    monkeypatch.setattr(trial, "PLUGIN", f"{trial.PLUGIN}{os.pathsep}{folder}")
    job, began = trial.begin(out, ranks, **{"run.track": "wandb"})
    ended = trial.end(job, began, out)
    assert ended.code == 0, ended.said
    assert len(re.findall("tracker wandb", ended.said)) == 1, ended.said
    trial.check_identical(out, trial.undisturbed(ranks))
    assert read_json(out / "status.json")["state"] == "finished"
