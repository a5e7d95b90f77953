"""A one-rank process group in the test's own process, and models loaded on it."""

import functools
import gc
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from fsdprl.mesh import init_distributed, shard_mesh
from fsdprl.models import DTYPES, Packed, PackedModel, load_model, pack
from fsdprl.options import ShardingOptions
from fsdprl.world import World

CPU = torch.device("cpu")


@functools.cache
def mesh() -> Any:
    """A mesh of this process alone; starts the default process group if there is none."""
    if not dist.is_initialized():
        init_distributed(World(), dist.HashStore())
    gc.collect()
    return shard_mesh("cpu", 1)


def load(path: Any, *, dtype: str = "float32", seed: int = 0, **rest: Any) -> PackedModel:
    """load_model on one rank; `kind` and `trainable` go to it, other keywords are its options."""
    own = {name: rest.pop(name) for name in ("kind", "trainable") if name in rest}
    options = ShardingOptions(**{"min_num_params": 0} | rest)  # each layer a unit, small as it is
    return load_model(path, options=options, mesh=mesh(), device=CPU, dtype=dtype, seed=seed, **own)


def reference(path: Any, dtype: str = "float32") -> Any:
    """The same checkpoint as transformers loads and runs it."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], experts_implementation="eager"
    )


def rows(
    *lengths: int, temperature: float = 1.0, seed: int = 0
) -> list[tuple[Tensor, Tensor, float]]:
    """Random rows (ids, loss mask, temperature): about half of each row's tokens are trained on."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(len(tiny.tokenizer()), (length,), generator=generator)
        mask = torch.rand(length, generator=generator) < 0.5
        mask[0], mask[1:2] = False, True
        made.append((ids.int(), mask, temperature))
    return made


def packed(*lengths: int, **rest: Any) -> Packed:
    return pack(rows(*lengths, **rest), CPU)
