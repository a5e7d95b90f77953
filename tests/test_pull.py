"""A pull that went wrong is caught before anything is sampled with it, and names the parameter."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from fsdprl import rollout
from fsdprl.engines import EngineError
from fsdprl.learn import Model
from fsdprl.options import EngineOptions
from fsdprl.stream import Bucket
from fsdprl.worker import Worker
from tests import solo, tiny

VICTIM = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def worker() -> Worker:
    path = str(tiny.checkpoint("qwen3"))
    worker = Worker(models={"policy": Model(solo.load(path), path, None, None)})
    options: Any = {"kind": "transformers", "path": path, "options": vars(EngineOptions())}
    rollout.build(worker, **options, dtype="float32", max_model_len=32, seed=0, chat_template="")
    rollout.pull(worker, model="policy", version=0)
    assert len(sample(worker, 0)) == 2
    return worker


def sample(worker: Worker, version: int) -> torch.Tensor:
    sampling = {"max_new_tokens": 4, "stop": []}
    made = rollout.generate(
        worker, first_row=[0], lengths=torch.tensor([2]), ids=torch.tensor([5, 6], dtype=torch.int32),
        infos=[{}], seeds=torch.tensor([1, 2]), n=2, sampling=sampling, version=version,
    )  # fmt: skip
    return made["length"]


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        ("stale", ValueError, "differ between trainer and engine"),
        ("missing", EngineError, "lacks weight"),
        ("shape", EngineError, "has shape"),
        ("nan", EngineError, "not finite"),
    ],
)
def test_faults_of_a_pull(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, damage: str, error: Any, text: str
):
    network = worker.models["policy"].network
    victim = network.hf.get_parameter(VICTIM)
    old = victim.detach().full_tensor().clone()
    with torch.no_grad():
        victim.add_(0.5 if damage != "nan" else float("nan"))
    stream = rollout.weight_stream
    instead = {"stale": [old], "missing": [], "shape": [old[:-1]]}

    def damaged(*args: Any, **options: Any):
        for bucket in stream(*args, **options):
            tensors = []
            for name, tensor in bucket.tensors:
                swap = name == VICTIM and damage in instead
                tensors += [(name, t) for t in (instead[damage] if swap else [tensor])]
            yield Bucket(tensors, bucket.layer_end)

    monkeypatch.setattr(rollout, "weight_stream", damaged)
    with pytest.raises(error, match=text) as raised:
        rollout.pull(worker, model="policy", version=1)
    assert VICTIM in str(raised.value)
    for version in (0, 1):
        with pytest.raises((ValueError, EngineError), match=r"version|did not complete"):
            sample(worker, version)
    monkeypatch.undo()
    with torch.no_grad():
        placed = distribute_tensor(old, victim.device_mesh, victim.placements)
        victim.copy_(placed)
    rollout.pull(worker, model="policy", version=2)
    assert len(sample(worker, 2)) == 2
