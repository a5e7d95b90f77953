"""Signature test: a loss, its gradient and the step it makes do not depend on ranks, microbatches or placement."""

import functools
import json
import random
from pathlib import Path

import pytest

from tests import tiny
from tests.every_loss import library_losses
from tests.warm import WarmJob

pytestmark = pytest.mark.ranks


@functools.cache
def results(folder: Path, kind: str, ranks: int, dtype: str) -> dict[str, dict[str, float]]:
    folder.mkdir(parents=True, exist_ok=True)
    data, draw = folder / "rows.jsonl", random.Random(0)
    rows = [
        {
            "prompt": "p" * draw.randint(1, 9),
            "completion": "abcdefgh"[: draw.randint(1, 8)] * draw.randint(1, 5),
        }
        for _ in range(10)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        str(Path(__file__).with_name("invariance.py")),
        "--model",
        str(tiny.checkpoint(kind)),
        "--data",
        str(data),
        "--out",
        str(folder),
    ]
    budgets = {1: ("4096", "40"), 2: ("40",)}.get(ranks, ("4096",))
    end = WarmJob([*words, "--dtype", dtype, "--budgets", *budgets], ranks=ranks).end(timeout_s=170)
    assert end.code == 0, end.err
    return json.loads((folder / f"{ranks}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("invariance")


def compare(one: dict, other: dict, tolerance: float) -> None:
    assert other.keys() <= one.keys() and len(other) > 45
    for case in other:
        for name, value in one[case].items():
            assert other[case][name] == pytest.approx(value, rel=tolerance, abs=tolerance), (
                case,
                name,
            )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_float64(folder: Path, ranks: int):
    alone = results(folder / "64", "qwen2_tied", 1, "float64")
    compare(alone, results(folder / "64", "qwen2_tied", ranks, "float64"), 1e-10)


def test_microbatches(folder: Path):
    alone = results(folder / "64", "qwen2_tied", 1, "float64")
    big = {name: case for name, case in alone.items() if name.endswith("budget 4096")}
    small = {
        name.replace("budget 40", "budget 4096"): case
        for name, case in alone.items()
        if name.endswith("budget 40")
    }
    compare(big, small, 1e-10)


def test_losses_move_the_model_and_differ(folder: Path):
    """The comparison would hold for a model that never moves: it does move, by each loss differently."""
    alone = results(folder / "64", "qwen2_tied", 1, "float64")
    moved = {name: case["row 4"] for name, case in alone.items() if "4096" in name}
    assert alone["none_left budget 4096"]["actor/grad_norm"] == 0.0
    rest = [value for name, value in moved.items() if not name.startswith("none_left")]
    assert len(set(rest)) >= len(rest) - 1  # kl_abs and a sign may coincide; nothing else does
    assert all(
        case[name] > 0
        for case_name, case in alone.items()
        if "none_left" not in case_name
        for name in case
        if name.endswith("grad_norm")
    )


def test_no_loss_is_missing(folder: Path):
    ran = results(folder / "64", "qwen2_tied", 1, "float64")["losses"].keys()
    ran |= results(folder / "32", "qwen3_moe", 1, "float32")["losses"].keys()
    assert ran >= library_losses().keys()


def test_advantages_are_whitened_over_the_whole_batch(folder: Path):
    alone = results(folder / "64", "qwen2_tied", 1, "float64")
    white, raw = alone["gae_white"], alone["gae_advantage"]
    assert white["mean"] == pytest.approx(0, abs=1e-12) and white["var"] == pytest.approx(1)
    assert abs(raw["mean"]) > 0.01 and abs(raw["var"] - 1) > 0.01


def test_float32_on_two_ranks(folder: Path):
    """A mixture of experts, whose routers are balanced row by row."""
    alone = results(folder / "32", "qwen3_moe", 1, "float32")
    compare(alone, results(folder / "32", "qwen3_moe", 2, "float32"), 1e-5)
