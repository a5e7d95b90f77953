"""What a pull takes beyond the model and the engine: buckets, however large a tensor is. Resident memory, measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TENSOR_MB = 34
"""The embedding and the head of bench_sync's 17M model each; a bucket is 4 MB."""


def peaks(engine: str) -> dict[str, int]:
    """Most megabytes that each way took on any of two ranks, after a first call."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [
        "bench_sync.py",
        "--engine",
        engine,
        "--size",
        "17M",
        "--bucket-mb",
        "4",
        "--repeats",
        "2",
    ]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^  (\w+) .* peak \+([\d,]+) MB \(first", done.stdout, re.MULTILINE)
    print(done.stdout)
    return {way: int(peak.replace(",", "")) for way, peak in found}


@pytest.mark.ranks
def test_into_the_built_in_engine():
    taken = peaks("transformers")
    assert taken["naive"] > 1.5 * TENSOR_MB, "the measure sees what is gathered whole"
    assert taken["pull"] < 0.7 * TENSOR_MB


@pytest.mark.vllm
@pytest.mark.slow
def test_into_vllm():
    """On CPU vLLM keeps a packed copy of the head, which is made anew."""
    taken = peaks("vllm")
    assert taken["naive"] > 2.5 * TENSOR_MB
    assert taken["pull"] < 1.6 * TENSOR_MB
