"""AdamW over the local shards of a sharded model, with one global gradient norm.

Elementwise updates need no communication, so they run on this rank's shards as plain tensors; only
the norm is summed over ranks. State lives beside the shards under the parameters' names.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from fsdprl.device import has_fused_adamw
from fsdprl.errors import NonFiniteError
from fsdprl.loss_scale import LossScale
from fsdprl.parallel import reshard

NORM_CHUNK = 1 << 14
"""Elements whose squares are summed in the gradient's own precision, the rest in float64: float32
alone would be off by 4e-5 at a million elements."""


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) or plain gradient descent.

    The learning rate is an argument of `step`, so schedules live in the training loop. Weight decay
    is decoupled from the gradient and spares vectors (norms, biases). kind "sgd" has no state.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kind: Literal["adamw", "sgd"] = "adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        reshard(model)  # after a forward without gradient the shards may be hidden
        self.model = model
        self.kind = kind
        self.betas = betas
        self.eps = eps
        half = getattr(model, "dtype", None) == torch.float16
        self.scale = LossScale() if half else None
        """Of the loss, where gradients are computed in float16."""
        self.steps = torch.zeros((), dtype=torch.float32)
        """Steps taken, for Adam's bias correction."""
        moments = ("exp_avg", "exp_avg_sq") if kind == "adamw" else ()
        self.state: dict[str, dict[str, Tensor]] = {
            moment: {name: torch.zeros_like(local) for name, local in self._locals().items()}
            for moment in moments
        }

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied with before backward."""
        return self.scale.value if self.scale else 1.0

    def _parameters(self) -> dict[str, nn.Parameter]:
        # asked anew each time: moving a model to another device replaces its shards
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _locals(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: _local(p) for name, p in self._parameters().items()}

    @torch.no_grad()
    def step(
        self, *, lr: float, weight_decay: float = 0.0, max_grad_norm: float | None = None
    ) -> dict[str, float]:
        """Clip to a global norm, update the weights, drop the gradients. Collective.

        max_grad_norm: None or 0 for no clipping. Returns {"grad_norm": global norm before
        clipping}, in float16 with the next "loss_scale", and without "grad_norm" for a step that was
        left out because the scaled gradient overflowed. Raises NonFiniteError naming the first bad
        parameter, on every rank alike and before any weight or moment has changed.
        """
        reshard(self.model)
        parameters = self._parameters()
        grads = {name: _local(p.grad) for name, p in parameters.items() if p.grad is not None}
        scale = self.loss_scale
        norm = math.sqrt(_global_sum(_sum_of_squares(list(grads.values())), parameters)) / scale
        if not _finite_everywhere(norm, parameters):
            if self.scale and self.scale.overflowed():
                self.zero_grad()
                return {"loss_scale": self.loss_scale}
            raise NonFiniteError(self._blame(norm, grads, parameters))
        clip = max_grad_norm / norm if max_grad_norm and norm > max_grad_norm else 1.0
        if clip != 1.0 or scale != 1.0:
            for grad in grads.values():
                grad.mul_(clip / scale)
        self.steps += 1
        matrices = [name for name in grads if parameters[name].ndim >= 2]
        vectors = [name for name in grads if parameters[name].ndim < 2]
        for names, decay in ((matrices, weight_decay), (vectors, 0.0)):
            locals_ = {name: _local(parameters[name]) for name in names}
            names = [name for name in names if locals_[name].numel()]
            if names:
                weights = [locals_[name] for name in names]
                self._update(names, weights, [grads[name] for name in names], lr, decay)
        self.zero_grad()
        if self.scale:
            self.scale.held()
            return {"grad_norm": norm, "loss_scale": self.loss_scale}
        return {"grad_norm": norm}

    def _update(
        self, names: list[str], weights: list[Tensor], grads: list[Tensor], lr: float, decay: float
    ) -> None:
        if self.kind == "sgd":
            for weight, grad in zip(weights, grads, strict=True):
                weight.mul_(1.0 - lr * decay).add_(grad, alpha=-lr)
            return
        fused = has_fused_adamw(weights[0].device)
        before = self.steps - 1  # adamw counts each parameter's own steps up
        home = weights[0].device if fused else torch.device("cpu")
        adamw(
            weights,
            grads,
            [self.state["exp_avg"][name] for name in names],
            [self.state["exp_avg_sq"][name] for name in names],
            [],
            [before.clone().to(home) for _ in names],
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
        )

    def _blame(
        self, norm: float, grads: dict[str, Tensor], parameters: dict[str, nn.Parameter]
    ) -> str:
        names = list(grads)
        bad = (i for i, name in enumerate(names) if not bool(grads[name].isfinite().all()))
        first = int(_global_min(next(bad, len(names)), parameters))
        what = f"in {names[first]}" if first < len(names) else "only in the sum over all parameters"
        shown = math.nan if math.isfinite(norm) else norm  # finite: a replica's was not
        return (
            f"the gradient norm is {shown} (first non-finite {what}); the update was not taken and no "
            f"weight has changed"
        )

    def zero_grad(self) -> None:
        """Drop the accumulated gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def to(self, device: torch.device) -> None:
        """Move the state to another device, as the model's shards are moved."""
        for values in self.state.values():
            for name in values:
                values[name] = values[name].to(device)

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs: "steps", "<moment>.<parameter>", in float16 "loss_scale". They share its memory.

        Moments are DTensors placed as their parameters, so that they can be saved by one number of
        ranks and loaded by another.
        """
        reshard(self.model)
        tensors: dict[str, Tensor] = {"steps": self.steps}
        if self.scale:
            tensors["loss_scale"] = self.scale.state
        for name, parameter in self._parameters().items():
            for moment, values in self.state.items():
                tensors[f"{moment}.{name}"] = _placed_like(values[name], parameter)
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over values for every name of `state_tensors`. Raises KeyError if one is missing."""
        for name, own in self.state_tensors().items():
            _local(own).copy_(_local(tensors[name]))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placed_like(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _sum_of_squares(tensors: list[Tensor]) -> float:
    """In float64, without a float64 copy of the tensors."""
    total = 0.0
    for tensor in tensors:
        flat = tensor.flatten()
        whole = len(flat) // NORM_CHUNK * NORM_CHUNK
        norms = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_CHUNK), dim=1)
        rest = torch.linalg.vector_norm(flat[whole:])
        total = total + norms.double().square().sum() + rest.double().square()
    return float(total)


def _groups(
    parameters: Mapping[str, Tensor], *, shards: bool, replicas: bool
) -> list[dist.ProcessGroup]:
    """The groups over which parameters are sharded, and those over which they are copied."""
    for parameter in parameters.values():
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
            wanted = {True: shards, False: replicas}
            return [
                mesh.get_group(axis) for axis, placed in placements if wanted[placed.is_shard()]
            ]
    return []


def _global_sum(value: float, parameters: Mapping[str, Tensor]) -> float:
    """Over the shards: replicas have the same sum already."""
    total = torch.tensor(value, dtype=torch.float64)
    for group in _groups(parameters, shards=True, replicas=False):
        dist.all_reduce(total, group=group)
    return float(total)


def _finite_everywhere(norm: float, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the norm is finite on every replica. They agree, unless memory of one of them went bad: it must not be
    the only one to leave a step out, and go on with other weights."""
    bad = torch.tensor(not math.isfinite(norm), dtype=torch.int32)
    for group in _groups(parameters, shards=False, replicas=True):
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
    return not bool(bad)


def _global_min(value: int, parameters: Mapping[str, Tensor]) -> int:
    """Over all ranks of the model."""
    least = torch.tensor(value)
    for group in _groups(parameters, shards=True, replicas=True):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least)
