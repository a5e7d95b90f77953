"""Loading, saving and streaming over several ranks: uneven shards, ranks without rows, replicas."""

import shutil
from pathlib import Path

import pytest
import tiny
import torch

from fsdprl.checkpoint_io import save_tensors
from tests.warm import WarmJob

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")

SOURCES = {
    "tied": {"kind": "qwen2_tied", "shard": "20KB"},
    "untied_large": {"kind": "qwen2", "num_hidden_layers": 12},
    "bf16": {"kind": "qwen3", "dtype": torch.bfloat16},
    "moe": {"kind": "qwen3_moe", "shard": "20KB"},
    "reward": {"kind": "llama", "head": "reward"},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Checkpoints and state, and what 1, 2, 3 and 2 x 2 ranks made of them in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, settings in SOURCES.items():
        shutil.copytree(tiny.checkpoint(**settings), folder / name / "source")
    generator = torch.Generator().manual_seed(1)
    state = {f"p{rows}": torch.randn(rows, 3, generator=generator) for rows in (1, 2, 5, 12)}
    save_tensors({**state, "step": torch.tensor(3.0)}, folder / "state")
    end = WarmJob([str(SCRIPT), str(folder)], ranks=4).end(150)
    assert end.code == 0, end.err[-6000:]
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["one", "two", "three", "replicas"])
def test_every_file_is_the_source_to_the_byte(work, case):
    outs = [*work.glob(f"*/saved-{case}"), *work.glob(f"*/snapshot-{case}")]
    assert len(outs) >= 4
    for out in outs:
        source = out.parent / "source"
        names = sorted(file.name for file in source.iterdir())
        assert sorted(file.name for file in out.iterdir()) == names
        for name in names:
            assert (out / name).read_bytes() == (source / name).read_bytes(), out / name


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["one", "two", "three", "replicas"])
def test_named_tensors_do_not_depend_on_ranks(work, case):
    name = "optimizer.safetensors"
    assert (work / f"state-{case}" / name).read_bytes() == (work / "state" / name).read_bytes()
