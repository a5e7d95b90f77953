"""One rank's part of a tensor, seen as a flat range.

FSDP2 shards dimension 0, so a rank's rows are one contiguous range of the row-major tensor. Loading,
saving, streaming and checksums all become arithmetic on such ranges: no other layout is met here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

# What wrappers put into parameter names; checkpoints and engines know nothing of them.
WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class ShardAxis:
    """The ranks that share one tensor: rank r holds flat elements [r * stride, (r + 1) * stride)."""

    group: dist.ProcessGroup
    size: int
    rank: int
    stride: int
    device_type: str


@dataclass(frozen=True)
class LocalShard:
    """This rank's range of one named tensor."""

    name: str
    shape: tuple[int, ...]
    local: Tensor
    """Flat [n] view of this rank's elements: writing to it writes to the parameter."""
    start: int
    """Position of local[0] in the flattened whole tensor."""
    axis: ShardAxis | None
    """None for a tensor that every rank holds whole."""
    writer: bool
    """Whether this rank is the one of its replicas that writes the range to disk."""
    buffer: bool = False
    """A persistent buffer: it keeps its own dtype on the way to an engine."""

    @property
    def numel(self) -> int:
        return numel_of(self.shape)

    def overlap(self, start: int, numel: int) -> tuple[int, int]:
        """Part [a, b) of the flat range [start, start + numel) that lies here, relative to `start`."""
        a = max(self.start - start, 0)
        b = min(self.start + self.local.numel() - start, numel)
        return (a, b) if b > a else (0, 0)

    def view(self, start: int, numel: int) -> Tensor:
        """Flat elements [start, start + numel) of the whole tensor; they must lie here."""
        return self.local.narrow(0, start - self.start, numel)


def numel_of(shape: tuple[int, ...]) -> int:
    """Elements of a tensor of this shape; 1 for a scalar."""
    count = 1
    for size in shape:
        count *= size
    return count


def local_shard(name: str, tensor: Tensor, lead: bool, *, buffer: bool = False) -> LocalShard:
    """The flat view of `tensor` on this rank: a DTensor sharded on dimension 0, or a plain tensor.

    lead: whether this rank is the one that writes plain tensors.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(name, shape, tensor.detach().view(-1), 0, None, lead, buffer)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, f"{name}: this rank is outside of the tensor's mesh"
    sharded = [dim for dim, place in enumerate(tensor.placements) if place.is_shard()]
    with torch.no_grad():  # detach() of a DTensor would go through its dispatcher: slow
        local = tensor.to_local().detach().view(-1)
    if not sharded:
        return LocalShard(name, shape, local, 0, None, not any(coordinate), buffer)
    assert len(sharded) == 1 and isinstance(tensor.placements[sharded[0]], Shard), (
        f"{name}: sharded on several mesh axes: {tensor.placements}"
    )
    (dim,) = sharded
    assert tensor.placements[dim].is_shard(0), f"{name}: sharded on a dimension other than 0"
    size, rank = mesh.size(dim), coordinate[dim]
    stride = -(-shape[0] // size) * numel_of(shape[1:])
    start = min(rank * stride, numel_of(shape))
    assert local.numel() == min(stride, numel_of(shape) - start), f"{name}: unexpected local rows"
    writer = not any(place for other, place in enumerate(coordinate) if other != dim)
    axis = ShardAxis(mesh.get_group(dim), size, rank, stride, mesh.device_type)
    return LocalShard(name, shape, local, start, axis, writer, buffer)


def clean_name(name: str) -> str:
    """A parameter's name without what activation checkpointing and torch.compile put in."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def model_shards(model: Any) -> dict[str, LocalShard]:
    """Parameters and persistent buffers of `model.hf` by name, in order; a tied one under its first.

    model: a PackedModel, or a transformers model by itself. Parameters that a forward left gathered
    go back to their shards first. Local: no communication.
    """
    hf = getattr(model, "hf", model)
    root = model if isinstance(model, nn.Module) else hf
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    parameters = {clean_name(name): value for name, value in hf.named_parameters()}
    shards = tensor_shards(parameters)
    lead = is_lead(parameters.values())
    for name, buffer in _persistent_buffers(hf):
        shards[clean_name(name)] = local_shard(clean_name(name), buffer, lead, buffer=True)
    return shards


def tensor_shards(tensors: Mapping[str, Tensor]) -> dict[str, LocalShard]:
    """The same view of named tensors, plain or DTensor."""
    lead = is_lead(tensors.values())
    return {name: local_shard(name, tensor, lead) for name, tensor in tensors.items()}


def is_lead(tensors: Iterable[Tensor]) -> bool:
    """Whether this is the first of the ranks that share the tensors: of their mesh, or of the world."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            return not any(tensor.device_mesh.get_coordinate() or (1,))
    return not dist.is_initialized() or dist.get_rank() == 0


def tied_names(module: nn.Module) -> dict[str, list[str]]:
    """First name of each parameter -> all its names (lm_head.weight of a tied model among them)."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        name = clean_name(name)
        names.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return names


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """torch.bfloat16 for "bfloat16" (or itself)."""
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
