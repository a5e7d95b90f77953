"""Worker verbs over models: build, log-probs, values, forward_backward, optim_step, load."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdprl.checkpoint_files import find_checkpoint
from fsdprl.checkpoint_io import load_tensors, load_weights
from fsdprl.checkpoint_save import narrowed_tensors, save_plan
from fsdprl.errors import NonFiniteError
from fsdprl.ferry import here
from fsdprl.functions import FunctionRef, positional_names, resolve
from fsdprl.losses import RowLoss, add_sums, row_extremes
from fsdprl.mesh import shard_mesh
from fsdprl.models import Kind, Packed, PackedModel, load_model, pack
from fsdprl.optim import Optimizer
from fsdprl.options import ShardingOptions
from fsdprl.parallel import copies
from fsdprl.rows import gather_columns
from fsdprl.safetensors_file import read_stored, stored_files
from fsdprl.segments import row_count
from fsdprl.shards import numel_of
from fsdprl.worker import Worker

BESIDE = ("entropy", "collision", "balance")
"""What the forward pass of a policy makes beside log-probs, if asked."""
MODEL_COLUMNS = ("logp", *BESIDE, "logp_top", "value", "score")
"""Names a loss may ask for that the forward pass makes."""


class Model:
    """One model of this rank and, if it is trained, its optimizer."""

    def __init__(
        self, network: PackedModel, path: str, group: Any, optimizer: Optimizer | None
    ) -> None:
        self.network = network
        self.path = path
        self.group = group
        self.optimizer = optimizer


def build(
    worker: Worker,
    *,
    model: str,
    path: str,
    kind: Kind,
    sharding: dict,
    dtype: str,
    seed: int,
    optimizer: dict | None,
) -> dict[str, Any]:
    """Load a checkpoint into shards. optimizer: keyword arguments of Optimizer, None for a frozen model."""
    options, ranks = ShardingOptions(**sharding), worker.world.size
    stored = read_stored(stored_files(find_checkpoint(path).folder))
    parameters = sum(numel_of(tensor.shape) for tensor in stored.values())
    mesh = shard_mesh(worker.device.type, ranks, copies(options, parameters, ranks))
    network = load_model(
        path,
        kind=kind,
        options=options,
        mesh=mesh,
        device=worker.device,
        dtype=dtype,
        seed=seed,
        trainable=optimizer is not None,
    )
    trained = None if optimizer is None else Optimizer(network, **optimizer)
    group = mesh.get_group("shard")
    worker.models[model] = Model(network, path, group, trained)
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "device": worker.device.type,
    }


def packed(worker: Worker, row_ids: Sequence[int], temperature: Tensor) -> Packed:
    """One microbatch of rows on the device; no rows give the dummy microbatch."""
    rows = worker.store.select(row_ids)
    return pack(
        [(row.ids, row.mask, float(t)) for row, t in zip(rows, temperature, strict=True)],
        worker.device,
    )


@torch.no_grad()
def forward(
    worker: Worker,
    *,
    model: str,
    rows: Tensor,
    microbatch: Tensor,
    microbatches: Tensor,
    temperature: Tensor,
    out: dict[str, str],
    top: int = 0,
) -> Tensor | None:
    """Run the model over rows without gradient.

    microbatch: number of the microbatch that each row runs in, [R]; microbatches: how many there are, the same
    on every rank. out: what the model makes ("logp", "value", or of BESIDE) -> token column to store it as. A reward
    model's scores are returned instead, float64 [R]. top: it makes "top_ids" and "logp_top" of that many likeliest
    words of each token.
    """
    network = worker.models[model].network
    network.eval()
    scores = torch.zeros(len(rows), dtype=torch.float64)
    for positions in _places(microbatch, microbatches):
        row_ids = rows[positions].tolist()
        also = [name for name in BESIDE if name in out]
        wanted = {"top": top} if top else {"also": also}
        first, others = network(packed(worker, row_ids, temperature[positions]), **wanted)
        if network.kind == "reward":
            scores[positions] = first.double().cpu()[: len(positions)]
        for made, name in out.items():
            worker.store.set_column(name, row_ids, others.get(made, first).cpu())
        worker.progress()
    return scores if network.kind == "reward" else None


def forward_backward(
    worker: Worker,
    *,
    model: str,
    rows: Tensor,
    microbatch: Tensor,
    microbatches: Tensor,
    losses: list[dict],
    samples: dict[str, Tensor],
    train: bool = True,
    log_entropy: bool = False,
) -> dict[str, Any]:
    """Accumulate the gradient of sum(loss * weight) over rows and losses, one microbatch at a time.

    train: False only measures the losses. log_entropy: measure the policy's entropy where no loss does.
    samples: name -> [R], with `weight` and `temperature` among them; every row here has a non-zero weight.
    Returns sums: `loss`, and per metric `metric/NAME` (times weight) and `weight/NAME` (what to divide it by); what
    row_extremes makes of them; and `nonfinite_rows`, if the loss of any row is NaN or infinite.
    """
    network, optimizer = worker.models[model].network, worker.models[model].optimizer
    scale = optimizer.loss_scale if optimizer else 1.0
    network.train(train)
    functions = [resolve(FunctionRef(**loss)) for loss in losses]
    names = {name for function in functions for name in positional_names(function)}
    stored = sorted(names - set(MODEL_COLUMNS) | {"weight", "segment"})
    watched = {"entropy"} - names if log_entropy else set()
    sums: dict[str, Tensor] = {}
    bad: list[int] = []
    for positions in _places(microbatch, microbatches):
        row_ids = rows[positions].tolist()
        local = {name: values[positions] for name, values in samples.items()}
        with torch.set_grad_enabled(train):
            batch = packed(worker, row_ids, local["temperature"])
            wanted: dict[str, Any] = {"also": [it for it in BESIDE if it in names | watched]}
            if "logp_top" in names:
                wanted["choices_SK"] = top_ids(worker, row_ids)
            first, others = network(batch, **wanted)
            made = others | dict.fromkeys(("logp", "value", "score"), first)
            columns = gather_columns(worker.store, row_ids, stored, local)
            columns = made | {
                name: _to(values, worker.device, first.dtype) for name, values in columns.items()
            }
            # connected even without rows: the collectives of backward always run
            total = first.sum() * 0.0
            for function in functions if row_ids else ():
                result = function(**{name: columns[name] for name in positional_names(function)})
                part, metrics = weighted_sum(result, columns["weight"], columns["segment"], local)
                total = total + part
                add_sums(sums, {name: value.cpu() for name, value in metrics.items()})
                if not sums["loss"].isfinite():
                    bad += nonfinite_rows(
                        result, columns["weight"], columns["segment"], local, row_ids
                    )
            if watched and row_ids:
                seen = torch.zeros_like(first), {it: others[it].detach() for it in watched}
                _, metrics = weighted_sum(seen, columns["weight"], columns["segment"], local)
                add_sums(sums, {name: value.cpu() for name, value in metrics.items()})
        if train:
            (total * scale).backward()
        worker.progress()
    found = {"nonfinite_rows": sorted(set(bad))} if bad else {}
    return {name: float(value) for name, value in sums.items()} | found


def top_ids(worker: Worker, row_ids: Sequence[int]) -> Tensor:
    """The words of each loss token that a teacher has named (Reference.top), int64 [S, K]."""
    if not row_ids:
        return torch.zeros(0, 1, dtype=torch.int64, device=worker.device)
    return worker.store.column("top_ids", row_ids).to(worker.device, torch.int64)


def nonfinite_rows(
    result: Any,
    weight_S: Tensor,
    segment_S: Tensor,
    samples: dict[str, Tensor],
    row_ids: Sequence[int],
) -> list[int]:
    """Ids of the rows whose share of loss * weight is NaN or infinite."""
    if isinstance(result, RowLoss):
        loss = result.loss.detach()
        places = torch.arange(len(loss))
        terms = loss.cpu() * samples["weight"][: len(loss)].cpu()
    else:
        terms, places = (result[0].detach() * weight_S).cpu(), segment_S.cpu()
    return [row_ids[int(place)] for place in places[~terms.isfinite()].unique()]


def weighted_sum(
    result: Any, weight_S: Tensor, segment_S: Tensor, samples: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum(loss * weight) of a token-level or row-level loss, and what its metrics come to, in float64.

    A RowLoss takes the rows' weights, one a row. Raises ValueError where a shape differs from what the
    weights cover: nothing is broadcast.
    """
    if isinstance(result, RowLoss):
        loss, metrics = result.loss, result.metrics
        weight = samples["weight"].to(loss)
        if len(loss) == row_count(
            segment_S
        ):  # rows without loss tokens at the end do not show in `segment`
            weight = weight[: len(loss)]
    else:
        loss, metrics = result
        weight = weight_S
    for name, values in {"the loss": loss, **metrics}.items():
        if values.shape != weight.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, but there are {len(weight)} weights: a loss returns "
                f"one number per loss token, or a RowLoss with one per row"
            )
    total = (loss * weight).sum()
    sums = {"loss": total.detach().double()}
    if not isinstance(result, RowLoss):
        sums |= row_extremes(metrics, segment_S)
    for name, values in metrics.items():
        sums[f"metric/{name}"] = (values.detach().double() * weight.double()).sum()
        sums[f"weight/{name}"] = weight.double().sum()
    return total, sums


def optim_step(
    worker: Worker, *, model: str, lr: float, weight_decay: float, max_grad_norm: float
) -> dict[str, Any]:
    """One optimizer step over all shards, or none on all of them: {"fault": why} where the gradient is not finite.

    The gradient is gone afterwards, either way.
    """
    optimizer = worker.models[model].optimizer
    if optimizer is None:
        raise ValueError(f"{model} is frozen: it has no optimizer")
    try:
        return optimizer.step(lr=lr, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    except NonFiniteError as error:
        optimizer.zero_grad()
        return {"fault": str(error)}


def drop_gradient(worker: Worker, *, model: str) -> None:
    """Forget what forward_backward has accumulated."""
    optimizer = worker.models[model].optimizer
    assert optimizer is not None
    optimizer.zero_grad()


def load(worker: Worker, *, model: str, path: str, optimizer: bool = True) -> None:
    """Put a saved step (see writing.save) back into the live model: weights, float32 masters where the files are
    narrower, and the optimizer's state if it has one and is to get it."""
    m, folder = worker.models[model], here(worker, path)
    load_weights(m.network, folder)
    if m.optimizer is not None and optimizer:
        m.optimizer.load_state_tensors(
            load_tensors(m.optimizer.state_tensors(), folder / "trainer")
        )
    if masters := narrowed_tensors(m.network, save_plan(m.network, m.path)):
        load_tensors(masters, folder / "trainer", stem="masters")


def _places(microbatch: Tensor, microbatches: Tensor) -> list[Tensor]:
    """Positions of each microbatch's rows; none for one that only keeps the other ranks company."""
    return [(microbatch == k).nonzero().flatten() for k in range(int(microbatches))]


def _to(values: Tensor, target: torch.device, dtype: torch.dtype) -> Tensor:
    return values.to(target, dtype) if values.is_floating_point() else values.to(target)


VERBS: dict[str, Callable[..., Any]] = {
    "model.build": build,
    "model.forward": forward,
    "model.forward_backward": forward_backward,
    "model.optim_step": optim_step,
    "model.drop_gradient": drop_gradient,
    "model.load": load,
}
