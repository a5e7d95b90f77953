"""Gold answers of DeepMath and mutations of them, graded in reward processes and here."""

import importlib.util
from pathlib import Path

import pytest
from datafiles import given

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench_grading.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_grading", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(bench, samples: list) -> None:
    """Two numbers of reward processes and this one agree on everything that comes to an end."""
    pytest.importorskip("math_verify", reason="needs the extra fsdprl[math]")
    graded, lost = {}, set()
    for workers in (1, 2):
        graded[workers], overdue, _, memory = bench.graded(samples, workers)
        lost.update(overdue)
        assert max(memory[1]) < max(memory[0]) + 64  # MB: nothing piles up
    names = [(samples[i].response, samples[i].answer) for i in sorted(lost)]
    assert len(lost) <= len(samples) // 1000, names  # on which math-verify does not end by itself
    here = bench.graded_here(samples, lost)
    for scores in graded.values():
        assert len(scores) == len(samples)
        assert [s for i, s in enumerate(scores) if i not in lost] == [
            s for i, s in enumerate(here) if i not in lost
        ]
    right = {name: [s for s, x in zip(here, samples, strict=True) if x.meta["form"] == name and s is not None]
             for name in bench.FORMS}  # fmt: skip
    for name in ("boxed", "sentence", "marked"):
        assert sum(right[name]) >= 0.97 * len(right[name]), name
    for name in ("another", "one more"):
        assert sum(right[name]) <= 0.35 * len(right[name]), name


def test_some_of_them(bench):
    samples = bench.answers(f"{given('deepmath_sample.jsonl')}#20")
    assert len(samples) == 20 * len(bench.FORMS)
    check(bench, samples)


PARTS = 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_of_them(bench, part: int):
    samples = bench.answers(str(given("deepmath_sample.jsonl")))
    assert len(samples) == 4994 * len(bench.FORMS)
    rows = [row for row in range(4994) if row % PARTS == part]
    forms = len(bench.FORMS)
    check(bench, [samples[row * forms + form] for row in rows for form in range(forms)])
