"""Worker verbs over memory: what leaves the device while the engine samples, and the engine's sleep."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from fsdprl import device
from fsdprl.parallel import reshard
from fsdprl.worker import Worker

HOST = torch.device("cpu")


def move(
    worker: Worker,
    *,
    off: dict[str, list[str]],
    onto: dict[str, list[str]],
    collect: bool,
    release: bool,
) -> dict[str, int]:
    """Move parts ("weights", "optimizer") of models to host memory and back. On CPU nothing moves.

    collect: run the garbage collector when they have left. release: give cached device memory back,
    which the engine cannot take otherwise. Returns the most bytes held since the last call.
    """
    peak = device.peak_memory_bytes()
    for name, parts in off.items():
        _place(worker, name, parts, HOST)
    if collect:
        gc.collect()
    if release:
        device.empty_cache()
    for name, parts in onto.items():
        _place(worker, name, parts, worker.device)
    device.reset_peak_memory()
    return {"peak_bytes": peak}


def _place(worker: Worker, name: str, parts: list[str], target: torch.device) -> None:
    model = worker.models[name]
    if "weights" in parts:
        reshard(model.network)  # gathered weights would stay behind
        model.network.to(target)
    if "optimizer" in parts:
        model.optimizer.to(target)
    worker.progress()


def sleep(worker: Worker, *, level: int) -> None:
    """The engine gives memory back; see `Engine.sleep`."""
    worker.engine.sleep(level)
    device.empty_cache()


def wake(worker: Worker, *, tags: list[str]) -> None:
    """The engine takes memory again; see `Engine.wake`."""
    worker.engine.wake(tags)


VERBS: dict[str, Callable[..., Any]] = {
    "memory.move": move,
    "engine.sleep": sleep,
    "engine.wake": wake,
}
