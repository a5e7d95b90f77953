"""What an engine waits for in an update, and what may arrive instead. The same for every engine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdprl.engines import EngineError
from fsdprl.stream import Bucket


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

    def of(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """The buckets, checked. Raises EngineError naming a tensor that is unexpected, doubled, of
        the wrong shape or type, or not finite, and at the end one that is missing."""
        for bucket in buckets:
            for name, tensor in bucket.tensors:
                self._check(name, tensor)
            yield bucket
        missing = [name for name in self.expected if name not in self.checksums]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise EngineError(f"the update lacks weight {missing[0]}{more}")

    def _check(self, name: str, tensor: Tensor) -> None:
        wanted = self.expected.get(name)
        if wanted is None:
            raise EngineError(
                f"unexpected weight {name} {tuple(tensor.shape)}: the engine has none"
            )
        if name in self.checksums:
            raise EngineError(f"weight {name} came twice in one update")
        if tuple(tensor.shape) != wanted.shape:
            raise EngineError(
                f"weight {name} has shape {tuple(tensor.shape)}, the engine's has {wanted.shape}"
            )
        if tensor.dtype != wanted.dtype:
            raise EngineError(f"weight {name} is {tensor.dtype}, the engine's is {wanted.dtype}")
        self.checksums[name] = 0
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return
        low, high = tensor.aminmax()  # NaN passes through either; no temporary of the tensor's size
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise EngineError(
                f"weight {name} is not finite: NaN or infinity in the trained parameter"
            )
