#!/usr/bin/env python3
"""Share of a GRPO step that is the controller's own: wall time that no worker's phase covers.

    python scripts/bench_overhead.py                 # 138M parameters, one rank, some minutes on 2 CPU cores
    python scripts/bench_overhead.py --ranks 2
    python scripts/bench_overhead.py --size smoke    # a few seconds, to see that it runs

Runs recipes/grpo.py on a random model and reads `timing/controller_overhead`, a share of the step, from its
metrics.jsonl, for every step but the first and the last. Its steps are small (8 prompts x 4 answers of at most 32
tokens), so that the share is an upper bound for real ones.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WANTED = 0.02


def spread(sample) -> float:
    """A reward that differs within every group, so that no group is left out."""
    return float(sum(sample.ids) % 7)


def metrics_of(args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of a short run."""
    from bench_models import SMOKE
    from bench_sync import SHAPES

    from fsdprl.tasks.addition import write_dataset

    shape = next(shape for shape in (*SHAPES, SMOKE) if shape.name == args.size)
    shape.write(folder / "model")
    data = write_dataset(folder, count=200, demonstration_count=1)
    start = [sys.executable]
    if args.ranks > 1:
        start += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(args.ranks),
        ]
    flags = {
        "model": folder / "model",
        "data": data["train"],
        "rewards": f"{Path(__file__).resolve()}:spread",
        "steps": args.steps,
        "prompts-per-step": 8,
        "group-size": 4,
        "minibatches": 2,
        "max-prompt-length": 32,
        "max-new-tokens": 32,
        "eval-every": 0,
        "engine.kind": args.engine,
        "run.out": folder / "run",
        "run.save-every": 0,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    subprocess.run([*start, str(ROOT / "recipes" / "grpo.py"), *words], check=True, timeout=3600)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description="The controller's share of a step.")
    parser.add_argument("--size", default="138M", help="138M, 520M or smoke")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--engine", default="auto", help="as --engine.kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = metrics_of(args, Path(folder))[1:-1]  # the first warms up, the last saves
    shares = [step["timing/controller_overhead"] for step in steps]
    seconds = statistics.median(step["timing/all"] for step in steps)
    print(
        f"{args.size}, ranks: {args.ranks}, {seconds:.3f} s a step, controller's own share of it:"
    )
    print(
        f"  median {statistics.median(shares):.2%}, worst {max(shares):.2%} (wanted: below {WANTED:.0%})"
    )


if __name__ == "__main__":
    main()
