"""Reward functions that misbehave on chosen samples (`meta["do"]`), for test_grading.py."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time

from fsdprl.errors import UnscoredError
from fsdprl.sample import Sample


def act(sample: Sample):
    """The sample's number, or the mischief that its row asks for."""
    do = sample.meta.get("do", "")
    if do == "sleep":
        time.sleep(600)
    elif do == "spin":  # holds the GIL inside one C call
        sum(range(10**15))
    elif do == "segfault":
        ctypes.string_at(0)
    elif do == "exit":
        os._exit(7)
    elif do == "sys.exit":
        sys.exit(3)
    elif do == "oom":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "raise":
        raise KeyError("no such thing")
    elif do == "child":  # leaves a grandchild behind, then hangs
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    return {"nan": float("nan"), "inf": float("inf"), "str": "1.0", "list": [1.0]}.get(
        do, None if do == "none" else float(sample.response)
    )


def process_id(sample: Sample) -> float:
    return float(os.getpid())


def environment(sample: Sample) -> float:
    hidden = os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["OMP_NUM_THREADS"] == "1"
    return float(hidden and "torch" not in sys.modules and sys.stdin.read() == "")


def scaled(sample: Sample, *, scale: float) -> float:
    return scale * float(sample.response)


def trl_style(prompts, completions, bonus, **kwargs):
    assert len(prompts) == len(completions) == len(bonus) == len(kwargs["answer"])
    if "hang" in completions:
        time.sleep(600)
    return [float(text) + extra for text, extra in zip(completions, bonus, strict=True)]


def trl_chat(completions, solution):
    return [
        float(turn[0]["content"] == gold) for turn, gold in zip(completions, solution, strict=True)
    ]


def trl_short(prompts, completions):
    return [1.0] * (len(prompts) - 1)


def trl_number(completions):
    return 1.0


async def waits(sample: Sample) -> float:
    await asyncio.sleep(600 if sample.meta.get("do") == "sleep" else 0.3)
    return float(sample.response)


async def blocks(sample: Sample) -> float:
    if sample.meta.get("do") == "sleep":
        time.sleep(600)  # stops the whole event loop
    return float(sample.response)


async def trl_async(completions, **kwargs):
    await asyncio.sleep(600 if "7" in completions else 0.0)
    return [float(text) for text in completions]


async def own_timeout(sample: Sample) -> float:
    raise TimeoutError("the judge did not answer")


_warm_ups: list[int] = []


def warmed(sample: Sample) -> float:
    """How often `warm_up` ran here or, before the fork, in the server."""
    return float(len(_warm_ups))


warmed.warm_up = lambda: _warm_ups.append(os.getpid())


def whole_group(group: list[Sample]) -> list[float]:
    return [act(sample) * len(group) for sample in group]


def no_verdict(sample: Sample) -> float:
    if sample.response == "3":
        raise UnscoredError("the judge is down")
    return 1.0


async def no_verdict_async(sample: Sample) -> float:
    return no_verdict(sample)
