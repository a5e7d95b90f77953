"""Rows between ranks: whole rows trade places in one all-to-all of bytes over an explicit CPU group."""

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from fsdprl.store import Row, Store


def encode_rows(rows: Sequence[tuple[int, Row]]) -> Tensor:
    """Rows as one uint8 tensor: an 8-byte length, a msgpack header, then every tensor's raw bytes in header order."""
    header, tensors = [], []
    for row_id, row in rows:
        names = list(row.columns)
        columns = [
            (name, str(row.columns[name].dtype).removeprefix("torch."), len(row.columns[name]))
            for name in names
        ]
        header.append((row_id, len(row.ids), columns, row.info))
        tensors += [row.ids, row.mask, *(row.columns[name] for name in names)]
    head = msgspec.msgpack.encode(header)
    parts = [torch.tensor([len(head)], dtype=torch.int64).view(torch.uint8), _bytes(head)]
    parts += [tensor.contiguous().view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts)


def decode_rows(buffer: Tensor) -> list[tuple[int, Row]]:
    """The inverse of encode_rows."""
    head_bytes = int(buffer[:8].clone().view(torch.int64))
    header = msgspec.msgpack.decode(buffer[8 : 8 + head_bytes].numpy().tobytes())
    offset = 8 + head_bytes

    def take(dtype: torch.dtype, count: int) -> Tensor:
        nonlocal offset
        size = count * dtype.itemsize
        part = (
            buffer[offset : offset + size].clone().view(dtype)
        )  # clone: aligned, and free of the buffer
        offset += size
        return part

    rows = []
    for row_id, length, columns, info in header:
        row = Row(ids=take(torch.int32, length), mask=take(torch.bool, length), info=info)
        for name, dtype, count in columns:
            row.columns[name] = take(getattr(torch, dtype), count)
        rows.append((row_id, row))
    return rows


def exchange_rows(store: Store, leaving: Sequence[Sequence[int]], group: dist.ProcessGroup) -> None:
    """Send the rows leaving[r] to rank r of the group and keep what arrives. Collective over the group.

    leaving: one list of row ids per group rank (this rank's own list is empty).
    """
    out = [
        encode_rows([(i, store.rows[i]) for i in ids]) if ids else torch.zeros(0, dtype=torch.uint8)
        for ids in leaving
    ]
    out_sizes = torch.tensor([len(part) for part in out], dtype=torch.int64)
    in_sizes = torch.zeros_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=group)
    received = torch.empty(int(in_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(
        received, torch.cat(out), in_sizes.tolist(), out_sizes.tolist(), group=group
    )
    for ids in leaving:
        for i in ids:
            del store.rows[i]
    for part in received.split(in_sizes.tolist()):
        if len(part):
            for row_id, row in decode_rows(part):
                store.put(row_id, row)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
