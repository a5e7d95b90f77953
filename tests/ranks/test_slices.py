"""Partial rollouts on real ranks: slices say what one piece would have said, wherever their rows live."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.ranks.jobs import Job
from tests.recipes.processes import PATHS
from tests.warm import WarmJob

pytestmark = pytest.mark.ranks
MOST, SPLITS = 24, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    texts = [f"q{i}" + "ab!x"[i % 4] * (i % 9) for i in range(2, 20, 2)]
    lines = [json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return folder


@functools.cache
def results(folder: Path, ranks: int, kind: str = "transformers", parallel: int = 1) -> Any:
    shape = {}
    if kind == "vllm":  # its attention on CPU has kernels for heads of 32 and up
        shape = {"hidden_size": 128, "intermediate_size": 96, "vocab_size": 128, "head_dim": 32}
    typed = [
        str(Path(__file__).with_name("slices.py")), "--model", str(tiny.checkpoint("qwen3", **shape)),
        "--data", str(folder / "prompts.jsonl"), "--out", str(folder), "--kind", kind,
        "--splits", str(SPLITS), "--most", str(MOST), "--tensor-parallel", str(parallel),
    ]  # fmt: skip
    cold = kind == "vllm"
    job = Job(typed, ranks=ranks, PYTHONPATH=PATHS) if cold else WarmJob(typed, ranks=ranks)
    end = job.end(timeout_s=280 if cold else 120)
    assert end.code == 0, end.err[-3000:]
    return json.loads((folder / f"{kind}-{ranks}.json").read_text())


def check(found: Any) -> None:
    """Greedy answers are the same; all are complete after as many slices as their tokens need."""
    greedy = found["0.0"]
    for whole, sliced in zip(greedy["whole"], greedy["sliced"], strict=True):
        assert sliced == whole | {
            "slices": sliced["slices"],
            "logp": pytest.approx(whole["logp"], abs=1e-3),
        }
    needed = set()
    for part in found.values():
        lengths = [row["length"] for row in part["sliced"]]
        ends = [k * MOST // SPLITS for k in range(1, SPLITS)]
        wanted = [1 + sum(end < length for end in ends) for length in lengths]
        assert [row["slices"] for row in part["sliced"]] == wanted
        assert max(lengths) == MOST and any(row["truncated"] for row in part["sliced"])
        needed |= set(wanted)
        assert part["counted"]["tokens"] == sum(row["tokens"] for row in part["sliced"])
    assert {1, 3} <= needed


def test_slices_are_what_one_piece_would_have_been(folder: Path):
    check(results(folder, 2))


def test_samples_do_not_depend_on_the_number_of_ranks(folder: Path):
    one, two = results(folder, 1), results(folder, 2)
    for temperature in one:
        for alone, apart in zip(
            one[temperature]["sliced"], two[temperature]["sliced"], strict=True
        ):
            assert apart == alone | {"logp": pytest.approx(alone["logp"], abs=1e-4)}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", [1, 2])
def test_slices_are_what_one_piece_would_have_been_with_vllm(folder: Path, parallel: int):
    """parallel: one engine a rank, or one engine of two ranks."""
    check(results(folder, 2, "vllm", parallel))
