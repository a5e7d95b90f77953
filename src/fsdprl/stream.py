"""The weight stream: DTensor shards to full tensors in checkpoint names, a bucket at a time.

Shards are cast to the engine's dtype, packed into one small send buffer, all-gathered into one small
receive buffer and copied out into tensors of their own: both buffers are reused, since fresh large
ones cost page faults and memory. Nothing bigger than a bucket exists, except a tensor that is larger
and that the engine cannot take in parts.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdprl.checksum import part_checksum, sent_dtype, shard_checksums, tensor_checksum
from fsdprl.hf_layout import Item, layout_of
from fsdprl.shards import LocalShard, ShardAxis

__all__ = [
    "Bucket",
    "Part",
    "part_checksum",
    "shard_checksums",
    "tensor_checksum",
    "weight_stream",
]

# torch 2.13 renamed it and deprecates the old name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

GATHER_BYTES = 16 << 20
ALIGN = 8  # bytes: any dtype may start there
LAYER = re.compile(r"^.*?\.\d+(?=\.)")


@dataclass(frozen=True)
class Part:
    """Neighbouring rows of a tensor that is larger than a bucket."""

    name: str
    first_row: int
    rows: Tensor


@dataclass
class Bucket:
    """Full tensors under their checkpoint names, in the engine's dtype.

    They own their memory and stay valid as long as somebody holds them, except on one rank and
    without a cast: there they are the parameters themselves, to be read before the next training step.
    """

    tensors: list[tuple[str, Tensor]]
    layer_end: bool
    """Whether every layer begun so far is complete."""
    parts: list[Part] = field(default_factory=list)
    """Of tensors that the engine takes in parts; all parts of one come in neighbouring buckets."""


@dataclass(frozen=True)
class Window:
    """Elements [start, stop) of every rank's shard of one parameter: what one bucket takes of it."""

    shard: LocalShard
    dtype: torch.dtype
    start: int
    stop: int
    items: tuple[Item | None, ...]
    """The tensor that each rank's elements belong to (None: that rank has none here)."""
    part: bool = False
    """Whether it is a part of its tensor: as many rows of every rank's share."""

    @property
    def distinct(self) -> list[Item]:
        return list(dict.fromkeys(item for item in self.items if item is not None))

    @property
    def nbytes(self) -> int:
        count = len(self.items) * (self.stop - self.start)
        if not self.part:
            count = sum(item.numel for item in self.distinct)
        return count * self.dtype.itemsize

    def targets(self, device: torch.device) -> list["Target | None"]:
        """Memory of its own for what arrives from every rank; ranks share it where it is one tensor."""
        if not self.part:
            made = {
                item: Target.empty(item, item.start, item.numel, self, device)
                for item in self.distinct
            }
            return [None if item is None else made[item] for item in self.items]
        assert self.items[0] is not None
        found: list[Target | None] = []
        for rank in range(len(self.items)):
            begin = rank * (self.shard.axis.stride if self.shard.axis else 0) + self.start
            count = min(self.stop - self.start, self.shard.numel - begin)
            own = Target.empty(self.items[0], begin, count, self, device) if count > 0 else None
            found.append(own)
        return found


@dataclass(frozen=True)
class Target:
    """Elements [begin, begin + len(flat)) of a flattened parameter, which are `item` or rows of it."""

    item: Item
    begin: int
    flat: Tensor

    @classmethod
    def empty(
        cls, item: Item, begin: int, numel: int, window: Window, device: torch.device
    ) -> "Target":
        return cls(item, begin, torch.empty(numel, dtype=window.dtype, device=device))

    def as_part(self) -> Part:
        width = self.item.numel // self.item.shape[0]
        first = (self.begin - self.item.start) // width
        return Part(self.item.name, first, self.flat.view(-1, *self.item.shape[1:]))


def weight_stream(
    model: Any,
    *,
    dtype: str | torch.dtype,
    bucket_bytes: int = GATHER_BYTES,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    divisible: Collection[str] = (),
) -> Iterator[Bucket]:
    """Every tensor of the model as an engine loads it, in buckets of about `bucket_bytes`.

    Collective: all ranks of the shard axis iterate in lockstep; replicas (HSDP) do not talk to each
    other. A bucket ends with a layer; a layer larger than `bucket_bytes` takes several (only the
    last has `layer_end`), and a larger tensor has a bucket of its own, or comes in parts of about
    `bucket_bytes` if it is among `divisible`. Fused experts come as one
    tensor per expert and projection, a tied weight once, under the embedding's name. Persistent
    buffers keep their dtype, all other floating-point tensors come in `dtype`.

    group: a process group of the shard axis's ranks to gather over (None: the axis's own).
    model: a PackedModel, a transformers model, or its `layout_of`.
    device: where tensors are made (None: the mesh's accelerator, or CPU).
    Extra memory: the bucket, and buffers of at most 2 * 16 MB.
    """
    layout = layout_of(model)
    shards = layout.shards
    axis = next((shard.axis for shard in shards.values() if shard.axis is not None), None)
    home = torch.device(axis.device_type) if axis else next(layout.hf.parameters()).device
    target = device or home
    windows = [
        window
        for param, shard in shards.items()
        for window in _windows(
            shard, layout.canonical(param), sent_dtype(shard, dtype), bucket_bytes, divisible
        )
    ]
    gather = None
    if axis is not None and axis.size > 1:
        assert group is None or group.size() == axis.size, "group is not the model's shard axis"
        largest = max(window.nbytes for window in windows)
        gather = _Gather(axis, group or axis.group, target, max(bucket_bytes, largest))
    for planned, layer_end in _plan(windows, bucket_bytes):
        yield _bucket(planned, layer_end, gather, target)


def _windows(
    shard: LocalShard,
    items: list[Item],
    dtype: torch.dtype,
    bucket_bytes: int,
    divisible: Collection[str],
) -> Iterator[Window]:
    """A parameter's share of the stream, as small as whole checkpoint tensors allow.

    Rank r's part of a fused parameter holds tensors at the same places as rank 0's (a row is an
    expert), so one window takes one of them from every rank.
    """
    size, stride = (shard.axis.size, shard.axis.stride) if shard.axis else (1, shard.numel)
    if len(items) == 1:
        item = items[0]
        step, width = stride, item.numel // max(item.shape[0], 1) if item.shape else 1
        if item.name in divisible and item.numel * dtype.itemsize > bucket_bytes:
            step = max(1, bucket_bytes // (size * width * dtype.itemsize)) * width
        for start in range(0, max(stride, 1), step):
            stop = min(start + step, stride)
            yield Window(shard, dtype, start, stop, (item,) * size, step < stride)
        return
    places: dict[int, list[Item | None]] = {}
    for item in items:
        rank, place = divmod(item.start, stride)
        assert place + item.numel <= stride, f"{item.name} is spread over ranks"
        places.setdefault(place, [None] * size)[rank] = item
    for place, owned in places.items():
        numel = next(item.numel for item in owned if item is not None)
        yield Window(shard, dtype, place, place + numel, tuple(owned))


def _plan(windows: list[Window], bucket_bytes: int) -> Iterator[tuple[list[Window], bool]]:
    """Windows of each bucket, and whether it ends a layer."""
    pending: list[Window] = []
    size = 0
    for _, of_layer in groupby(windows, key=lambda window: _layer(window.shard.name)):
        layer = list(of_layer)
        needed = sum(window.nbytes for window in layer)
        if pending and size + needed > bucket_bytes:
            yield pending, True
            pending, size = [], 0
        for window in layer:
            if pending and size + window.nbytes > bucket_bytes:
                yield pending, False
                pending, size = [], 0
            pending.append(window)
            size += window.nbytes
    if pending:
        yield pending, True


def _layer(name: str) -> str:
    match = LAYER.match(name)
    return match.group() if match else name


def _bucket(
    windows: Sequence[Window], layer_end: bool, gather: "_Gather | None", device: torch.device
) -> Bucket:
    """What the windows hold, from all ranks."""
    bucket = Bucket([], layer_end)
    wanted: list[tuple[Window, list[Target | None]]] = []
    for window in windows:
        targets: list[Target | None]
        if gather is None or window.shard.axis is None:
            targets = [*_local(window, device)]
        else:
            targets = window.targets(device)
            wanted.append((window, targets))
        for target in {id(target): target for target in targets if target is not None}.values():
            if window.part:
                bucket.parts.append(target.as_part())
            else:
                bucket.tensors.append((target.item.name, target.flat.view(target.item.shape)))
    if gather is not None:
        gather.run(wanted)
    return bucket


def _local(window: Window, device: torch.device) -> list[Target]:
    """What a window holds where this rank has all of it."""
    spans = [(item, item.start, item.numel) for item in window.distinct]
    if window.part:
        spans = [(item, window.start, window.stop - window.start) for item, _, _ in spans]
    return [
        Target(item, start, window.shard.view(start, numel).to(device, window.dtype))
        for item, start, numel in spans
    ]


Piece = tuple[Window, list[Target | None], int, int, int]
"""Window, its targets, first and last element of each rank's share, and place in the buffer."""


class _Gather:
    """All-gather of windows through two buffers that are made once."""

    def __init__(
        self, axis: ShardAxis, group: dist.ProcessGroup, device: torch.device, most_bytes: int
    ) -> None:
        self.axis, self.group = axis, group
        room = min(GATHER_BYTES, most_bytes) // axis.size // ALIGN * ALIGN
        self.room = max(room, ALIGN)
        self.send = torch.zeros(self.room, dtype=torch.uint8, device=device)
        self.receive = torch.empty(axis.size * self.room, dtype=torch.uint8, device=device)

    def run(self, wanted: Sequence[tuple[Window, list[Target | None]]]) -> None:
        """Fill the targets of these windows, which are one a rank."""
        pieces: list[Piece] = []
        used = 0
        for window, targets in wanted:
            start, width = window.start, window.dtype.itemsize
            while start < window.stop:
                if used + width > self.room:
                    self._exchange(pieces, used)
                    pieces, used = [], 0
                stop = min(window.stop, start + (self.room - used) // width)
                self._pack(window, start, stop, used)
                pieces.append((window, targets, start, stop, used))
                used += -(-(stop - start) * width // ALIGN) * ALIGN
                start = stop
        if pieces:
            self._exchange(pieces, used)

    def _pack(self, window: Window, start: int, stop: int, position: int) -> None:
        local = window.shard.local[start:stop]  # shorter, or empty, on the last ranks
        nbytes = local.numel() * window.dtype.itemsize
        self.send[position : position + nbytes].view(window.dtype).copy_(local)

    def _exchange(self, pieces: "list[Piece]", used: int) -> None:
        size = self.axis.size
        received = self.receive[: size * used]
        all_gather(received, self.send[:used], group=self.group)
        parts = received.view(size, used)
        for window, targets, start, stop, position in pieces:
            assert window.shard.axis is not None
            for rank, target in enumerate(targets):
                first = rank * window.shard.axis.stride + start
                count = min(stop - start, window.shard.numel - first)
                if target is None or count <= 0:
                    continue
                bits = parts[rank, position : position + count * window.dtype.itemsize]
                place = target.flat.narrow(0, first - target.begin, count)
                place.copy_(bits.view(window.dtype))
