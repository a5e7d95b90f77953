"""One GRPO-like step with every verb a recipe uses, at some answer length; writes what the wire carried."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import fsdprl as rl
from fsdprl.controller import current


@dataclass(frozen=True)
class Config:
    model: str = ""
    data: str = ""
    out: str = ""
    max_new_tokens: int = 8
    sharding: rl.ShardingOptions = field(
        default_factory=lambda: rl.ShardingOptions(tokens_per_microbatch=300)
    )
    run: rl.RunOptions = field(default_factory=rl.RunOptions)


def length_reward(sample: rl.Sample) -> float:
    return sample.length % 7 / 7


def gap(logp_old, logp_sampler):
    return logp_old - logp_sampler


def main(cfg: Config) -> None:
    policy = rl.Policy(cfg.model, sharding=cfg.sharding)
    prompts = rl.Prompts(cfg.data, tokenizer_path=cfg.model)
    sampler = rl.Sampler(policy, max_prompt_length=64, max_new_tokens=cfg.max_new_tokens)
    loss = partial(rl.losses.clipped_surrogate, clip_low=0.2, clip_high=0.28)
    timeline = current().timeline
    timeline.drain()  # starting is no step
    sampler.pull()
    batch = sampler.generate(prompts.at(0, 8), n=4)
    batch["advantage"] = batch.map(length_reward)
    batch.rebalance(2, seed=1)
    policy.logprobs(batch, out="logp_old")
    batch.apply(gap, out="gap")
    batch["mismatch"] = batch.row_sum("gap")
    batch.reduce("gap")
    for minibatch in batch.minibatches(2, seed=1):
        minibatch["weight"] = 1.0 / minibatch["loss_tokens"].sum()
        policy.forward_backward(minibatch, loss)
        policy.optim_step(lr=1e-4)
    batch.write_completions(Path(cfg.out) / "completions", 0, ["advantage", "length"])
    batch.peek(2)
    _, counts = timeline.drain()
    facts = {"answer_tokens": int(batch["length"].sum()), "rows": len(batch), **counts}
    (Path(cfg.out) / f"{cfg.max_new_tokens:03d}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    rl.launch(main, Config)
