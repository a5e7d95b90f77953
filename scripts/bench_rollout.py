#!/usr/bin/env python3
"""Tokens per second of a rollout through fsdprl's vLLM engine against `LLM.generate` on the same prompts.

    python scripts/bench_rollout.py            # 30M parameters, 8 prompts x 8 answers of up to 32 new tokens
    python scripts/bench_rollout.py --smoke

`ours` is the verb that `sampler.generate()` sends: requests are made, tokens sampled, and every
answer becomes a row with its log-probs. `direct` hands the same prompts and sampling parameters, with
a seed and the sampled token's log-prob a request, to the same engine's `LLM.generate` and throws the
answers away. `plain` (with --plain) does so without seeds and log-probs, which training needs, to show
what they cost. `inside` is the share of our time that the engine's `LLM.generate` takes, in the same call:
unlike a ratio of two calls, it hardly depends on what else the machine does. CPU seconds depend on it less
than seconds.

One process, repeats interleaved, best of each; the answers are compared first. Run it on a machine
that does nothing else.
"""

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_models import SMOKE, Shape
from bench_sync import joined
from transformers.utils.logging import disable_progress_bar

from fsdprl import learn, rollout, worker
from fsdprl.engines.vllm_versions import import_vllm
from fsdprl.options import EngineOptions, ShardingOptions

SIZE = Shape("30M", hidden=384, layers=10, ffn=1024)


class Bench:
    """A rank with a live vLLM, and prompts."""

    def __init__(self, path: Path, args: argparse.Namespace, count: int, most: int) -> None:
        self.rank, self.vllm, self.most = joined(), import_vllm(), most
        learn.build(
            self.rank, model="policy", path=str(path), kind="policy", dtype=args.dtype, seed=0,
            sharding=asdict(ShardingOptions()), optimizer=None,
        )  # fmt: skip
        options = EngineOptions(kind="vllm", kv_cache_memory_bytes=args.cache_mb << 20)
        rollout.build(
            self.rank, kind="vllm", path=str(path), options=asdict(options), dtype=args.dtype,
            max_model_len=128 + most, seed=0, chat_template="",
        )  # fmt: skip
        rollout.pull(self.rank, model="policy", version=1)
        draw = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(16, 128, (count // 8,), generator=draw)
        self.ids = torch.randint(60, 500, (int(self.lengths.sum()),), generator=draw).int()
        self.seeds = torch.randint(1 << 60, (len(self.lengths) * 8,), generator=draw)
        self.llm = self.rank.engine.llm
        self.generate, self.inside = self.llm.generate, 0.0
        self.llm.generate = self.watched

    def watched(self, *args: Any, **options: Any) -> Any:
        """LLM.generate, with the time that it takes."""
        begin = time.perf_counter()
        try:
            return self.generate(*args, **options)
        finally:
            self.inside += time.perf_counter() - begin

    def ours(self) -> list[list[int]]:
        """Eight answers to each prompt, as rows."""
        sampling = {"max_new_tokens": self.most, "stop": []}
        firsts = [8 * i for i in range(len(self.lengths))]
        rollout.generate(
            self.rank, first_row=firsts, lengths=self.lengths, ids=self.ids, infos=[{}] * len(firsts),
            seeds=self.seeds, n=8, sampling=sampling, version=1,
        )  # fmt: skip
        rows = self.rank.store.rows
        return [rows[i].ids[rows[i].mask].tolist() for i in range(len(self.seeds))]

    def direct(self, as_ours: bool = True) -> list[list[int]]:
        """The same through `LLM.generate`."""
        prompts = [part.tolist() for part in self.ids.split(self.lengths.tolist())]
        requests = [{"prompt_token_ids": prompts[i // 8]} for i in range(len(self.seeds))]
        same = {"logprobs": 0, "flat_logprobs": True, "detokenize": False}
        wanted = [{"seed": seed} | same if as_ours else {} for seed in self.seeds.tolist()]
        parameters = [self.vllm.SamplingParams(max_tokens=self.most, **each) for each in wanted]
        outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def plain(self) -> list[list[int]]:
        return self.direct(as_ours=False)

    def timed(self, way: str) -> "Call":
        """One call, from an empty prefix cache."""
        self.llm.reset_prefix_cache()
        self.inside, begin, used = 0.0, time.perf_counter(), time.process_time()
        answers = getattr(self, way)()
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        return Call(answers, seconds, used, self.inside / seconds)


@dataclass(frozen=True)
class Call:
    """Answers, and what they took."""

    answers: list[list[int]]
    seconds: float
    cpu_seconds: float
    inside: float
    """Share of the seconds that went by inside LLM.generate."""


def report(calls: dict[str, list[Call]], tokens: int, dtype: str) -> None:
    """Print one line a way, from its best call."""
    answers = len(calls["ours"][0].answers)
    print(f"{answers} answers, {tokens:,} tokens, {dtype}, {torch.get_num_threads()} threads")
    seconds = {way: min(call.seconds for call in made) for way, made in calls.items()}
    cpu = {way: min(call.cpu_seconds for call in made) for way, made in calls.items()}
    for way in calls:
        print(
            f"  {way:<7} {tokens / seconds[way]:10,.0f} tokens/s  {seconds['direct'] / seconds[way]:.3f} of direct"
            f"    {tokens / cpu[way]:10,.0f} tokens per CPU second  {cpu['direct'] / cpu[way]:.3f} of direct"
        )
    inside = max(call.inside for call in calls["ours"])
    print(f"  {inside:.4f} of our time is inside LLM.generate")


def main() -> None:
    """Measure and print one line a way."""
    parser = argparse.ArgumentParser(description="Measure rollouts through vLLM.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="also without seeds and log-probs")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    disable_progress_bar()
    count, most = (32, 8) if args.smoke else (64, 32)
    with tempfile.TemporaryDirectory() as folder:
        (SMOKE if args.smoke else SIZE).write(Path(folder))
        bench = Bench(Path(folder), args, count, most)
    ways = ("ours", "direct", "plain")[: 3 if args.plain else 2]
    expected = bench.timed("ours").answers  # warm-up
    assert bench.timed("direct").answers == expected, "the two ways sampled different answers"
    calls: dict[str, list[Call]] = {way: [] for way in ways}
    for turn in range(args.repeats):
        for way in ways if turn % 2 else reversed(ways):
            calls[way].append(bench.timed(way))
    report(calls, sum(map(len, expected)), args.dtype)
    worker.shutdown(bench.rank)


if __name__ == "__main__":
    main()
