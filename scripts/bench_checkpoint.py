#!/usr/bin/env python3
"""What a checkpoint costs to write and to verify: a file of random float32 tensors, as optimizer states are.

    python scripts/bench_checkpoint.py --gb 1 --folder runs

Verifying reads what has just been written from the page cache; after a restart it also reads the disk.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from fsdprl.checkpoint_io import stream_snapshot, tensors_plan
from fsdprl.manifest import seal, verify
from fsdprl.run_checkpoints import Checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint (default 1)")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    count = int(args.gb * 1e9 / 4 / 16)
    tensors = {f"t{i}": torch.randint(1 << 30, (count,)).float() for i in range(16)}
    args.folder.mkdir(parents=True, exist_ok=True)
    best = [float("inf")] * 3
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpoints = Checkpoints(Path(folder))
        for step in range(args.repeats):
            start = time.perf_counter()
            part = checkpoints.begin(step)
            files = stream_snapshot(tensors, tensors_plan(tensors), part)
            written = time.perf_counter()
            parts = {str(Path(name).relative_to(part)): t.facts() for name, t in files.items()}
            seal(part, step, parts)
            whole = checkpoints.commit(part, step, keep=1)
            done = time.perf_counter()
            assert verify(whole) == ""
            seconds = (written - start, done - written, time.perf_counter() - done)
            best = [min(pair) for pair in zip(best, seconds, strict=True)]
    write, sealing, check = best
    print(
        f"{args.gb:g} GB, best of {args.repeats}: write, hash and flush {write:.2f} s, manifest {sealing:.2f} s"
    )
    print(f"verify {check:.2f} s: {check / (write + sealing):.0%} of the save")


if __name__ == "__main__":
    main()
