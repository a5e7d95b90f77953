"""--run.deterministic: what it sets on a rank, and that a run goes on with as many threads as it began with."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from run_job import Job, isolated, killed_at

from fsdprl import determinism, device
from fsdprl.errors import UserError
from fsdprl.records import read_json


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*determinism.ENVIRONMENT, "VLLM_BATCH_INVARIANT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with isolated(monkeypatch):
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_the_environment_is_set_but_for_what_the_user_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    determinism.prepare()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["OMP_DYNAMIC"] == os.environ["MKL_DYNAMIC"] == "FALSE"


@pytest.mark.parametrize("able", [False, True])
def test_torch_takes_deterministic_kernels_and_vllm_where_it_has_them(
    monkeypatch: pytest.MonkeyPatch, able: bool
):
    monkeypatch.setattr(device, "can_ignore_batch", lambda: able)
    determinism.apply()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # flash attention would go on
    assert os.environ.get("VLLM_BATCH_INVARIANT") == ("1" if able else None)


@pytest.mark.parametrize(
    ("kind", "capability", "able"),
    [("cpu", (0, 0), False), ("cuda", (7, 5), False), ("cuda", (8, 0), True), ("cuda", (9, 0), True),
     ("npu", (0, 0), False), ("xpu", (0, 0), True)],
)  # fmt: skip
def test_where_vllm_has_them(monkeypatch: pytest.MonkeyPatch, kind, capability, able):
    vendor = type("Vendor", (), {"get_device_capability": staticmethod(lambda: capability)})
    monkeypatch.setattr(device, "device_type", lambda: kind)
    monkeypatch.setattr(device, "_vendor", lambda: vendor)
    assert device.can_ignore_batch() is able


def test_a_run_says_what_it_costs(tmp_path: Path):
    """As measured: the figure is that of BENCHMARKS.md."""
    job = Job(tmp_path / "dear", deterministic=True).open()
    assert determinism.COST in " ".join(job.said.getvalue().split())
    job.abandon()
    job = Job(tmp_path / "plain").open()
    assert "--run.deterministic" not in job.said.getvalue()
    job.abandon()
    (figure,) = re.findall(r"for ([\d.]+) times", determinism.COST)
    benchmarks = (Path(__file__).parents[1] / "BENCHMARKS.md").read_text()
    (paragraph,) = (p for p in benchmarks.split("\n\n") if p.startswith("`--run.deterministic`"))
    assert figure in re.findall(r"\d+\.\d+", paragraph)


def test_a_deterministic_run_goes_on_with_as_many_threads(tmp_path: Path):
    out = tmp_path / "run"
    job = Job(out).open()
    job.controller.facts["threads"] = 4
    job.train(3)
    assert read_json(out / "config.json")["threads"] == 4
    again = Job(out, config={**job.controller.config, "steps": 8}).open()
    again.controller.facts["threads"] = 2
    with pytest.raises(
        UserError, match=r"begun with threads 4.* now go on with 2: give OMP_NUM_THREADS=4"
    ):
        again.train(8)
    again.abandon()


def test_another_number_of_ranks_is_said(tmp_path: Path):
    out = tmp_path / "run"
    killed_at(out, 3)
    job = Job(out)
    job.controller.world_size = 3
    job.open()
    assert "2 ranks before, 3 from here on: the same data" in job.said.getvalue()
    job.abandon()
