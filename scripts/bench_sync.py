#!/usr/bin/env python3
"""Seconds, bytes per second and peak extra memory of a weight pull, against two yardsticks, in one run.

    torchrun --standalone --nproc-per-node 2 scripts/bench_sync.py               # built-in engine
    torchrun --standalone --nproc-per-node 2 scripts/bench_sync.py --engine vllm
    ... --smoke                                                                  # a few seconds

The pull is the verb that `sampler.pull()` sends: float32 shards are cast, gathered bucket by bucket,
loaded by the live engine, and checksums of what was sent and received are compared. `naive` gathers
each parameter whole (DTensor.full_tensor) and hands it to the same engine, without the comparison.
`memcpy` copies as many bytes once, on every rank, in blocks of 512 MB.

Interleaved repeats after one that does not count; best time, highest peak over the repeats; of the
slowest rank, and the rank that took most memory. Run it on a machine that does nothing else.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from bench_models import SMOKE, Shape
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from fsdprl import device, learn, rollout, worker
from fsdprl.options import EngineOptions, ShardingOptions
from fsdprl.shards import tied_names
from fsdprl.stream import Bucket
from fsdprl.worker import Worker
from fsdprl.world import World

SHAPES = [
    Shape("138M", 768, 12, 2176),
    Shape("520M", 1280, 22, 3456),
    Shape("17M", 128, 2, 256, 65_536),  # all in two large tensors
]
COPIED_BYTES = 512 << 20  # beyond any cache, and small beside the models


class Bench:
    """One rank with a sharded model and a live engine."""

    def __init__(self, rank: Worker, path: Path, args: argparse.Namespace) -> None:
        self.rank, self.version = rank, 0
        learn.build(
            rank, model="policy", path=str(path), kind="policy", dtype=args.dtype, seed=0,
            sharding=asdict(ShardingOptions()), optimizer=None if args.frozen else {"kind": "sgd"},
        )  # fmt: skip
        options = EngineOptions(
            kind=args.engine, bucket_mb=args.bucket_mb, kv_cache_memory_bytes=256 << 20
        )
        rollout.build(
            rank, kind=args.engine, path=str(path), options=asdict(options), dtype=args.dtype,
            max_model_len=256, seed=0, chat_template="",
        )  # fmt: skip
        self.network = rank.models["policy"].network
        self.dtype = rollout.DTYPES[args.dtype]
        count = sum(parameter.numel() for parameter in self.network.parameters())
        self.bytes = count * self.dtype.itemsize
        most = min(self.bytes, COPIED_BYTES)
        self.source = torch.ones(most, dtype=torch.uint8, device=rank.device)
        self.target = torch.ones_like(self.source)

    def pull(self) -> None:
        self.version += 1
        rollout.pull(self.rank, model="policy", version=self.version)

    def naive(self) -> None:
        self.version += 1
        self.rank.engine.update_weights(self.whole(), self.version)

    def memcpy(self) -> None:
        for done in range(0, self.bytes, len(self.source)):
            count = min(self.bytes - done, len(self.source))
            self.target[:count].copy_(self.source[:count])

    def whole(self) -> Iterator[Bucket]:
        """Each parameter gathered whole, in the precision it is trained in, then cast."""
        hf = self.network.hf
        assert not any(len(names) > 1 for names in tied_names(hf).values())
        for name, parameter in hf.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield Bucket([(name, full.detach().to(self.dtype))], True)


def joined() -> Worker:
    """This process as a rank, under torchrun or alone."""
    world = World.from_env()
    store = next(iter(rendezvous("env://")))[0] if world.torchrun else dist.HashStore()
    rank = Worker(world=world, rendezvous=store)
    worker.start(rank)
    return rank


def measured(call: Callable[[], None]) -> tuple[float, int]:
    """Seconds of the slowest rank, and bytes that a call took beyond what was held before it."""
    device.synchronize()
    device.reset_peak_memory()
    held = device.peak_memory_bytes()
    dist.barrier()
    begin = time.perf_counter()
    call()
    device.synchronize()
    seconds = time.perf_counter() - begin
    found = torch.tensor([seconds, float(device.peak_memory_bytes() - held)], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), int(found[1])


def main() -> None:
    """Measure and print one line a way and size."""
    parser = argparse.ArgumentParser(description="Measure weight pulls into a live engine.")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--size", choices=[shape.name for shape in SHAPES], default="138M")
    parser.add_argument("--dtype", default="float32", help="of the engine")
    parser.add_argument("--bucket-mb", type=float, default=16.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--frozen", action="store_true", help="shards in the engine's dtype")
    parser.add_argument("--checkpoints", type=Path, help="keep random checkpoints here")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    disable_progress_bar()
    shape = SMOKE if args.smoke else next(s for s in SHAPES if s.name == args.size)
    rank = joined()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.checkpoints or Path(temporary)).resolve() / shape.name
        if rank.world.rank == 0 and not (folder / "tokenizer_config.json").exists():
            shape.write(folder)
        place = torch.zeros(4096, dtype=torch.uint8)
        place[: len(os.fsencode(folder))] = torch.tensor([*os.fsencode(folder)])
        dist.broadcast(place, 0)
        bench = Bench(rank, Path(bytes(place.tolist()).rstrip(b"\0").decode()), args)
        ways = {"pull": bench.pull, "naive": bench.naive, "memcpy": bench.memcpy}
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for _ in range(args.repeats + 1):
            for name, call in ways.items():
                found[name].append(measured(call))
        dist.barrier()
    if rank.world.rank == 0:
        print(
            f"{shape.name} {args.dtype} into {args.engine}, {bench.bytes / 1e6:,.0f} MB, "
            f"{rank.world.size} ranks, buckets of {args.bucket_mb:g} MB"
        )
        for name, runs in found.items():
            seconds, peak = min(s for s, _ in runs[1:]), max(p for _, p in runs[1:])
            print(
                f"  {name:<7} {seconds:8.3f} s  {bench.bytes / seconds / 1e9:7.2f} GB/s  "
                f"peak +{peak / 1e6:,.0f} MB (first call +{runs[0][1] / 1e6:,.0f} MB)"
            )
    worker.shutdown(rank)


if __name__ == "__main__":
    main()
