"""Worker verb: a model's weights move towards another's, as a reference that follows the policy does."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdprl.parallel import reshard
from fsdprl.worker import Worker


@torch.no_grad()
def blend(worker: Worker, *, model: str, source: str, share: float) -> None:
    """weights = share * source's + (1 - share) * model's, shard by shard, in float32 or wider.

    Raises ValueError where the two are not the same architecture, sharded alike.
    """
    target, other = worker.models[model].network, worker.models[source].network
    reshard(target)
    reshard(other)
    theirs = dict(other.named_parameters())
    for name, parameter in target.named_parameters():
        mine, its = _local(parameter), _local(theirs[name])
        if mine.shape != its.shape:
            raise ValueError(
                f"{name} is {tuple(mine.shape)} in {model}, {tuple(its.shape)} in {source}"
            )
        wide = torch.promote_types(its.dtype, torch.float32)
        mine.copy_(mine.to(wide).lerp(its.to(wide), share))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


VERBS: dict[str, Callable[..., Any]] = {"model.blend": blend}
