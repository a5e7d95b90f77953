r"""REINFORCE++: PPO's clip and KL in the reward without a critic; advantages are whitened over the batch.

    torchrun --nproc-per-node 8 recipes/reinforce_pp.py --model Qwen/Qwen3-0.6B --data gsm8k_train.jsonl \
        --prompt-key question --answer-key answer

Hu 2025, eq. 5-8. A token's return is the answer's reward minus the KL still to come, whitened over all tokens of the
batch, so that one answer a prompt is enough. With several, --baseline group first takes the group's mean from the
reward ("REINFORCE++ baseline").

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
    epochs: float = 1.0  # passes over data, where steps is 0
    seed: int = 0  # of data order, sampling and minibatches
    # sampling
    prompts_per_step: int = 512  # P
    group_size: int = 1  # G, answers to each prompt
    temperature: float = 1.0  # training divides logits by it too
    max_prompt_length: int = 1024  # tokens
    long_prompts: rl.LongPrompts = "error"  # what becomes of longer ones above 1 % of data
    max_new_tokens: int = 1024  # most tokens of an answer
    rewards: tuple[str, ...] = ("accuracy",)  # built-in names, or module:function
    reward_weights: tuple[float, ...] = ()  # one a reward; none weighs all 1
    # learning
    minibatches: int = 2  # optimizer steps of each pass over a batch; 1 is exactly on-policy
    passes: int = 1  # over each batch of samples
    lr: float = 1e-6  # peak learning rate
    schedule: rl.Schedule = "constant"  # of the learning rate after warm-up
    warmup_steps: int = 0  # steps of linear warm-up
    weight_decay: float = 0.0  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high
    kl_coef: float = 0.001  # weight of the KL to the initial model in the reward; 0: no reference
    follow_every: int = 0  # steps after which the reference moves towards the policy; 0: never
    follow_share: float = 1.0  # by this share: 1 replaces it, less is a moving average
    gamma: float = 1.0  # discount of what is still to come
    baseline: Literal["none", "group"] = "none"  # taken from the reward before whitening
    entropy_coef: float = 0.0  # weight of the entropy bonus
    eval_every: int = 20  # steps between held-out evaluations; 0 for none
    eval_prompts: int = 256  # most held-out prompts of one evaluation
    eval_samples: int = 1  # answers to each of them, for mean@n and pass@k; 0: a greedy one
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    engine: rl.EngineOptions = field(default_factory=rl.EngineOptions)
    reward: rl.RewardOptions = field(default_factory=rl.RewardOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/reinforce_pp"))


# ---- on the controller: the algorithm


def main(cfg: Config) -> None:
    run = rl.Run(cfg.run)
    rewards = rl.Rewards(cfg.rewards, cfg.reward_weights, cfg.reward)
    train, held_out = rl.prompt_sets(cfg)
    P, G, K = cfg.prompts_per_step, cfg.group_size, cfg.minibatches
    plan = rl.Plan(len(train), P, G, K, cfg.steps, cfg.epochs, passes=cfg.passes)
    layout = {"sharding": cfg.sharding, "dtype": cfg.dtype}
    policy = rl.Policy(cfg.model, **layout)
    sampler = rl.Sampler(
        policy,
        engine=cfg.engine,
        max_prompt_length=cfg.max_prompt_length,
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        chat_template=cfg.chat_template,
        seed=cfg.seed,
    )
    clips = rl.clips(cfg.clip_low, cfg.clip_high, dual=0.0)
    losses = [partial(rl.losses.clipped_surrogate, **clips)]
    follow = (cfg.follow_every, cfg.follow_share)
    reference = rl.kl_reference(cfg.model, cfg.kl_coef, *follow, **layout)
    if cfg.entropy_coef:
        losses.append(partial(rl.losses.entropy_bonus, coef=cfg.entropy_coef))
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    run.track(policy=policy, reference=reference)

    often = {"every": cfg.eval_every, "prompts": cfg.eval_prompts, "samples": cfg.eval_samples}
    evaluate = rl.Evaluator(run, sampler, rewards, held_out, **often)

    for step in run.steps(plan):
        sampler.pull()
        evaluate(step)

        # Sample G answers per prompt. Rows are group-major: a column [N] views as [P, G].
        batch = sampler.generate(train.at(step, P), n=G)
        batch["reward"] = rewards(batch)
        run.log(rewards.metrics(batch, "grpo/score"))
        run.log(batch.summary("reward", "length", "prompt_length", "truncated"))
        run.record(batch)

        # The reward lands on a row's last token, the KL to the reference on every token.
        if cfg.baseline == "group":
            batch["reward"] = rl.advantages.group_centered(batch["reward"], batch["group"])
        batch.rebalance(K, seed=cfg.seed + step)
        if reference:
            reference.logprobs(batch, out="logp_ref")
        policy.logprobs(batch, out="logp_old")
        run.log(rl.mismatch(batch))
        reward = rl.advantages.last_token_reward
        if reference:
            reward = partial(rl.advantages.token_reward, kl_coef=cfg.kl_coef)
            batch.apply(rl.kl.log_ratio, out="log_ratio", phase="kl")
            run.log({"kl": batch.reduce("log_ratio").mean})
        batch.apply(reward, out="token_reward")
        batch.apply(partial(rl.advantages.discounted_returns, gamma=cfg.gamma), out="advantage")
        rl.whiten(batch)

        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        for minibatch in batch.minibatches(K, seed=cfg.seed + step, passes=cfg.passes):
            minibatch["weight"] = 1.0 / minibatch["loss_tokens"].sum()  # a mean over tokens
            run.log(policy.forward_backward(minibatch, losses))
            run.log(policy.optim_step(lr=lr, **limits))
        if reference:
            reference.follow(policy, step)

    evaluate.last()


if __name__ == "__main__":
    rl.launch(main, Config)
