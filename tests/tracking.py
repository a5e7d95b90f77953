"""What tensors a computation makes: the largest, and the most bytes alive at once."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorTracker(TorchDispatchMode):
    """Within `with`: `largest`, elements of the largest tensor made; `peak`, bytes of storages made
    and alive at once; `elements`, of all results together; `calls`, how often each operator ran.

    Counts exactly, where resident memory would measure the allocator too. Sees backward as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.elements = 0
        self.alive = 0
        self.peak = 0
        self.calls: dict[str, int] = {}
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type != "meta":
                self._saw(value)
        return result

    def _saw(self, tensor: Tensor) -> None:
        self.largest = max(self.largest, tensor.numel())
        self.elements += tensor.numel()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.alive -= size
