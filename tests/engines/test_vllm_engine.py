"""The real vLLM: after every pull the live engine is a fresh one that has loaded the checkpoint.

Each case is a process of its own (vLLM takes long to import, and wants to be alone); vllm_parity.py
is what runs there, and this file says what its measurements must be.
"""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdprl.engines import vllm_versions
from fsdprl.engines.vllm_versions import (
    caller_unchanged,
    import_vllm,
    launcher_environment,
    release,
)
from fsdprl.errors import UserError
from fsdprl.stream import Bucket

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 1500


@functools.cache
def measured(kind: str, tp: int = 1, checks: str = "all", *more: str) -> list[dict[str, Any]]:
    """What vllm_parity.py found, by rank."""
    out = Path(tempfile.mkdtemp(prefix="fsdprl-vllm-")) / "found.json"
    launch = [sys.executable]
    if tp > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp}"]
    command = [
        *launch,
        str(HERE / "vllm_parity.py"),
        f"--kind={kind}",
        f"--tp={tp}",
        f"--out={out}",
    ]
    paths = [str(HERE.parents[1] / "src"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [*command, f"--checks={checks}", *more],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]
    for word in ("Traceback", "leaked"):
        assert word not in output, output[-6000:]
    return json.loads(out.read_text())


def assert_parity(found: dict[str, Any]) -> None:
    assert found["unready_at_first"]
    assert found["built_rng_unchanged"] and found["threads_restored"]
    # 0.0: the same tokens, and bit for bit the same log-probs
    assert found["sampled_gap"] == 0.0 and found["greedy_gap"] == 0.0
    assert found["stale"] == 0  # each pull changed the samples, or the equality would show nothing


needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("qwen2_tied", marks=needs_vllm),
        pytest.param("qwen3_moe", marks=needs_vllm),
        pytest.param("qwen2", marks=[*needs_vllm, pytest.mark.slow]),
        pytest.param("qwen3", marks=[*needs_vllm, pytest.mark.slow]),
        pytest.param("llama", marks=[*needs_vllm, pytest.mark.slow]),
    ],
)
def test_engine_in_one_process(kind):
    (found,) = measured(kind)
    assert_parity(found)
    # float32 trainer against float32 engine
    assert found["tokens_plain"] > 1500 and found["tokens_temperature"] > 1500
    assert found["trainer_gap_plain"] < 5e-5 and found["trainer_gap_temperature"] < 5e-5
    for name in ("filters", "top_k", "penalty", "greedy"):
        assert found[f"trainer_gap_{name}"] < 1e-4
    # samples depend on seed and prompt only
    assert found["rng_unchanged"]
    assert found["order_gap"] < 1e-4 and found["batch_gap"] < 1e-4
    assert found["distinct"] == 8
    # endings
    assert found["ends"] and found["finishes"] == 2
    assert found["stop_strings"] >= 1 and found["room"] == 1
    # bad weights
    assert found["refused"] == ["missing", "twice", "shape", "nan"]
    assert found["unready_after"] == found["refused"]
    assert found["mended_gap"] == 0.0 and found["stale_named"]
    # sleep
    assert found["asleep"] and found["no_cache"] and found["dropped"]
    assert found["level_1_gap"] == 0.0 and found["level_2_gap"] == 0.0
    # conversations of several turns, in float32 against the trainer
    assert found["talk_gap"] < 5e-5 and found["talk_tokens"] > 800 and found["talks_same"] == 1.0
    # statistics
    assert found["ticks"] >= 12
    assert found["cache_hit_rate"] > 0.3


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("qwen2_tied", marks=[*needs_vllm, pytest.mark.slow]),
        pytest.param("qwen3_moe", marks=[*needs_vllm, pytest.mark.slow]),
    ],
)
def test_a_compiled_engine(kind):
    """Compiled code holds weights by address; the fresh engines are compiled as well."""
    (found,) = measured(kind, 1, "pulls", "--compiled", "--pulls=2")
    assert_parity(found)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("qwen2_tied", marks=[*needs_vllm, pytest.mark.slow]),
        pytest.param("qwen3_moe", marks=[*needs_vllm, pytest.mark.slow]),
    ],
)
def test_two_ranks_share_an_engine(kind):
    for found in measured(kind, tp=2, checks="pulls,seeds,conversations"):
        assert_parity(found)
        assert found["rng_unchanged"] and found["order_gap"] < 1e-4
        assert found["talk_gap"] < 5e-5 and found["talks_same"] == 1.0


def test_releases_are_compared_as_numbers():
    assert release("0.32.0+cpu") == (0, 32)
    assert release("0.9.1") < vllm_versions.OLDEST < release("0.32.0rc1")


def test_missing_or_old_vllm_is_a_users_mistake(monkeypatch):
    monkeypatch.setattr(vllm_versions, "_installed", lambda name: False)
    with pytest.raises(UserError, match=r"not installed.*--engine.kind transformers"):
        import_vllm()
    monkeypatch.setattr(vllm_versions, "_installed", lambda name: True)
    monkeypatch.setattr(vllm_versions.metadata, "version", lambda name: "0.11.2")
    with pytest.raises(UserError, match=r"0\.11\.2 is installed, 0\.23"):
        import_vllm()


def test_the_callers_random_states_and_threads_come_back():
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with caller_unchanged(torch.device("cpu")):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        set_threads(threads + 1)
        torch.set_num_threads = lambda count: None
    assert torch.set_num_threads is set_threads and torch.get_num_threads() == threads
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_launcher_sees_ranks_only_while_the_engine_is_built(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")
    with launcher_environment(1, 0, 2):
        assert os.environ["RANK"] == "3"  # torchrun's own stays
        assert os.environ["LOCAL_RANK"] == "0" and os.environ["WORLD_SIZE"] == "2"
    assert os.environ["RANK"] == "3" and "LOCAL_RANK" not in os.environ


def test_a_failed_update_puts_the_layers_together_again():
    """Without finalising, the next update would meet half-loaded layers."""
    calls: list[str] = []

    class Model:
        def load_weights(self, weights) -> None:
            calls.append("load")

        def modules(self) -> list[Any]:
            return []

    runner = SimpleNamespace(get_model=Model, vllm_config=None, model_config=None)
    reload = vllm_versions.Reload.__new__(vllm_versions.Reload)
    reload.runner, reload.rows, reload.on_cpu = runner, {}, False
    reload.config = SimpleNamespace(set_current_vllm_config=lambda config: torch.no_grad())
    reload.reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: calls.append("begin"),
        finalize_layerwise_reload=lambda model, config: calls.append("end"),
    )

    def failing():
        yield Bucket([("weight", torch.zeros(1))], True)
        raise RuntimeError("a bad bucket")

    with pytest.raises(RuntimeError, match="a bad bucket"):
        reload.run(failing())
    assert calls == ["begin", "load", "end"]
