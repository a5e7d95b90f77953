"""Every row of the fault matrix: how the job ends, how soon, what it says, what it leaves, and what comes after.

The quick ones always run; `pytest -m faults`, or `just faults`, runs all at one and two processes.
"""

import re
from pathlib import Path

import pytest

from fsdprl.records import read_lines
from tests.faults import trial
from tests.faults.damage import executed
from tests.faults.table import TABLE, Row

TRIALS = [
    pytest.param(
        row,
        ranks,
        id=f"{row.id}-{ranks}",
        marks=[
            pytest.mark.ranks,
            pytest.mark.timeout(300),
            *(getattr(pytest.mark, mark) for mark in row.marks),
            *([] if row.quick and ranks == row.ranks[0] else [pytest.mark.faults]),
        ],
    )
    for row in TABLE
    for ranks in row.ranks
]


@pytest.mark.parametrize(("row", "ranks"), TRIALS)
def test_row(row: Row, ranks: int, tmp_path: Path):
    out = tmp_path / "run"
    whole = trial.undisturbed(ranks, **row.base) if row.resumes else None
    made = row.make(tmp_path) if row.make else {}
    last = {"last": ranks - 1}
    command = {"recipe": row.recipe, **row.base, **row.flags, **made}
    ended = trial.run(out, ranks, fault=row.fault.format(**last), **command)
    check_end(row, ended, ranks)
    if whole is None:
        return
    if row.spoil:
        row.spoil(out)
    again = trial.calm(out, ranks, **command)
    assert again.code == 0, again.err
    assert re.search(row.again, again.out + again.err), again.out + again.err
    assert not executed(out).exists()
    trial.check_identical(out, whole)


def check_end(row: Row, ended: trial.Ended, ranks: int) -> None:
    """Exit code, message, seconds, and the status for whoever comes later. Leftovers: see trial.end."""
    code = (
        1 if ranks > 1 and row.ends not in (0, 1) else row.ends
    )  # torchrun has but one of its own
    assert ended.code == code, ended.said
    assert re.search(row.says.replace("{last}", str(ranks - 1)), ended.said), ended.said
    if row.once:
        assert len(re.findall(row.once, ended.said)) == 1, ended.said
    bound = row.within_s * ended.crowd
    assert ended.seconds <= bound, f"{ended.seconds:.1f} s, not within {bound:.1f} s\n{ended.said}"
    for name, value in row.status.items():
        assert ended.status.get(name) == value, (name, ended.status)
    if row.ends == 1 and ended.status and "state" not in row.status:
        assert ended.status["state"] == "failed" and ended.status["cause"], ended.status
    metrics = read_lines(ended.folder / "metrics.jsonl")
    if row.ends == 0:
        assert len(metrics) == trial.STEPS
        assert all(
            step["actor/loss"] == step["actor/loss"] for step in metrics if "actor/loss" in step
        )
    if row.counted:
        assert any(step.get(row.counted, 0) > 0 for step in metrics), metrics
