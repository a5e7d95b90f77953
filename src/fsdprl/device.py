"""CPU, CUDA or NPU behind torch.accelerator: the only file that names a vendor."""

import functools
import os
import resource
import sys
from pathlib import Path

import torch

COLLECTIVES = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
"""Accelerator -> the torch.distributed backend of its tensors."""


@functools.cache
def device_type() -> str:
    """ "cuda", "npu", ... if this process sees an accelerator, else "cpu".

    Cached: an engine in the same process may patch torch.accelerator (vLLM on CPU does).
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def local_device(local_rank: int) -> torch.device:
    """The device of this rank, made current. Several ranks share one if there are too few."""
    if device_type() == "cpu":
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(device_type(), index)


def dist_backend() -> str:
    """Backend string for init_process_group: gloo for CPU tensors, the vendor's beside it."""
    kind = device_type()
    # Not "cpu:gloo": torch 2.13 then finds no default backend and warns when the group is destroyed.
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{COLLECTIVES[kind]}"


def set_threads(local_size: int) -> None:
    """Share the cores this process may use among the local ranks.

    torchrun sets OMP_NUM_THREADS to 1 where the user did not, so that 1 under several ranks says
    nothing; any other value is the user's and is left alone. So is a number that already fits:
    set_num_threads also takes from MKL the choice of fewer threads for small matrices, which made
    steps of a 0.2 M parameter model 40 % longer.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked and not (asked == "1" and local_size > 1):
        return
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    wanted = max(1, cores // local_size)
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


def synchronize() -> None:
    """Wait until the device has done everything queued."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Give cached device memory back, so that an engine in the same process can take it."""
    if device_type() != "cpu":
        _vendor().empty_cache()


def peak_memory_bytes() -> int:
    """Most bytes held since reset_peak_memory: device allocations, or resident memory on CPU."""
    if device_type() != "cpu":
        return int(_vendor().max_memory_allocated())
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or on the host."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def reset_peak_memory() -> None:
    """Start a new peak. On a CPU whose kernel forbids it, the peak stays that of the process."""
    if device_type() != "cpu":
        _vendor().reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def can_ignore_batch() -> bool:
    """Whether vLLM has kernels there whose result does not depend on the rest of the batch (VLLM_BATCH_INVARIANT)."""
    kind = device_type()
    return kind == "xpu" or (kind == "cuda" and _vendor().get_device_capability() >= (8, 0))


def has_fused_adamw(device: torch.device) -> bool:
    """Whether torch's one-pass AdamW runs there: on CPU four times faster than tensor by tensor."""
    return device.type in ("cpu", "cuda")


def total_memory_bytes() -> int:
    """Bytes of memory of this rank's accelerator."""
    return int(_vendor().mem_get_info()[1])


def _vendor():
    """torch.cuda, torch.npu, ...: memory statistics are not yet on torch.accelerator in 2.11."""
    return getattr(torch, device_type())
