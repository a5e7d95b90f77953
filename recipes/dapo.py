r"""DAPO: GRPO with a higher upper clip, dynamic sampling, a mean over tokens, and care for overlong answers.

    torchrun --nproc-per-node 8 recipes/dapo.py --model Qwen/Qwen3-0.6B --data dapo_math_17k.parquet \
        --max-new-tokens 20480 --overlong-buffer 4096

Yu et al. 2025: (1) clip_high above clip_low; (2) groups whose answers are all right or all wrong are replaced, judged
by an accuracy and never by the total reward, which length always spreads; (3) a mean over a minibatch's tokens;
(4) truncated answers left out of the loss; (5) a penalty that grows over the last tokens. No KL, no reference model.

Shapes: P prompts, G answers per prompt, N = P * G samples; S response tokens packed on a rank.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import fsdprl as rl


@dataclass(frozen=True)
class Config:
    model: str = "Qwen/Qwen3-0.6B"  # Hugging Face checkpoint: a folder or a hub name
    data: str = "gsm8k_train.jsonl"  # prompts: jsonl, json, csv, parquet, or a hub name
    eval_data: str = ""  # held-out prompts; empty holds out eval_share of data
    eval_share: float = 0.02  # share of data held out where there is no eval_data
    prompt_key: str = "prompt"  # column of the prompt: a string or chat messages
    answer_key: str = "answer"  # column of the reference answer, for the rewards
    prompt_format: rl.PromptFormat = "auto"  # how string prompts are read
    chat_template: str = ""  # Jinja file in place of the tokenizer's own template
    system: str = ""  # system prompt, or a file that holds it
    steps: int = 0  # steps to train; 0 takes as many as epochs need
    epochs: float = 1.0  # passes over data if every group is used, where steps is 0
    seed: int = 0  # of data order, sampling and minibatches
    # sampling
    prompts_per_step: int = 64  # P
    group_size: int = 16  # G, answers to each prompt
    temperature: float = 1.0  # training divides logits by it too
    max_prompt_length: int = 1024  # tokens
    long_prompts: rl.LongPrompts = "error"  # what becomes of longer ones above 1 % of data
    max_new_tokens: int = 1024  # most tokens of an answer
    rollout_splits: int = 1  # slices of max_new_tokens; what is unfinished goes on next step
    rewards: tuple[str, ...] = ("accuracy",)  # built-in names, or module:function
    reward_weights: tuple[float, ...] = ()  # one a reward; none weighs all 1
    # dynamic sampling
    filter_metric: str = ""  # the reward that must differ inside a group; empty: the first one
    pass_low: float = 0.0  # groups whose mean of it is lower are replaced as well
    pass_high: float = 1.0  # and those with a higher one
    prompts_per_round: int = 0  # prompts sampled at a time; 0: prompts_per_step
    max_rounds: int = 10  # rounds of one step; 0: until there are P groups
    when_short: Literal["error", "train"] = "error"  # after the last round: stop, or train on fewer
    # answers that are too long
    overlong_filter: bool = False  # truncated answers count in their group but not in the loss
    overlong_buffer: int = 0  # tokens before max_new_tokens over which the penalty grows; 0: none
    overlong_penalty: float = 1.0  # what it grows to
    # learning
    minibatches: int = 4  # optimizer steps of each pass over a batch; 1 is exactly on-policy
    passes: int = 1  # over each batch of samples
    lr: float = 1e-6  # peak learning rate
    schedule: rl.Schedule = "constant"  # of the learning rate after warm-up
    warmup_steps: int = 20  # steps of linear warm-up
    weight_decay: float = 0.1  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.28  # and at 1 + clip_high
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative; 0: none
    eval_every: int = 20  # steps between held-out evaluations; 0 for none
    eval_prompts: int = 256  # most held-out prompts of one evaluation
    eval_samples: int = 1  # answers to each of them, for mean@n and pass@k; 0: a greedy one
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    engine: rl.EngineOptions = field(default_factory=rl.EngineOptions)
    reward: rl.RewardOptions = field(default_factory=rl.RewardOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/dapo"))


# ---- on the controller: the algorithm


def main(cfg: Config) -> None:
    metric = cfg.filter_metric or cfg.rewards[0]
    if metric not in cfg.rewards:
        raise rl.UserError(f"--filter-metric {metric}: not among --rewards {cfg.rewards}")
    if not 0 <= cfg.overlong_buffer < cfg.max_new_tokens:
        raise rl.UserError(f"--overlong-buffer must be below --max-new-tokens {cfg.max_new_tokens}")
    if not 1 <= cfg.rollout_splits <= cfg.max_new_tokens:
        raise rl.UserError(f"--rollout-splits {cfg.rollout_splits}: from 1 to --max-new-tokens")
    run = rl.Run(cfg.run)
    rewards = rl.Rewards(cfg.rewards, cfg.reward_weights, cfg.reward)
    train, held_out = rl.prompt_sets(cfg)
    P, G, K = cfg.prompts_per_step, cfg.group_size, cfg.minibatches
    plan = rl.Plan(len(train), P, G, K, cfg.steps, cfg.epochs, passes=cfg.passes)
    policy = rl.Policy(cfg.model, sharding=cfg.sharding, dtype=cfg.dtype)
    sampler = rl.Sampler(
        policy,
        engine=cfg.engine,
        max_prompt_length=cfg.max_prompt_length,
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        chat_template=cfg.chat_template,
        seed=cfg.seed,
    )
    clips = rl.clips(cfg.clip_low, cfg.clip_high, cfg.dual_clip)
    loss = partial(rl.losses.clipped_surrogate, **clips)
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    size = cfg.prompts_per_round or P
    pool = rl.GroupPool(train, group_size=G, per_round=size, splits=cfg.rollout_splits)
    run.track(policy=policy, pool=pool)

    often = {"every": cfg.eval_every, "prompts": cfg.eval_prompts, "samples": cfg.eval_samples}
    evaluate = rl.Evaluator(run, sampler, rewards, held_out, **often)

    for step in run.steps(plan):
        sampler.pull()
        evaluate(step)

        # Sample until P groups disagree about the metric. Every round's advantages are its own.
        for prompts in pool.rounds(P, cfg.max_rounds):
            batch = pool.generate(sampler, prompts)  # groups of which all answers are complete
            if not len(batch):
                continue
            batch["reward"] = rewards(batch)
            if cfg.overlong_buffer:
                exceed = batch["length"] - (cfg.max_new_tokens - cfg.overlong_buffer)
                penalty = (exceed / cfg.overlong_buffer).clamp(0, 1)
                batch["reward"] -= cfg.overlong_penalty * penalty
            run.log(rewards.metrics(batch, "dapo/score"))
            run.log(batch.summary("reward", "length", "prompt_length", "truncated"))
            run.record(batch)
            batch["advantage"] = rl.advantages.group_normalized(batch["reward"], batch["group"])
            metric_PG = batch[f"{rewards.columns[metric]}_rewards"].view(-1, G)
            keep_P = metric_PG.amax(1) > metric_PG.amin(1)  # its answers disagree
            keep_P &= (metric_PG.mean(1) >= cfg.pass_low) & (metric_PG.mean(1) <= cfg.pass_high)
            pool.add(batch[keep_P.repeat_interleave(G)])
        policy.logprobs(pool.fresh(), out="logp_old")  # now: what is left over ages by a step
        batch = pool.take(P, short=cfg.when_short)
        run.log(pool.metrics() | rl.mismatch(batch))

        batch.rebalance(K, seed=cfg.seed + step)
        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        for minibatch in batch.minibatches(K, seed=cfg.seed + step, passes=cfg.passes):
            keep = ~minibatch["truncated"] if cfg.overlong_filter else None
            minibatch["weight"] = rl.weights.token_mean(minibatch["loss_tokens"], keep=keep)
            run.log(policy.forward_backward(minibatch, loss))
            run.log(policy.optim_step(lr=lr, **limits))

    evaluate.last()


if __name__ == "__main__":
    rl.launch(main, Config)
