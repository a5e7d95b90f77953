"""One process (or torchrun rank) with a live vLLM and fresh ones: what test_vllm_engine.py starts.

    python vllm_parity.py --kind qwen2_tied --out result.json
    torchrun --standalone --nproc-per-node 2 vllm_parity.py --kind qwen3_moe --tp 2 --out result.json

Rank 0 writes {"name of a check": number or bool}; what has no business to fail raises.
"""

import argparse
import asyncio
import copy
import json
import random
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny import checkpoint, tokenizer
from transformers import AutoModelForCausalLM

from fsdprl import conversing
from fsdprl.engines import EngineError, Request, Sampling, build_engine
from fsdprl.engines.decoding import filter_logits
from fsdprl.engines.vllm_versions import import_vllm, keep, launcher_environment
from fsdprl.options import EngineOptions
from fsdprl.store import Row, Store
from fsdprl.stream import Bucket, shard_checksums, weight_stream
from fsdprl.world import World

vllm = import_vllm()

# vLLM's CPU attention has kernels for heads of 32 and up only
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "vocab_size": 128,
    "initializer_range": 0.1,
}
HEADS = {"qwen3": {"head_dim": 32}, "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 32}}
MAX_LEN = 320
STEPS = 12


class Ranks:
    """The trainer's side: a whole model on every rank, and this rank's requests."""

    def __init__(self, kind: str, tp: int, compiled: bool) -> None:
        self.kind, self.tp, self.compiled, self.world = kind, tp, compiled, World.from_env()
        if self.world.torchrun:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        folder = [str(checkpoint(kind, **SHAPE, **HEADS.get(kind, {})))] if self.first else [""]
        dist.broadcast_object_list(folder)
        self.path = folder[0]
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)

    @property
    def first(self) -> bool:
        return self.world.rank == 0

    def build(self, **options: Any) -> Any:
        return build_engine(
            "vllm",
            self.path,
            EngineOptions(tensor_parallel_size=self.tp, kv_cache_memory_bytes=64 << 20, **options),
            world=self.world,
            device=torch.device("cpu"),
            dtype="float32",
            max_model_len=MAX_LEN,
            seed=7,
        )

    def buckets(self, bucket_bytes: int = 16384, divisible: Collection[str] = ()) -> list[Bucket]:
        holder = SimpleNamespace(hf=self.model)
        options: dict[str, Any] = {"dtype": "float32", "divisible": divisible}
        return list(weight_stream(holder, bucket_bytes=bucket_bytes, **options))

    def perturb(self, seed: int) -> None:
        """Another model, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                scale = 0.1 * parameter.std() if parameter.numel() > 1 else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)

    def saved(self) -> str:
        folder = [tempfile.mkdtemp(prefix="fsdprl-parity-") if self.first else ""]
        dist.broadcast_object_list(folder)
        if self.first:
            self.model.save_pretrained(folder[0])
            tokenizer().save_pretrained(folder[0])
        dist.barrier()
        return folder[0]

    def requests(self, count: int = 8, rank: int | None = None) -> list[Request]:
        """Prompts of 3 to 300 tokens (two share their first 256), others and one more on each rank."""
        rank = self.world.rank if rank is None else rank
        generator = torch.Generator().manual_seed(rank)
        shared = torch.randint(4, 100, (256,), generator=generator).tolist()
        out = []
        for i in range(count + rank):
            own = torch.randint(4, 100, (3 + 5 * (i % 11),), generator=generator).tolist()
            out.append(Request([*shared, *own] if i % 4 == 0 else own, seed=100 * i + rank))
        return out


class Fresh:
    """A vLLM that has loaded a checkpoint by itself, as any user's would; nothing of ours in it."""

    def __init__(self, ranks: Ranks, folder: str) -> None:
        self.tp, self.world = ranks.tp, ranks.world
        with launcher_environment(self.world.rank, self.world.local_rank, self.world.size):
            self.llm = vllm.LLM(
                folder,
                tensor_parallel_size=ranks.tp,
                distributed_executor_backend="external_launcher",
                enforce_eager=not ranks.compiled,
                kv_cache_memory_bytes=64 << 20,
                dtype="float32",
                max_model_len=MAX_LEN,
                max_num_seqs=512,
                logprobs_mode="processed_logprobs",
            )
        keep(self.llm)

    def answers(self, ranks: Ranks, **given: Any) -> list[tuple[list[int], list[float], str]]:
        """Answers to this rank's requests; with tensor parallelism all ranks run everyone's."""
        group = range(
            self.world.rank // self.tp * self.tp, (self.world.rank // self.tp + 1) * self.tp
        )
        everyones = [(rank, request) for rank in group for request in ranks.requests(rank=rank)]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(request.ids)} for _, request in everyones],
            [
                vllm.SamplingParams(**{"max_tokens": STEPS, "seed": r.seed, "logprobs": 0, **given})
                for _, r in everyones
            ],
            use_tqdm=False,
        )
        found = []
        for (rank, _), output in zip(everyones, outputs, strict=True):
            answer = output.outputs[0]
            ids = list(answer.token_ids)
            logp = [at[token].logprob for at, token in zip(answer.logprobs, ids, strict=True)]
            if rank == self.world.rank:
                found.append((ids, logp, answer.finish_reason))
        return found


def answers(
    engine: Any, requests: list[Request], **given: Any
) -> list[tuple[list[int], list[float], str]]:
    sampling = Sampling(**{"max_new_tokens": STEPS, **given})
    got = engine.generate(requests, sampling, lambda: None)
    return [(c.ids.tolist(), c.logp.tolist(), c.finish) for c in got]


def largest_gap(ours: list, theirs: list) -> float:
    """Largest log-prob difference; infinite where tokens or finish reasons differ."""
    worst = 0.0
    for (ids, logp, finish), (other_ids, other_logp, other_finish) in zip(
        ours, theirs, strict=True
    ):
        if ids != other_ids or finish != other_finish:
            return float("inf")
        worst = max(worst, *(abs(a - b) for a, b in zip(logp, other_logp, strict=True)))
    return worst


@torch.no_grad()
def trainer_gap(ranks: Ranks, engine: Any, **given: Any) -> tuple[float, int]:
    """Largest difference between the engine's log-probs and the trainer model's; tokens compared."""
    requests, tokens, worst = ranks.requests(48), 0, 0.0
    sampling = Sampling(max_new_tokens=60, **given)
    for request, got in zip(
        requests, engine.generate(requests, sampling, lambda: None), strict=True
    ):
        whole = torch.tensor([[*request.ids, *got.ids.tolist()]])
        logits = ranks.model(input_ids=whole, use_cache=False).logits[0, len(request.ids) - 1 : -1]
        seen = torch.zeros(len(logits), logits.shape[1], dtype=torch.bool)
        for step in range(len(logits)):
            seen[step, whole[0, : len(request.ids) + step]] = True
        logp = filter_logits(logits.float().clone(), sampling, seen).log_softmax(-1)
        own = logp.gather(1, got.ids.long()[:, None])[:, 0]
        worst, tokens = max(worst, float((own - got.logp).abs().max())), tokens + len(own)
    return worst, tokens


def random_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def check_pulls(ranks: Ranks, engine: Any, pulls: int) -> dict[str, Any]:
    """Signature test 2: after every pull the live engine is the fresh one."""
    requests, found = ranks.requests(), {"sampled_gap": 0.0, "greedy_gap": 0.0, "stale": 0}
    previous: list = []
    for version in range(pulls):
        ranks.perturb(version)
        # Embedding and head whole, and in parts.
        sent = ranks.buckets(1024, engine.divisible) if version % 2 else ranks.buckets()
        assert any(bucket.parts for bucket in sent) is bool(version % 2)
        sums = engine.update_weights(iter(sent), version)
        assert sums == shard_checksums(SimpleNamespace(hf=ranks.model), dtype="float32")
        assert engine.version == version
        live = answers(engine, requests)
        greedy = answers(engine, requests, temperature=0.0)
        found["stale"] += live == previous
        previous = live
        fresh = Fresh(ranks, ranks.saved())
        theirs = fresh.answers(ranks)
        found["sampled_gap"] = max(found["sampled_gap"], largest_gap(live, theirs))
        theirs = fresh.answers(ranks, temperature=0.0)
        found["greedy_gap"] = max(found["greedy_gap"], largest_gap(greedy, theirs))
    return found


def check_numbers(ranks: Ranks, engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "temperature": {"temperature": 0.7},
        "filters": {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02},
        "top_k": {"top_k": 8},
        "penalty": {"repetition_penalty": 1.2},
        "greedy": {"temperature": 0.0},
    }
    for name, given in settings.items():
        found[f"trainer_gap_{name}"], found[f"tokens_{name}"] = trainer_gap(ranks, engine, **given)
    return found


def check_seeds(ranks: Ranks, engine: Any) -> dict[str, Any]:
    """Samples depend on seed and prompt only, and the caller's randomness on nothing here."""
    requests = ranks.requests()
    before = random_state()
    together = answers(engine, requests)
    unchanged = random_state() == before
    backwards = answers(engine, requests[::-1])[::-1]
    halves = answers(engine, requests[:3]) + answers(engine, requests[3:])
    return {
        "rng_unchanged": unchanged,
        "order_gap": largest_gap(together, backwards),
        "batch_gap": largest_gap(together, halves),
        "distinct": len({tuple(ids) for ids, _, _ in together}),
    }


def check_stops(ranks: Ranks, engine: Any) -> dict[str, Any]:
    requests = ranks.requests(30)
    free = answers(engine, requests, temperature=1.5, max_new_tokens=40)
    end = tokenizer().eos_token_id
    good = all(
        (ids[-1] == end) == (finish == "stop") and end not in ids[:-1] for ids, _, finish in free
    )
    text = next(
        tokenizer().decode(ids, skip_special_tokens=True) for ids, _, _ in free if len(ids) > 8
    )
    stopped = answers(engine, requests, temperature=1.5, max_new_tokens=40, stop=(text[4:6],))
    tails = [
        tokenizer().decode(ids, skip_special_tokens=True) for ids, _, f in stopped if f == "stop"
    ]
    ends = sum(tail.endswith(text[4:6]) for tail in tails)
    room = answers(engine, [Request([5] * (MAX_LEN - 1), 0)], max_new_tokens=9)
    return {
        "ends": good,
        "finishes": len({finish for _, _, finish in free}),
        "stop_strings": ends,
        "room": len(room[0][0]),
    }


def check_damage(ranks: Ranks, engine: Any) -> dict[str, Any]:
    """Every kind of bad weight is refused by name, and a good update mends the engine."""
    good = ranks.buckets()
    victim = "model.layers.1.self_attn.k_proj.weight"
    tensor = dict(pair for bucket in good for pair in bucket.tensors)[victim]
    nan = tensor.clone()
    nan[1, 1] = float("nan")
    damages = {"missing": [], "twice": [tensor, tensor], "shape": [tensor[:-1]], "nan": [nan]}
    before = answers(engine, ranks.requests())
    found: dict[str, Any] = {"refused": [], "unready_after": []}
    for name, tensors in damages.items():
        bad = [
            Bucket(
                [
                    pair
                    for own, t in bucket.tensors
                    for pair in ([(own, d) for d in tensors] if own == victim else [(own, t)])
                ],
                bucket.layer_end,
            )
            for bucket in good
        ]
        try:
            engine.update_weights(iter(bad), 99)
        except EngineError as error:
            if victim in str(error):
                found["refused"].append(name)
        try:
            engine.generate(ranks.requests(), Sampling(max_new_tokens=2), lambda: None)
        except EngineError:
            found["unready_after"].append(name)
    old = [(own, t + 1 if own == victim else t) for bucket in good for own, t in bucket.tensors]
    sums = engine.update_weights(iter([Bucket(old, True)]), 99)
    sent = shard_checksums(SimpleNamespace(hf=ranks.model), dtype="float32")
    found["stale_named"] = [name for name in sums if sums[name] != sent[name]] == [victim]
    engine.update_weights(iter(good), 100)
    found["mended_gap"] = largest_gap(before, answers(engine, ranks.requests()))
    return found


def check_sleep(ranks: Ranks, engine: Any) -> dict[str, Any]:
    requests, found = ranks.requests(), {}
    before = answers(engine, requests)
    engine.sleep(1)
    found["asleep"] = refuses(engine, requests)
    engine.wake(["weights"])
    found["no_cache"] = refuses(engine, requests)
    engine.wake(["kv_cache"])
    found["level_1_gap"] = largest_gap(before, answers(engine, requests))
    engine.sleep(2)
    engine.wake()
    found["dropped"] = refuses(engine, requests)
    engine.update_weights(iter(ranks.buckets()), 101)
    found["level_2_gap"] = largest_gap(before, answers(engine, requests))
    return found


def refuses(engine: Any, requests: list[Request]) -> bool:
    try:
        engine.generate(requests, Sampling(max_new_tokens=2), lambda: None)
    except EngineError:
        return True
    return False


def check_statistics(ranks: Ranks, engine: Any) -> dict[str, Any]:
    engine.stats()
    ticks: list[int] = []
    requests = ranks.requests()
    twice = [*requests, *requests]
    got = engine.generate(twice, Sampling(max_new_tokens=STEPS), lambda: ticks.append(1))
    stats = engine.stats()
    assert stats["prompt_tokens"] == sum(len(r.ids) for r in twice)
    assert stats["generated_tokens"] == sum(len(c.ids) for c in got)
    return {"ticks": len(ticks), "cache_hit_rate": stats["cache_hit_rate"]}


def talks(conversation: Any) -> dict[str, str] | float:
    """The environment of check_conversations."""
    return float(conversation.turn) if conversation.over else {"role": "user", "content": "go on"}


async def talks_slowly(conversation: Any) -> dict[str, str] | float:
    await asyncio.sleep(0.02 * (conversation.seed % 5))
    return talks(conversation)


def conversed(ranks: Ranks, engine: Any, env: str) -> list[Row]:
    """Conversations of up to 4 turns, from 6 prompts on each rank."""
    words, infos, ids = tokenizer(), [], []
    for i in range(6 + ranks.world.rank):
        messages = [{"role": "user", "content": f"rank {ranks.world.rank} asks {i}" + "?" * i}]
        text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        infos.append({"prompt": text, "messages": messages})
        ids.append(torch.tensor(words(text)["input_ids"], dtype=torch.int32))
    worker: Any = SimpleNamespace(
        engine=engine, state={"tokenizer": words}, store=Store(), progress=lambda: None
    )
    sampling = asdict(Sampling(max_new_tokens=250, temperature=1.5))
    found = conversing.rollout(
        worker, first_row=[2 * i for i in range(len(ids))], lengths=torch.tensor([len(i) for i in ids]),
        ids=torch.cat(ids), infos=infos, seeds=torch.arange(2 * len(ids)) + 1000 * ranks.world.rank, n=2,
        sampling=sampling, version=engine.version, turns={}, tools=[],
        env={"module": "__main__", "qualname": env, "kwargs": {}},
    )  # fmt: skip
    assert int(found["turns"].max()) > 2 and not found["env_failed"].any()
    return [row for _, row in sorted(worker.store.rows.items())]


@torch.no_grad()
def check_conversations(ranks: Ranks, engine: Any) -> dict[str, Any]:
    """Turns join vLLM's batch as environments answer; rows are replayed token by token by the trainer's model."""
    rows, slow = (conversed(ranks, engine, env) for env in ("talks", "talks_slowly"))
    same = [a.ids.tolist() == b.ids.tolist() for a, b in zip(rows, slow, strict=True)]
    worst, tokens = 0.0, 0
    for row in rows:
        logits = ranks.model(input_ids=row.ids[None].long(), use_cache=False).logits[0, :-1]
        logp = (logits.float() / 1.5).log_softmax(-1).gather(1, row.ids[1:, None].long())[:, 0]
        gap = (logp[row.mask[1:]] - row.columns["logp_sampler"]).abs()
        worst, tokens = max(worst, float(gap.max())), tokens + len(gap)
    return {"talk_gap": worst, "talk_tokens": tokens, "talks_same": sum(same) / len(same)}


CHECKS = {
    "numbers": check_numbers,
    "seeds": check_seeds,
    "stops": check_stops,
    "damage": check_damage,
    "sleep": check_sleep,
    "statistics": check_statistics,
    "conversations": check_conversations,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pulls", type=int, default=5)
    parser.add_argument("--checks", default="all")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks(arguments.kind, arguments.tp, arguments.compiled)
    before, set_threads = random_state(), torch.set_num_threads
    engine = ranks.build(enforce_eager=not arguments.compiled)
    found: dict[str, Any] = {
        "built_rng_unchanged": random_state() == before,
        "threads_restored": torch.set_num_threads is set_threads and torch.get_num_threads() == 1,
        "unready_at_first": refuses(engine, ranks.requests()),
    }
    found |= check_pulls(ranks, engine, arguments.pulls)
    chosen = CHECKS if arguments.checks == "all" else arguments.checks.split(",")
    for name in chosen:
        if name != "pulls":
            found |= CHECKS[name](ranks, engine)
    # the default process group is alive and ours
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert int(ones) == ranks.world.size
    every: list[Any] = [None] * ranks.world.size
    dist.all_gather_object(every, copy.deepcopy(found))
    if ranks.first:
        arguments.out.write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
