"""Activation checkpointing, compilation and sharding of a model's layers, in that order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

from fsdprl.errors import UserError
from fsdprl.options import ShardingOptions

HALF = (torch.bfloat16, torch.float16)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    options: ShardingOptions,
    compute_dtype: torch.dtype,
) -> None:
    """Shard `model` (with the transformers model as `.hf`) over `mesh`, in place.

    Parameters may still be on the meta device. Each decoder layer is one FSDP unit; embeddings,
    final norm and head belong to the root, and so do the layers of a model below `min_num_params`.
    In half precision the shards keep their own type (float32 masters), are cast when gathered, and
    gradients are reduced in float32. Gradients are summed over ranks, never averaged: the loss
    carries its normalisation. Parameter names do not change. Raises UserError naming the
    architecture if it has no decoder layers to shard.
    """
    layers = decoder_layers(model.hf)  # type: ignore[arg-type]
    for layer in layers:
        # fully_shard's hooks sit around forward: what is gathered for the layer in backward
        # serves the recomputation too
        if options.compile:
            layer.forward = torch.compile(layer.forward)
        if options.activation_checkpointing:
            layer.forward = _recomputed(layer.forward)
    policy = MixedPrecisionPolicy()
    if compute_dtype in HALF:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    small = sum(p.numel() for p in model.parameters()) < options.min_num_params
    for layer in () if small else layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, reshard_after_forward=options.reshard_after_forward
        )
    # the root's backward begins with what its forward ended with: do not gather the head twice
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(model, "unpacked")
    for module in fsdp_modules(model):
        # gloo cannot divide while it sums: both calls are needed for a plain sum
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.register_forward_hook(_reshard_after_inference)


def copies(options: ShardingOptions, parameters: int, ranks: int) -> int:
    """How many copies of a model the ranks hold together: `replicate`, or one each of a small model."""
    if options.replicate == 1 and parameters < options.min_num_params:
        return ranks
    return options.replicate


def decoder_layers(hf: nn.Module) -> list[nn.Module]:
    """The repeated layers of a transformers model, in order."""
    kinds = set(getattr(hf, "_no_split_modules", None) or ())
    # by inheritance: fully_shard puts a class of its own in front of a layer's
    layers = [m for m in hf.modules() if kinds & {kind.__name__ for kind in type(m).__mro__}]
    if not layers:
        raise UserError(
            f"{type(hf).__name__} names no decoder layers (_no_split_modules): not supported"
        )
    return layers


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit of the model, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that parameters are DTensor shards again. Local, idempotent."""
    for module in fsdp_modules(model):
        module.reshard()


def _reshard_after_inference(module: nn.Module, args: Any, output: Any) -> None:
    """A forward without gradient has no backward that would free the gathered weights.

    Left in place, they would hide the shards from the optimizer, the weight stream and
    checkpoints, and go stale when those change.
    """
    if not torch.is_grad_enabled():
        reshard(module)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """forward, keeping only its arguments for backward and running again there."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # no dropout is ever active (PackedModel.train), so there is no random state to keep
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call
