"""What a rank does when it is told to make room."""

import gc
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdprl import device, moving
from fsdprl.learn import Model
from fsdprl.models import pack
from fsdprl.optim import Optimizer
from fsdprl.worker import Worker
from tests import solo, tiny

META = torch.device("meta")
NOTHING: dict[str, Any] = {"off": {}, "onto": {}, "collect": False, "release": False}


def trained() -> Model:
    network: Any = nn.Linear(3, 2)
    return Model(network, "", None, Optimizer(network))


def places(model: Model) -> tuple[str, str]:
    assert model.optimizer is not None
    return (
        next(model.network.parameters()).device.type,
        model.optimizer.state["exp_avg"]["weight"].device.type,
    )


def test_parts_move_one_by_one():
    worker = Worker(device=META, models={"policy": trained(), "critic": trained()})
    moving.move(worker, **NOTHING | {"onto": {"policy": ["weights"]}})
    assert places(worker.models["policy"]) == ("meta", "cpu")
    moving.move(worker, **NOTHING | {"onto": {"policy": ["optimizer"]}})
    assert places(worker.models["policy"]) == ("meta", "meta")
    assert places(worker.models["critic"]) == ("cpu", "cpu")


def test_room_is_made_before_it_is_taken(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    for name in ("policy", "critic"):
        place = SimpleNamespace(to=lambda target, name=name: order.append(f"{name} {target.type}"))
        monkeypatch.setitem(MODELS, name, SimpleNamespace(optimizer=place))
    monkeypatch.setattr(gc, "collect", lambda: order.append("collect"))
    monkeypatch.setattr(device, "empty_cache", lambda: order.append("release"))
    moves = {"off": {"policy": ["optimizer"]}, "onto": {"critic": ["optimizer"]}}
    worker = Worker(device=META, models=MODELS)
    moving.move(worker, **moves, collect=True, release=True)
    assert order == ["policy cpu", "collect", "release", "critic meta"]


MODELS: dict[str, Any] = {}


def test_the_peak_is_that_since_the_last_call():
    worker = Worker()
    moving.move(worker, **NOTHING)
    # Straight from the system: what torch frees may stay with malloc for later, and resident.
    block = mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    with_block = moving.move(worker, **NOTHING)["peak_bytes"]
    block.close()
    moving.move(worker, **NOTHING)
    assert moving.move(worker, **NOTHING)["peak_bytes"] < with_block - (30 << 20)


def test_the_engine_sleeps_and_wakes():
    calls: list[Any] = []
    engine = SimpleNamespace(sleep=calls.append, wake=calls.append)
    worker = Worker(engine=engine)
    moving.sleep(worker, level=2)
    moving.wake(worker, tags=["weights"])
    assert calls == [2, ["weights"]]


def test_a_sharded_model_trains_on_after_a_move():
    """On CPU the same memory: what must not happen is that optimizer and model lose each other."""
    rows = solo.rows(9, 7)
    weights = []
    for moves in (0, 1):
        network = solo.load(tiny.checkpoint("qwen3"))
        worker = Worker(models={"policy": Model(network, "", None, Optimizer(network))})
        optimizer = worker.models["policy"].optimizer
        for _ in range(2):
            (-network(pack(rows, solo.CPU))[0].sum()).backward()
            optimizer.step(lr=1e-2)
            if moves:
                both = {"policy": ["weights", "optimizer"]}
                moving.move(worker, **NOTHING | {"off": both, "onto": both})
        weights.append([p.detach().full_tensor() for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.gpu
def test_weights_and_states_leave_the_accelerator_and_come_back():
    network: Any = nn.Linear(1 << 12, 1 << 12, device=device.local_device(0))
    model = Model(network, "", None, Optimizer(network))
    worker = Worker(device=device.local_device(0), models={"policy": model})
    before = network.weight.detach().cpu()
    moving.move(worker, **NOTHING)
    both = {"policy": ["weights", "optimizer"]}
    moving.move(worker, **NOTHING | {"off": both, "release": True})
    assert places(model) == ("cpu", "cpu")
    assert moving.move(worker, **NOTHING | {"onto": both})["peak_bytes"] < 1 << 20
    assert torch.equal(network.weight.detach().cpu(), before)
    assert places(model) == (device.device_type(), device.device_type())
