"""--run.deterministic: the same numbers to the bit from the same command, on the same number of ranks and machine.

What is sampled, shuffled and fed is a pure function of (seed, step) in any mode. What is left is arithmetic: kernels
that add in the order in which threads come, libraries that choose by free memory or cores, and an engine whose
result depends on what else is in its batch. No torch until `apply`: some of it must stand before torch is loaded.
"""

import os

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else cuBLAS may split a product as memory allows
    "OMP_DYNAMIC": "FALSE",
    "MKL_DYNAMIC": "FALSE",
}
"""Read by the libraries when they are loaded."""
COST = (
    "--run.deterministic: the same numbers to the bit, for 1.09 times the processor time of a step (the quickstart's "
    "on a CPU: BENCHMARKS.md; scripts/bench_step.py --deterministic measures it here)"
)
"""What a run with the flag says when it begins."""


def prepare() -> None:
    """Set the environment of this rank. Before torch is imported; a value of the user's own stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def apply() -> None:
    """Have torch take deterministic kernels, and raise where it has none; on accelerators that can, have vLLM compute
    each answer alike whatever its batch. Before an engine is built."""
    import torch

    from fsdprl.device import can_ignore_batch

    torch.use_deterministic_algorithms(True)
    # Else every new tensor is filled, which costs time: nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if can_ignore_batch():
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
