"""Rewards that go wrong on one sample of a step, or on all: tests.faults.rewards:FUNCTION."""

import ctypes
import os
import re
import signal
import time
from typing import Any

from fsdprl.sample import Sample
from tests.recipes.grades import digits


def raises(sample: Sample) -> float:
    raise KeyError("no such column as gold")


def sleeps(sample: Sample) -> float:
    if mark("sleeps"):
        time.sleep(600)
    return digits(sample)


def spins(sample: Sample) -> float:
    if mark("spins"):
        sum(range(10**15))
    return digits(sample)


def backtracks(sample: Sample) -> float:
    if mark("backtracks"):
        re.match(r"(a+)+$", "a" * 40 + "b")
    return digits(sample)


def always_sleeps(sample: Sample) -> float:
    time.sleep(600)
    return 0.0


def segfaults(sample: Sample) -> float:
    if mark("segfaults"):
        ctypes.string_at(0)
    return digits(sample)


def is_killed(sample: Sample) -> float:
    if mark("is_killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return digits(sample)


def mark(name: str) -> bool:
    """Whether nobody of this job has been here."""
    try:
        open(os.path.join(os.environ["FSDPRL_FAULT_ONCE"], name), "x").close()
    except FileExistsError:
        return False
    return True


def nan(sample: Sample) -> float:
    return float("nan")


def inf(sample: Sample) -> float:
    return float("inf")


def text(sample: Sample) -> Any:
    return "1.0"


def too_few(prompts: Any, completions: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def keyed(sample: Sample, url: str, api_key: str) -> float:
    """As a judge that takes its key as an argument."""
    return digits(sample)


def reveals(sample: Sample, url: str, api_key: str) -> float:
    raise ValueError(f"cannot log in with {os.environ['HF_TOKEN']}")
