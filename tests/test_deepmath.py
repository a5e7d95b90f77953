"""Gold answers of DeepMath and mutations of them, graded in reward processes and here."""

import importlib.util
from pathlib import Path

import pytest
from datafiles import given

from fsdprl.functions import function_ref
from fsdprl.grading import Grader
from fsdprl.options import RewardOptions
from fsdprl.rewards import math_accuracy

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench_grading.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_grading", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(bench, rows: int) -> None:
    pytest.importorskip("math_verify", reason="needs the extra fsdprl[math]")
    samples = bench.answers(f"{given('deepmath_sample.jsonl')}#{rows}")
    assert len(samples) == rows * len(bench.FORMS)
    with Grader(RewardOptions(), debug=True) as grader:
        here = grader.grade(function_ref(math_accuracy), samples).scores
    for workers in (1, 2):
        scores, failures, _, memory = bench.graded(samples, workers)
        assert scores == here and failures == 0
        assert max(memory[1]) < max(memory[0]) + 64  # MB: nothing piles up
    right = {name: [s for s, x in zip(here, samples, strict=True) if x.meta["form"] == name and s is not None]
             for name in bench.FORMS}  # fmt: skip
    for name in ("boxed", "sentence", "marked"):
        assert sum(right[name]) >= 0.97 * len(right[name]), name
    for name in ("another", "one more"):
        assert sum(right[name]) <= 0.35 * len(right[name]), name


def test_some_of_them(bench):
    check(bench, 20)


@pytest.mark.slow
def test_all_of_them(bench):
    check(bench, 4994)
