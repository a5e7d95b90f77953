"""Rows between ranks: whole rows trade places in one all-to-all of bytes over an explicit CPU group."""

import math
from collections.abc import Iterator, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from fsdprl.store import Row, Store


def encode_rows(rows: Sequence[tuple[int, Row]]) -> Tensor:
    """Rows as one uint8 tensor: an 8-byte length, a msgpack header, then ids, masks and every column of
    all rows back to back. Raises ValueError where a column has two types."""
    header = [(i, len(row.ids), row.loss_tokens, list(row.columns), row.info) for i, row in rows]
    columns: dict[str, list[Tensor]] = {}
    for _, row in rows:
        for name, values in row.columns.items():
            columns.setdefault(name, []).append(values)
    kinds = {
        name: {(_dtype_name(part), *part.shape[1:]) for part in parts}
        for name, parts in columns.items()
    }
    if mixed := [name for name, kind in kinds.items() if len(kind) > 1]:
        found = sorted(" x ".join(map(str, kind)) for kind in kinds[mixed[0]])
        raise ValueError(f"column {mixed[0]!r} has types {found}: make it one")
    types = [(name, *kind.pop()) for name, kind in kinds.items()]
    head = msgspec.msgpack.encode((header, types))
    blocks = [[row.ids for _, row in rows], [row.mask for _, row in rows], *columns.values()]
    parts = [torch.tensor([len(head)], dtype=torch.int64).view(torch.uint8), _bytes(head)]
    return torch.cat(
        parts + [torch.cat(block).flatten().view(torch.uint8) for block in blocks if block]
    )


def decode_rows(buffer: Tensor) -> list[tuple[int, Row]]:
    """The inverse of encode_rows."""
    head_bytes = int(buffer[:8].clone().view(torch.int64))
    header, types = msgspec.msgpack.decode(buffer[8 : 8 + head_bytes].numpy().tobytes())
    offset = 8 + head_bytes

    def take(dtype: torch.dtype, lengths: list[int], *width: int) -> Iterator[Tensor]:
        nonlocal offset
        size = sum(lengths) * dtype.itemsize * math.prod(width)
        block = buffer[offset : offset + size].clone().view(dtype)  # clone: aligned
        block = block.view(sum(lengths), *width)
        offset += size
        # clone again: a view would keep the whole block alive for as long as one row lives
        return iter([part.clone() for part in block.split(lengths)])

    lengths = [length for _, length, _, _, _ in header]
    ids, masks = take(torch.int32, lengths), take(torch.bool, lengths)
    columns = {
        name: take(getattr(torch, dtype), [row[2] for row in header if name in row[3]], *width)
        for name, dtype, *width in types
    }
    return [
        (i, Row(next(ids), next(masks), info, {name: next(columns[name]) for name in names}))
        for i, _, _, names, info in header
    ]


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


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
