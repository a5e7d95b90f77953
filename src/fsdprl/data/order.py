"""The order of a dataset: a pure function of (seed, cursor), the same on every machine."""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_EPOCH, _SPLIT = 0, 1


@functools.lru_cache(maxsize=8)
def permutation(count: int, seed: int, epoch: int) -> Indices:
    """A random order of range(count), drawn from (seed, epoch). Read-only.

    Rows are sorted by the SplitMix64 hash of (seed, epoch, row): unlike a library's generator it
    cannot change under a run that is resumed years later.
    """
    order = _shuffled(count, seed, epoch, _EPOCH)
    order.flags.writeable = False
    return order


def window(count: int, seed: int, cursor: int, size: int) -> Indices:
    """Positions [size] that an endless, epoch by epoch reshuffled pass visits from `cursor` on.

    cursor: how many were visited before. size may exceed `count`.
    """
    if count <= 0 or cursor < 0 or size < 0:
        raise ValueError(f"window of {size} at {cursor} over {count} rows")
    parts = []
    while size > 0:
        epoch, start = divmod(cursor, count)
        part = permutation(count, seed, epoch)[start : start + size]
        parts.append(part)
        cursor, size = cursor + len(part), size - len(part)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def split(rows: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Rows to train on and rows held out, each in their given order; a pure function of seed.

    share: of the rows to hold out, rounded, but at least one; 0 holds out none. Raises ValueError if
    it does not lie between 0 and 1 or leaves nothing to train on.
    """
    if share == 0:
        return rows, rows[:0]
    if not 0.0 < share < 1.0:
        raise ValueError(f"the held-out share is {share}, it must lie between 0 and 1")
    held = max(1, round(share * len(rows)))
    if held >= len(rows):
        raise ValueError(f"holding out {held} of {len(rows)} rows leaves none to train on")
    out = np.zeros(len(rows), dtype=bool)
    out[_shuffled(len(rows), seed, 0, _SPLIT)[:held]] = True
    return rows[~out], rows[out]


def _shuffled(count: int, *key: int) -> Indices:
    mixed = _mix(np.arange(count, dtype=np.uint64) ^ _hash(key))
    return np.argsort(mixed, kind="stable").astype(np.int64)


def _hash(key: Sequence[int]) -> np.uint64:
    state = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = _mix(state + np.uint64(part % 2**64))
    return state[0]


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's step and finaliser (Steele, Lea and Flood 2014); wraps modulo 2^64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
