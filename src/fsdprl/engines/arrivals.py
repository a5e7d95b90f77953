"""What an engine waits for in an update, and what may arrive instead. The same for every engine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdprl.engines import EngineError
from fsdprl.stream import Bucket, Part, part_checksum, tensor_checksum


@dataclass(frozen=True)
class Expected:
    """A tensor that must come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Arrivals:
    """The tensors of one update as they come in: each checked, none missing at the end."""

    expected: Mapping[str, Expected]
    checksums: dict[str, int] = field(default_factory=dict)
    """What has arrived."""
    rows: dict[str, int] = field(default_factory=dict)
    """How many rows of what comes in parts."""

    def of(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """The buckets, checked. Raises EngineError naming a tensor that is unexpected, doubled, of
        the wrong shape or type, or not finite, and at the end one that is missing."""
        for bucket in buckets:
            self._check_all(bucket)
            yield bucket
            del bucket  # gone before the next one is made
        missing = [name for name in self.expected if name not in self.checksums]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise EngineError(f"the update lacks weight {missing[0]}{more}")
        for name, rows in self.rows.items():
            if rows != self.expected[name].shape[0]:
                raise EngineError(
                    f"the update has {rows} rows of {self.expected[name].shape[0]} of {name}"
                )

    def take_all(self, bucket: Bucket) -> None:
        """Count the checksums of a bucket as it came."""
        for name, tensor in bucket.tensors:
            self.take(name, tensor)
        for part in bucket.parts:
            self.take_part(part.name, part.first_row, part.rows)

    def take(self, name: str, tensor: Tensor) -> None:
        """Count the checksum of a whole tensor."""
        self.checksums[name] = tensor_checksum(tensor)

    def take_part(self, name: str, first_row: int, rows: Tensor) -> None:
        """Count that of a part: shares add up, modulo 2^64."""
        total = self.checksums[name] + part_checksum(rows, first_row)
        self.checksums[name] = (total + 2**63) % 2**64 - 2**63

    def _check_all(self, bucket: Bucket) -> None:
        for name, tensor in bucket.tensors:
            self._check(name, tensor)
        for part in bucket.parts:
            self._check_part(part)

    def _check_part(self, part: Part) -> None:
        wanted = self.expected.get(part.name)
        if part.name in self.checksums and part.name not in self.rows:
            raise EngineError(f"weight {part.name} came twice in one update")
        if wanted is not None:
            if part.first_row + len(part.rows) > wanted.shape[0]:
                raise EngineError(
                    f"weight {part.name} has row {part.first_row + len(part.rows) - 1}, the engine's has "
                    f"{wanted.shape[0]} rows"
                )
            wanted = Expected((len(part.rows), *wanted.shape[1:]), wanted.dtype)
        self._check_tensor(part.name, part.rows, wanted)
        self.rows[part.name] = self.rows.get(part.name, 0) + len(part.rows)
        self.checksums.setdefault(part.name, 0)

    def _check(self, name: str, tensor: Tensor) -> None:
        if name in self.checksums:
            raise EngineError(f"weight {name} came twice in one update")
        self._check_tensor(name, tensor, self.expected.get(name))
        self.checksums[name] = 0

    def _check_tensor(self, name: str, tensor: Tensor, wanted: Expected | None) -> None:
        if wanted is None:
            raise EngineError(
                f"unexpected weight {name} {tuple(tensor.shape)}: the engine has none"
            )
        if tuple(tensor.shape) != wanted.shape:
            raise EngineError(
                f"weight {name} has shape {tuple(tensor.shape)}, the engine's has {wanted.shape}"
            )
        if tensor.dtype != wanted.dtype:
            raise EngineError(f"weight {name} is {tensor.dtype}, the engine's is {wanted.dtype}")
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return
        low, high = tensor.aminmax()  # NaN passes through either; no temporary of the tensor's size
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise EngineError(
                f"weight {name} is not finite: NaN or infinity in the trained parameter"
            )
