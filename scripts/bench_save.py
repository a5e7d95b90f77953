#!/usr/bin/env python3
"""What a checkpoint costs: seconds for which training stands still, seconds until it counts, and to verify it.

    python scripts/bench_save.py

A Qwen3 with random weights and AdamW's moments, in one process: float32 masters, bfloat16 model files, so that a
checkpoint holds 14 bytes a parameter. "At once" writes, hashes and flushes while training waits; "in the background"
copies, and a thread writes while matrix products stand for the training that goes on.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from fsdprl import learn, writing
from fsdprl.manifest import seal, verify
from fsdprl.mesh import init_distributed, shard_mesh
from fsdprl.models import load_model
from fsdprl.optim import Optimizer
from fsdprl.options import ShardingOptions
from fsdprl.worker import Worker
from fsdprl.world import World


def made(folder: Path, hidden: int, layers: int) -> Worker:
    """A rank with a model in training."""
    config = Qwen3Config(
        vocab_size=32000, hidden_size=hidden, intermediate_size=3 * hidden, head_dim=64,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    init_distributed(World(), dist.HashStore())
    network = load_model(
        str(folder), kind="policy", options=ShardingOptions(), mesh=shard_mesh("cpu", 1),
        device=torch.device("cpu"), dtype="float32", seed=0, trainable=True,
    )  # fmt: skip
    worker = Worker()
    worker.models["policy"] = learn.Model(network, str(folder), None, Optimizer(network))
    return worker


def sealed(out: Path, told: dict[str, Any]) -> None:
    """What the controller does when all ranks have finished."""
    files = {str(Path(path).relative_to(out)): [part] for path, part in told["files"].items()}
    seal(out, 1, files)


def at_once(worker: Worker, out: Path) -> float:
    """Seconds of a save that training waits for."""
    start = time.perf_counter()
    writing.save(worker, model="policy", out=str(out), background=False)
    sealed(out, writing.poll(worker, wait=True))
    return time.perf_counter() - start


def in_background(worker: Worker, out: Path) -> tuple[float, float, float]:
    """Seconds of the copy; until the checkpoint counts; and how much longer a product takes meanwhile, as a ratio."""
    left, right = torch.randn(2, 512, 512)

    def product() -> float:
        start = time.perf_counter()
        left @ right
        return time.perf_counter() - start

    usual = statistics.median(product() for _ in range(50))
    start = time.perf_counter()
    writing.save(worker, model="policy", out=str(out), background=True)
    stall = time.perf_counter() - start
    meanwhile = []
    while not writing.poll(worker, wait=False)["done"]:
        meanwhile.append(product())
    sealed(out, writing.poll(worker, wait=False))
    return stall, time.perf_counter() - start, statistics.mean(meanwhile or [usual]) / usual


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure (default: a temporary one)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        top = Path(name)
        worker = made(top / "model", args.hidden, args.layers)
        waited, stalls, totals, slower, checks = [], [], [], [], []
        for _ in range(args.rounds):
            out = top / "out"
            waited.append(at_once(worker, out))
            shutil.rmtree(out)
            stall, total, ratio = in_background(worker, out)
            stalls.append(stall)
            totals.append(total)
            slower.append(ratio)
            start = time.perf_counter()
            assert verify(out) == ""
            checks.append(time.perf_counter() - start)
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            shutil.rmtree(out)
    count = sum(p.numel() for p in worker.models["policy"].network.parameters())
    print(
        f"{count / 1e6:.0f} M parameters, {size / 1e6:.0f} MB a checkpoint; best of {args.rounds}"
    )
    print(f"at once:           training waits {min(waited):.2f} s")
    print(
        f"in the background: training waits {min(stalls):.2f} s ({min(stalls) / min(waited):.2f} of that); "
        f"counts after {min(totals):.2f} s, in which products take {min(slower):.2f} times as long"
    )
    print(f"verified in {min(checks):.2f} s ({min(checks) / min(waited):.2f} of a save at once)")


if __name__ == "__main__":
    main()
