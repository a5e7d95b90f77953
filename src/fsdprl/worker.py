"""One rank: what it holds between verbs, and the verbs of its own life."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdprl import determinism, device, liveness, mesh
from fsdprl.liveness import Pulse
from fsdprl.store import Store
from fsdprl.world import World


@dataclass
class Worker:
    """One rank's state. `state` is for what modules of verbs keep between calls."""

    world: World = field(default_factory=World)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Store = field(default_factory=Store)
    models: dict[str, Any] = field(default_factory=dict)
    engine: Any = None
    grader: Any = None
    seed: int = 0
    debug: bool = False
    state: dict[str, Any] = field(default_factory=dict)
    rendezvous: Any = None
    """torchrun's store, or a private one."""
    pulse: Pulse = field(default_factory=Pulse)

    def progress(self) -> None:
        """The phase moves: call it per microbatch, decode step or sample."""
        self.pulse.ticks += 1


def start(worker: Worker, *, deterministic: bool = False) -> dict[str, Any]:
    """Take the device and join the process group of all ranks. deterministic: --run.deterministic."""
    device.set_threads(worker.world.local_size)
    worker.device = device.local_device(worker.world.local_rank)
    if deterministic:
        determinism.apply()
    mesh.init_distributed(worker.world, worker.rendezvous)
    return {
        "device": worker.device.type,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def ping(worker: Worker, **payload: Any) -> dict[str, Any]:
    """Send the payload back."""
    return payload


def stacks(worker: Worker) -> str:
    """Python stacks of this rank's other threads."""
    return liveness.stacks(None)["text"]


def memory(worker: Worker) -> dict[str, int]:
    """Most bytes held so far on the device (resident memory on CPU)."""
    return {"peak_bytes": device.peak_memory_bytes()}


def shutdown(worker: Worker) -> None:
    """Give everything back. Only when all is well: after a failure peers may sit in a collective."""
    if worker.grader is not None:
        worker.grader.close()
    if profiler := worker.state.pop("profiler", None):
        profiler.__exit__(None, None, None)  # a process that exits within a trace dies of SIGSEGV
    worker.models.clear()
    worker.state.clear()
    worker.engine = worker.grader = None
    gc.collect()  # objects that hold groups must go first: else about 1 run in 8 aborts at exit
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


VERBS: dict[str, Callable[..., Any]] = {
    "start": start,
    "ping": ping,
    "stacks": stacks,
    "memory": memory,
    "shutdown": shutdown,
}
