"""Checksums of weights that a trainer computes from its shards and an engine from what arrived.

checksum(t) = sum over rows r (dimension 0) of (2 r + 1) * (sum of the row's bytes read as integers, the
widest that fill a row, of at most 8 bytes), modulo 2**64. Shares of it add up whatever the sharding,
and a stale, lost, cut, misplaced or altered piece changes it: a factor that is odd loses no bit. It
guards against mistakes, not against an adversary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdprl.hf_layout import layout_of
from fsdprl.shards import LocalShard, as_dtype

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# Cast at a time: on CPU what stays in cache, elsewhere enough work for a kernel.
CHUNK_BYTES = {"cpu": 1 << 20}
LARGE_CHUNK_BYTES = 64 << 20


def tensor_checksum(tensor: Tensor) -> int:
    """Checksum of a whole tensor in its own dtype, as a signed 64-bit integer."""
    flat = tensor.detach().contiguous().view(-1)
    width = flat.numel() // tensor.shape[0] if tensor.dim() and flat.numel() else 1
    return int(_rows_checksum(flat, width, 0, flat.dtype))


def part_checksum(rows: Tensor, first_row: int) -> int:
    """Share that consecutive rows have in their tensor's checksum."""
    flat = rows.contiguous().view(-1)
    return int(_rows_checksum(flat, flat.numel() // len(rows), first_row, flat.dtype))


def shard_checksums(
    model: Any, *, dtype: str | torch.dtype, group: dist.ProcessGroup | None = None
) -> dict[str, int]:
    """Checksum of every checkpoint tensor of the model after a cast to `dtype`, from the shards.

    model: a PackedModel, a transformers model, or its `layout_of`. Equal to `tensor_checksum` of what
    `weight_stream` yields under the same name. One all-reduce of an integer per tensor over `group`
    (None: the model's shard axis); all its ranks call it.
    """
    layout = layout_of(model)
    shards, items = layout.shards, layout.items()
    axis = next((shard.axis for shard in shards.values() if shard.axis is not None), None)
    device = next(iter(shards.values())).local.device if shards else torch.device("cpu")
    sums = torch.zeros(len(items), dtype=torch.int64, device=device)
    for i, item in enumerate(items):
        shard = shards[item.param]
        a, b = shard.overlap(item.start, item.numel)
        counted = shard.axis is not None or axis is None or axis.rank == 0
        if a < b and counted:
            width = item.numel // item.shape[0] if item.shape else 1
            part = shard.view(item.start + a, b - a)
            sums[i] = _rows_checksum(part, width, a // width, sent_dtype(shard, dtype))
    if axis is not None and axis.size > 1:
        sums = sums.to(axis.device_type)
        dist.all_reduce(sums, group=group or axis.group)
    return {item.name: total for item, total in zip(items, sums.tolist(), strict=True)}


def sent_dtype(shard: LocalShard, dtype: str | torch.dtype) -> torch.dtype:
    """The dtype in which an engine gets this tensor: buffers and integers keep their own."""
    own = shard.local.dtype
    return own if shard.buffer or not own.is_floating_point else as_dtype(dtype)


def _rows_checksum(flat: Tensor, width: int, first_row: int, dtype: torch.dtype) -> Tensor:
    """Share of rows first_row, first_row + 1, ... whose elements are `flat`."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    row_bytes = width * dtype.itemsize
    word = next(integer for size, integer in WORDS.items() if row_bytes % size == 0)
    rows = max(1, CHUNK_BYTES.get(flat.device.type, LARGE_CHUNK_BYTES) // row_bytes)
    for row in range(0, flat.numel() // width, rows):
        part = flat[row * width : (row + rows) * width].to(dtype)
        if part.data_ptr() % word.itemsize:
            part = part.clone()
        sums = part.view(torch.uint8).view(word).view(-1, row_bytes // word.itemsize)
        sums = sums.sum(1, dtype=torch.int64)
        first = 2 * (first_row + row) + 1
        factors = torch.arange(first, first + 2 * len(sums), 2, device=flat.device)
        total += (sums * factors).sum()
    return total
