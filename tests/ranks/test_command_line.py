"""Under torchrun: what rank 0 says is said once, and every rank ends with the same code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

RECIPE = '''
"""A recipe that never starts."""
from dataclasses import dataclass, field
import fsdprl as rl

@dataclass
class Config:
    steps: int = 1
    """Steps."""
    model: str = ""
    """Checkpoint."""
    data: str = ""
    """Rows."""
    run: rl.RunOptions = field(default_factory=rl.RunOptions)

def main(cfg):
    raise AssertionError("main ran")

if __name__ == "__main__":
    import sys
    try:
        rl.launch(main, Config)
    finally:
        assert "torch" not in sys.modules, "torch was imported"
'''


def finished_run(folder: Path) -> None:
    """A run folder as one leaves it that is done."""
    folder.mkdir()
    run = {"out": str(folder), "save_every": 100, "keep": 0}
    facts = {"config": {"steps": 1, "model": "", "data": "", "run": run}}
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (folder / "status.json").write_text('{"state": "finished"}')


@pytest.mark.parametrize(
    ("words", "failed", "said"),
    [
        ("--run.sav-every 1", True, "--run.sav-every: no such option; did you mean --run.save-every?"),
        ("--run.out {out} --run.resume never", True, "--run.resume is never"),
        ("--data {out}/metric.jsonl --run.out {out}-2", True, "no such file; did you mean {out}/metrics.jsonl?"),
        ("--model {out}/nowhere --run.out {out}-2", True, "--model {out}/nowhere: no such folder"),
        ("--help", False, "A recipe that never starts."),
        ("--run.out {out}", False, "this run is finished"),
    ],
)  # fmt: skip
def test_said_once(tmp_path: Path, words: str, failed: bool, said: str):
    recipe, out = tmp_path / "recipe.py", tmp_path / "out"
    recipe.write_text(RECIPE)
    finished_run(out)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, str(recipe), *words.format(out=out).split()],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    told = done.stdout + done.stderr
    assert (done.returncode != 0) is failed, told
    assert told.count(said.format(out=out)) == 1, told
    assert "main ran" not in told
    assert "torch was imported" not in told
    assert ("exitcode  : 2" in told) is failed
