"""Learning-rate schedules: pure functions from the step to a factor, to multiply with a peak rate.

Steps count from 0 and warm-up from 1 / warmup, so that no step has rate 0: step warmup - 1 is the
first at full rate. Decays go from 1 at step `warmup` and would reach their floor at step `total`,
which is where they stay if the run goes on. (transformers starts warm-up at 0 instead.)
"""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def constant(step: int, *, warmup: int = 0) -> float:
    """1 after a linear warm-up of `warmup` steps."""
    return 1.0 if step >= warmup else (step + 1) / warmup


def linear(step: int, *, total: int, warmup: int = 0, floor: float = 0.0) -> float:
    """Linear decay from 1 to `floor` (a fraction of the peak) over the steps after warm-up."""
    if step < warmup:
        return constant(step, warmup=warmup)
    return floor + (1.0 - floor) * (1.0 - _progress(step, total, warmup))


def cosine(step: int, *, total: int, warmup: int = 0, floor: float = 0.0) -> float:
    """Half a cosine from 1 to `floor` over the steps after warm-up (Loshchilov and Hutter 2017)."""
    if step < warmup:
        return constant(step, warmup=warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, total, warmup)))


def factor(
    kind: Schedule,
    step: int,
    total: int,
    warmup: int = 0,
    floor: float = 0.0,
) -> float:
    """One of the schedules above by name, as a recipe's flag has it."""
    if kind == "constant":
        return constant(step, warmup=warmup)
    return (linear if kind == "linear" else cosine)(step, total=total, warmup=warmup, floor=floor)


def _progress(step: int, total: int, warmup: int) -> float:
    return min((step - warmup) / max(total - warmup, 1), 1.0)
