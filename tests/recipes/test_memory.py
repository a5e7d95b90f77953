"""A run that gives memory back between its phases computes what it computes without."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.processes import run, series, task
from tests.run_job import without_times

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
EVERYTHING = {
    "engine.sleep-level": 2, "sharding.offload-model": "True", "sharding.offload-optimizer": "True",
    "sharding.gc-after-offload": "True",
}  # fmt: skip


def test_sleep_and_offload_change_no_number(tmp_path: Path):
    files = task(tmp_path)
    numbers: list[Any] = []
    for name, flags in (("plain", {}), ("spare", EVERYTHING)):
        metrics = run("grpo", files, tmp_path / name, ranks=2, steps=3, kl_coef=0.1, **flags)
        peaks = [series(metrics, f"memory/{phase}_peak_gb") for phase in ("rollout", "train")]
        assert all(len(peak) == 3 and min(peak) > 0 for peak in peaks)
        assert len(series(metrics, "timing/resharding_to_train")) == 3
        kept = without_times(tmp_path / name)
        numbers.append([{k: v for k, v in row.items() if "wire" not in k} for row in kept])
    assert numbers[0] == numbers[1]
