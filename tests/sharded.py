"""A transformers model as the trainer holds it, without the trainer: meta, sharded, memory unset."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification


def build(
    path: Path,
    *,
    mesh: DeviceMesh | None = None,
    kind: str = "policy",
    dtype: torch.dtype = torch.float32,
) -> SimpleNamespace:
    """Object with `.hf` and `.kind`; every parameter is NaN, so what is not loaded shows."""
    config = AutoConfig.from_pretrained(path)
    auto = AutoModelForCausalLM
    if kind != "policy":
        auto, config.num_labels = AutoModelForSequenceClassification, 1
    with torch.device("meta"):
        hf = auto.from_config(config, dtype=dtype)
    if mesh is not None:
        for layer in hf.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(hf, mesh=mesh)
    hf.to_empty(device="cpu")
    hf.tie_weights()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.fill_(float("nan"))
    return SimpleNamespace(hf=hf, kind=kind)
