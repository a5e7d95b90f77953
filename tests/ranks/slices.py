"""Answers in slices on whatever ranks there are, beside the same in one piece, as JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

import fsdprl as rl
from fsdprl.controller import current


@dataclass(frozen=True)
class Config:
    model: str = ""
    data: str = ""
    out: str = ""
    kind: str = "transformers"
    tensor_parallel: int = 1
    splits: int = 3
    most: int = 24
    run: rl.RunOptions = field(default_factory=rl.RunOptions)


def main(cfg: Config) -> None:
    prompts = rl.Prompts(
        cfg.data, tokenizer_path=cfg.model, max_prompt_length=40, prompt_format="raw"
    )
    policy = rl.Policy(cfg.model, dtype="float32", sharding=rl.ShardingOptions(min_num_params=0))
    engine = rl.EngineOptions(
        kind=cfg.kind, kv_cache_memory_bytes=64 << 20, tensor_parallel_size=cfg.tensor_parallel
    )
    sampler = rl.Sampler(policy, engine=engine, max_prompt_length=40, max_new_tokens=cfg.most)
    sampler.pull()
    some = prompts.first(9)
    found = {}
    for temperature in (0.0, 1.2):
        sampler.sampling["temperature"] = temperature
        whole = sampler.generate(some, n=2)
        current().timeline.drain()
        found[str(temperature)] = {
            "whole": shown(whole),
            "sliced": in_slices(sampler, some, cfg),
            "counted": current().timeline.drain()[1],
        }
    name = f"{cfg.kind}-{current().world_size}.json"
    (Path(cfg.out) / name).write_text(json.dumps(found))


def in_slices(sampler: rl.Sampler, prompts: list, cfg: Config) -> list[dict]:
    """Six prompts, one slice later three more; the weights stay."""
    begun, complete = None, []
    for new in (prompts[:6], prompts[6:], *[[]] * (cfg.splits - 1)):
        batch = sampler.slice(new, begun, n=2, splits=cfg.splits)
        assert (
            batch["group"].tolist() == torch.arange(len(batch) // 2).repeat_interleave(2).tolist()
        )
        waits = batch["unfinished"].view(-1, 2).any(1).repeat_interleave(2)
        complete.append(batch[~waits])
        begun = batch[waits]
        if not len(begun):
            break
    assert begun is not None and not len(begun)
    return shown(rl.Batch.concat(complete))


def shown(batch: rl.Batch) -> list[dict]:
    """Every row: what it says, and its numbers; by prompt."""
    batch["logp"] = batch.row_sum("logp_sampler")
    names = ("prompt", "response", "length", "truncated", "logp", "slices", "tokens", "loss_tokens")
    rows = [{n: row[n] for n in names if n in row} for row in batch.peek(len(batch))]
    return sorted(rows, key=lambda row: (row["prompt"], row["response"]))


if __name__ == "__main__":
    rl.launch(main, Config)
