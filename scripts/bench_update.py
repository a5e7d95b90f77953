#!/usr/bin/env python3
"""Tokens per second of forward_backward + optim_step against two plain loops, in one run.

    python scripts/bench_update.py            # 30M and 138M parameters, then growth with length
    python scripts/bench_update.py --smoke    # a few seconds, to see that it runs

The plain loops are written here by hand, with nothing of fsdprl: transformers' own forward over
batches padded to their longest row, as most trainers do it, and over one row at a time, without
padding or packing. All three do the same work on the same weights: the mean negative
log-likelihood of every token but a row's first, its gradient, clipping, one AdamW step. Their
losses and gradient norms are compared before anything is timed.

One process, one rank, repeats interleaved, best time of each. Run it on a machine that does
nothing else.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from bench_models import SMOKE, Shape
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from fsdprl import device, learn, mesh
from fsdprl.functions import function_ref
from fsdprl.options import ShardingOptions
from fsdprl.packing import pack_rows
from fsdprl.store import Row
from fsdprl.worker import Worker
from fsdprl.world import World

LR, DECAY, CLIP = 1e-4, 0.01, 1.0


SHAPES = [
    Shape("30M", hidden=384, layers=10, ffn=1024, tied=True, context=32_768),
    Shape("138M", hidden=768, layers=12, ffn=2176, context=32_768),
]

Update = Callable[[], tuple[float, float]]
"""One whole update; returns (loss, gradient norm)."""


def nll(logp):
    """Negative log-likelihood, not reduced."""
    return -logp, {}


class Ours:
    """The worker's verbs as the controller calls them, on one rank and without the wire."""

    def __init__(self, folder: Path, rows: list[Tensor], dtype: str, microbatch: int) -> None:
        self.worker = Worker(world=World(), device=device.local_device(0))
        learn.build(
            self.worker,
            model="policy",
            path=str(folder),
            kind="policy",
            sharding=asdict(ShardingOptions(tokens_per_microbatch=microbatch)),
            dtype=dtype,
            seed=0,
            optimizer={},
        )
        for i, ids in enumerate(rows):
            mask = torch.ones(len(ids), dtype=torch.bool)
            mask[0] = False
            self.worker.store.put(i, Row(ids=ids.int(), mask=mask))
        self.rows = torch.arange(len(rows))
        packs = pack_rows([len(ids) for ids in rows], microbatch)
        self.microbatch = torch.zeros(len(rows), dtype=torch.int32)
        for number, places in enumerate(packs):
            self.microbatch[places] = number
        self.microbatches = torch.tensor(len(packs))
        self.weight = torch.full((len(rows),), 1.0 / loss_tokens(rows), dtype=torch.float64)

    def __call__(self) -> tuple[float, float]:
        sums = learn.forward_backward(
            self.worker,
            model="policy",
            rows=self.rows,
            microbatch=self.microbatch,
            microbatches=self.microbatches,
            losses=[asdict_of(nll)],
            samples={"weight": self.weight, "temperature": torch.ones_like(self.weight)},
        )
        step = learn.optim_step(
            self.worker, model="policy", lr=LR, weight_decay=DECAY, max_grad_norm=CLIP
        )
        return sums["loss"], step["grad_norm"]


class Plain:
    """The loop one would write by hand: transformers, padding, torch.optim."""

    def __init__(self, folder: Path, rows: list[Tensor], dtype: str, batch_rows: int) -> None:
        self.device = device.local_device(0)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.to(self.device).train()
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        spared = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY)
        self.half = None if dtype == "float32" else getattr(torch, dtype)
        self.batches = [rows[i : i + batch_rows] for i in range(0, len(rows), batch_rows)]
        self.scale = 1.0 / loss_tokens(rows)

    def __call__(self) -> tuple[float, float]:
        total = 0.0
        for batch in self.batches:
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(self.device)
            lengths = torch.tensor([len(row) for row in batch], device=self.device)
            real = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
            padded = None if len(batch) == 1 else real.long()
            with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
                logits = self.model(ids, attention_mask=padded, use_cache=False).logits
            wanted = ids.roll(-1, dims=1)  # the last column predicts nothing and is masked
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), wanted.flatten(), reduction="none"
            )
            loss = losses.view_as(ids)[:, :-1][real[:, 1:]].sum() * self.scale
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.item()


def asdict_of(loss: Callable[..., object]) -> dict[str, object]:
    """A loss as it travels to a worker."""
    ref = function_ref(loss)
    return {"module": ref.module, "qualname": ref.qualname, "kwargs": ref.kwargs}


def loss_tokens(rows: list[Tensor]) -> int:
    """Every token but a row's first."""
    return sum(len(ids) - 1 for ids in rows)


def ragged_rows(count: int, shortest: int, longest: int, vocabulary: int) -> list[Tensor]:
    """`count` rows of random ids, lengths evenly spaced on a log scale, in random order."""
    draw = torch.Generator().manual_seed(0)
    ratio = math.log(longest / shortest) / max(count - 1, 1)
    lengths = [round(shortest * math.exp(i * ratio)) for i in range(count)]
    order = torch.randperm(count, generator=draw).tolist()
    return [torch.randint(vocabulary, (lengths[i],), generator=draw) for i in order]


def best_seconds(updates: dict[str, Update], args: argparse.Namespace) -> dict[str, float]:
    """Shortest time of each update after one warm-up, taking turns."""
    clock = time.process_time if args.processor_time else time.perf_counter
    best = dict.fromkeys(updates, math.inf)
    for repeat in range(args.repeats + 1):
        for name, update in updates.items():
            device.synchronize()
            start = clock()
            update()
            device.synchronize()
            if repeat:
                best[name] = min(best[name], clock() - start)
    return best


def check_equal(updates: dict[str, Update], tolerance: float) -> None:
    """All loops compute the same loss and gradient norm from the same weights."""
    results = {name: update() for name, update in updates.items()}
    first = next(iter(results.values()))
    for name, found in results.items():
        for got, want in zip(found, first, strict=True):
            assert abs(got - want) <= tolerance * abs(want), f"not the same work: {name} {results}"


def compare(shape: Shape, rows: list[Tensor], args: argparse.Namespace) -> None:
    """Print tokens per second of the three loops and the ratio to the better plain one."""
    with tempfile.TemporaryDirectory() as folder:
        shape.write(Path(folder))
        updates: dict[str, Update] = {
            "fsdprl, packed": Ours(Path(folder), rows, args.dtype, args.microbatch),
            "plain, padded": Plain(Path(folder), rows, args.dtype, args.batch_rows),
            "plain, row by row": Plain(Path(folder), rows, args.dtype, 1),
        }
    check_equal(updates, 1e-3 if args.dtype == "float32" else 2e-2)
    seconds = best_seconds(updates, args)
    tokens = sum(len(ids) for ids in rows)
    lengths = sorted(len(ids) for ids in rows)
    print(f"{shape.name}: {len(rows)} rows of {lengths[0]} to {lengths[-1]}, {tokens} tokens")
    for name, taken in seconds.items():
        print(f"  {name:20} {tokens / taken:10.0f} tokens/s")
    plain = min(seconds["plain, padded"], seconds["plain, row by row"])
    ratio = plain / seconds["fsdprl, packed"]
    print(f"  ratio to the better plain loop: {ratio:.2f} (wanted: at least 0.9)", flush=True)


def growth(shape: Shape, lengths: list[int], row: int, args: argparse.Namespace) -> None:
    """Print how the time of one packed microbatch grows with its length."""
    print(f"{shape.name}: one microbatch of {row}-token rows")
    first = None
    with tempfile.TemporaryDirectory() as folder:
        shape.write(Path(folder))
        for length in lengths:
            rows = [torch.randint(shape.vocabulary, (row,)) for _ in range(length // row)]
            update = Ours(Path(folder), rows, args.dtype, length)
            taken = best_seconds({"": update}, args)[""] / length
            first = first or taken
            print(
                f"  {length:6} tokens {1 / taken:8.0f} tokens/s, time a token {taken / first:.2f}",
                flush=True,
            )


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description="Tokens per second of one update.")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and short rows")
    parser.add_argument("--only", default="", help="30M, 138M or growth")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--batch-rows", type=int, default=4, help="rows of a padded batch")
    parser.add_argument("--microbatch", type=int, default=4096, help="tokens of a packed one")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count processor seconds: for a busy machine, with --threads 1",
    )
    accelerated = device.device_type() != "cpu"
    parser.add_argument("--dtype", default="bfloat16" if accelerated else "float32")
    args = parser.parse_args()
    disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    mesh.init_distributed(World(), torch.distributed.HashStore())
    print(f"{device.device_type()}, {torch.get_num_threads()} threads, {args.dtype}")
    if args.smoke:
        compare(SMOKE, ragged_rows(6, 8, 64, SMOKE.vocabulary), args)
        growth(SMOKE, [256, 512], 32, args)
    else:
        for shape in SHAPES:
            if args.only in ("", shape.name):
                compare(shape, ragged_rows(args.rows, 32, 2048, shape.vocabulary), args)
        if args.only in ("", "growth"):
            growth(SHAPES[0], [4096, 8192, 16384], 256, args)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
