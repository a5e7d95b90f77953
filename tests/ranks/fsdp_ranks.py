"""Run by test_fsdp.py on four ranks: gradients and optimizer steps on real shards.

fsdp_ranks.py OUT_DIR RANKS:CASE:CHECKPOINT ...; each case runs on the first RANKS ranks, and rank 0
writes OUT_DIR/<case>-<ranks>.safetensors. The test itself calls `run` for a single rank.
"""

import functools
import gc
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from solo import CPU, rows
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdprl.mesh import cpu_group, init_distributed, shard_mesh
from fsdprl.models import PackedModel, load_model, pack
from fsdprl.optim import NonFiniteError, Optimizer
from fsdprl.options import ShardingOptions
from fsdprl.parallel import fsdp_modules
from fsdprl.world import World

LENGTHS = (30, 5, 17, 2, 61, 16, 17, 9)
ROWS_PER_MICROBATCH = 2

CASES = {
    "plain": ({}, "float64", "policy"),
    "recomputed": ({"activation_checkpointing": True}, "float64", "policy"),
    "value": ({"reshard_after_forward": False}, "float64", "value"),
    "single": ({}, "float32", "policy"),
    "half": ({}, "bfloat16", "policy"),
    "replicas": ({"replicate": 2}, "float64", "policy"),
    "small": ({"min_num_params": 10**6}, "float64", "policy"),
}


def share(rank: int, ranks: int) -> list[int]:
    """Rows of a rank, uneven on purpose; of three or more ranks the last has none at all."""
    owners = min(ranks, 2) if ranks > 2 else ranks
    return [row for row in range(len(LENGTHS)) if (row * row // 3) % owners == rank]


def microbatches(rank: int, ranks: int) -> list[list[int]]:
    """As many for every rank, so that some are empty."""
    count = max(-(-len(share(r, ranks)) // ROWS_PER_MICROBATCH) for r in range(ranks))
    mine = share(rank, ranks)
    return [mine[i * ROWS_PER_MICROBATCH :][:ROWS_PER_MICROBATCH] for i in range(count)]


def backward(model: PackedModel, world: World, scale: float = 1.0) -> Tensor:
    """Accumulate the gradient of the weighted loss of all rows; returns its global value."""
    total = torch.zeros((), dtype=torch.float64)
    every = rows(*LENGTHS, temperature=0.8)
    for positions in microbatches(world.rank, world.size):
        batch = pack([every[i] for i in positions], CPU)
        result, others = model(batch, also=("entropy",) if model.kind == "policy" else ())
        weights = [0.1 * (i + 1) for i in positions for _ in range(int(every[i][1].sum()))]
        per_token = result + 0.2 * others["entropy"] if others else result.square()
        loss = (per_token * torch.tensor(weights, dtype=result.dtype)).sum() * scale
        loss.backward()
        total += loss.detach().double()
    dist.all_reduce(total, group=cpu_group(range(world.size)))
    return total


def whole(tensor: Tensor) -> Tensor:
    made = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return made.detach().clone()


@functools.cache
def mesh_of_first(ranks: int, replicate: int) -> DeviceMesh:
    """Every rank makes every mesh, whether or not it belongs to it."""
    if ranks == dist.get_world_size():
        return shard_mesh("cpu", ranks, replicate)
    grid = torch.arange(ranks).view(replicate, -1) if replicate > 1 else torch.arange(ranks)
    names = ("replicate", "shard") if replicate > 1 else ("shard",)
    return DeviceMesh("cpu", grid, mesh_dim_names=names)


def run(case: str, path: Path, world: World) -> dict[str, Tensor]:
    """Everything a case computes on ranks 0 to world.size - 1, whole, by name."""
    options, dtype, kind = CASES[case]
    sharding = ShardingOptions(**{"head_chunk_tokens": 16, "min_num_params": 0, **options})
    mesh = mesh_of_first(world.size, sharding.replicate)
    model = load_model(
        path, kind=kind, options=sharding, mesh=mesh, device=CPU, dtype=dtype, seed=3
    )
    assert len(fsdp_modules(model)) == (1 if case == "small" else 3)
    made = {}
    optimizer = Optimizer(model, kind="sgd" if case == "plain" else "adamw", eps=1e-4)
    for step in range(2):
        made[f"loss{step}"] = backward(model, world)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            made[f"grad{step}.{name}"] = whole(parameter.grad)
        # between backward and step, as a metric pass would
        with torch.no_grad():
            model(pack(rows(4), CPU))
        metrics = optimizer.step(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
        made[f"norm{step}"] = torch.tensor(metrics["grad_norm"], dtype=torch.float64)
    for name, parameter in model.named_parameters():
        made[f"weight.{name}"] = whole(parameter)
    if case == "single":
        refuse_nan(model, optimizer, world)
    return made


def refuse_nan(model: PackedModel, optimizer: Optimizer, world: World) -> None:
    """NaN made on rank 0 alone stops every rank, with one message, before the step."""
    before = {name: whole(p) for name, p in model.named_parameters()}
    backward(model, world, scale=float("nan") if world.rank == 0 else 1.0)
    try:
        optimizer.step(lr=1e-2)
        raise AssertionError("a NaN gradient was stepped on")
    except NonFiniteError as error:
        messages: list[str | None] = [None] * world.size
        dist.all_gather_object(messages, str(error), group=cpu_group(range(world.size)))
        assert len(set(messages)) == 1 and "hf.model" in str(error), messages
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), before[name]), name


def main() -> None:
    out, *cases = sys.argv[1:]
    world = World.from_env()
    init_distributed(world, next(dist.rendezvous("env://"))[0])
    for ranks, case, path in (argument.split(":") for argument in cases):
        mesh_of_first(int(ranks), CASES[case][0].get("replicate", 1))
        if world.rank >= int(ranks):
            continue
        made = run(case, Path(path), replace(world, size=int(ranks)))
        if world.rank == 0:
            save_file(made, Path(out) / f"{case}-{ranks}.safetensors")
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
