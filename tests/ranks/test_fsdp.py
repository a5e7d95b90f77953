"""Gradients, norms and steps do not depend on the number of ranks, nor on who holds which row."""

import functools
import sys
from pathlib import Path

import pytest
import solo
import tiny
import torch
from safetensors.torch import load_file

from fsdprl.world import World
from tests.warm import WarmJob

SCRIPT = Path(__file__).with_name("fsdp_ranks.py")
SOURCES = {
    "plain": "qwen3",
    "recomputed": "qwen2_tied",
    "value": "llama",
    "single": "qwen3_moe",
    "half": "qwen3",
    "replicas": "qwen2_tied",
    "small": "qwen2_tied",
}
RUNS = {
    2: ("plain", "recomputed", "value", "single", "half", "replicas", "small"),
    3: ("plain", "single"),
    4: ("replicas",),
}
"""Ranks -> cases; three ranks leave one without rows, four are two replicas of two shards."""
TOLERANCE = {"single": 1e-5, "half": 3e-2}

pytestmark = pytest.mark.ranks


@functools.cache
def alone(case):
    """What one rank computes; replicas have no meaning there and compare with plain shards."""
    sys.path.insert(0, str(SCRIPT.parent))
    import fsdp_ranks

    solo.mesh()
    case = "recomputed" if case in ("replicas", "small") else case
    return fsdp_ranks.run(case, tiny.checkpoint(SOURCES[case]), World())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What every case made on every number of ranks, in one launch of four."""
    made = tmp_path_factory.mktemp("fsdp")
    arguments = [
        f"{ranks}:{case}:{tiny.checkpoint(SOURCES[case])}"
        for ranks, cases in RUNS.items()
        for case in cases
    ]
    end = WarmJob([str(SCRIPT), str(made), *arguments], ranks=4).end(150)
    assert end.code == 0, end.err[-6000:]
    return made


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks, cases in RUNS.items() for case in cases]
)
def test_loss_gradient_norm_and_steps_equal_one_rank(folder, ranks, case):
    """Two AdamW (or descent) steps with clipping, uneven rows and empty microbatches."""
    got, want = load_file(folder / f"{case}-{ranks}.safetensors"), alone(case)
    assert got.keys() == want.keys()
    tolerance = TOLERANCE.get(case, 1e-10)
    for name, value in want.items():
        scale = float(value.abs().max())
        assert scale > 0.0, name
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert float(want["norm0"]) > 0.5  # so that clipping took part
