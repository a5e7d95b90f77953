r"""PPO: a critic values every token; advantages come from it; actor and critic learn with clipped losses.

    torchrun --nproc-per-node 8 recipes/ppo.py --model Qwen/Qwen3-0.6B --data gsm8k_train.jsonl \
        --prompt-key question --answer-key answer

Schulman et al. 2016 (GAE) and 2017; Ouyang et al. 2022 for the KL in the reward. The critic starts from a reward model
(--critic) or from the policy with a fresh value head. An answer's score is a weighted sum of rules and a reward model,
either of which may be absent. All models share the devices.

Shapes: P prompts, G answers per prompt, N = P * G samples; S response tokens packed on a rank.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import fsdprl as rl


@dataclass(frozen=True)
class Config:
    model: str = "Qwen/Qwen3-0.6B"  # Hugging Face checkpoint: a folder or a hub name
    critic: str = ""  # that of a reward or value model; empty: model, with a fresh value head
    reward_model: tuple[str, ...] = ()  # sequence classifiers of one label, which score answers too
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
    seed: int = 0  # of data order, sampling, minibatches and a fresh value head
    # sampling
    prompts_per_step: int = 512  # P
    group_size: int = 1  # G, answers to each prompt
    temperature: float = 1.0  # training divides logits by it too
    max_prompt_length: int = 1024  # tokens
    long_prompts: rl.LongPrompts = "error"  # what becomes of longer ones above 1 % of data
    max_new_tokens: int = 1024  # most tokens of an answer
    rewards: tuple[str, ...] = ("accuracy",)  # built-in names, or module:function; may be none
    reward_weights: tuple[float, ...] = ()  # one a reward, reward models last; none: all 1
    # learning
    minibatches: int = 4  # optimizer steps of each pass over a batch
    passes: int = 1  # over each batch of samples
    lr: float = 1e-6  # peak learning rate of the actor
    schedule: rl.Schedule = "constant"  # of lr, after warm-up
    warmup_steps: int = 0  # steps of linear warm-up
    critic_lr: float = 5e-6  # the critic's
    critic_schedule: rl.Schedule = "constant"
    critic_warmup_steps: int = 0
    critic_only_steps: int = 0  # first steps, in which the actor stays as it is
    weight_decay: float = 0.01  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative; 0: none
    value_clip: float = 0.2  # how far a value may move from its old one; 0: freely
    gamma: float = 1.0  # discount of what is still to come
    lam: float = 0.95  # of GAE: 1 trusts returns, 0 trusts the critic
    kl_coef: float = 0.0  # weight of the KL to the initial model; 0 loads no reference
    kl_in: Literal["reward", "loss"] = "reward"  # k1 in each token's reward, or k3 in the loss
    kl_target: float = 0.0  # nats an answer that kl_coef steers the KL to; 0: it stays
    kl_horizon: int = 10000  # samples over which it is steered
    follow_every: int = 0  # steps after which the reference moves towards the policy; 0: never
    follow_share: float = 1.0  # by this share: 1 replaces it, less is a moving average
    entropy_coef: float = 0.0  # weight of the entropy bonus
    eval_every: int = 20  # steps between held-out evaluations; 0 for none
    eval_prompts: int = 256  # most held-out prompts of one evaluation
    eval_samples: int = 1  # answers to each of them, for mean@n and pass@k; 0: a greedy one
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    engine: rl.EngineOptions = field(default_factory=rl.EngineOptions)
    reward: rl.RewardOptions = field(default_factory=rl.RewardOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/ppo"))


def main(cfg: Config) -> None:
    run = rl.Run(cfg.run)
    train, held_out = rl.prompt_sets(cfg)
    P, G, K = cfg.prompts_per_step, cfg.group_size, cfg.minibatches
    plan = rl.Plan(len(train), P, G, K, cfg.steps, cfg.epochs, passes=cfg.passes)
    layout = {"sharding": cfg.sharding, "dtype": cfg.dtype}
    policy = rl.Policy(cfg.model, **layout)
    critic = rl.Critic(cfg.critic or cfg.model, seed=cfg.seed, **layout)
    follow = (cfg.follow_every, cfg.follow_share)
    reference = rl.kl_reference(cfg.model, cfg.kl_coef, *follow, **layout)
    judges = rl.reward_models(cfg.reward_model, **layout)
    rewards = rl.Rewards(cfg.rewards, cfg.reward_weights, cfg.reward, model=judges)
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
    surrogate = partial(rl.losses.clipped_surrogate, **clips)
    bonus = [partial(rl.losses.entropy_bonus, coef=cfg.entropy_coef)] if cfg.entropy_coef else []
    value_loss = partial(rl.losses.value_loss, clip=cfg.value_clip or None)
    gae = partial(rl.advantages.gae, gamma=cfg.gamma, lam=cfg.lam)
    kl = rl.kl.controller(cfg.kl_coef, target=cfg.kl_target, horizon=cfg.kl_horizon)
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    run.track(policy=policy, critic=critic, kl=kl, reference=reference)
    often = {"every": cfg.eval_every, "prompts": cfg.eval_prompts, "samples": cfg.eval_samples}
    evaluate = rl.Evaluator(run, sampler, rewards, held_out, **often)

    for step in run.steps(plan):
        sampler.pull()
        evaluate(step)
        batch = sampler.generate(train.at(step, P), n=G)
        batch["score"] = batch["reward"] = rewards(batch)
        run.log(rewards.metrics(batch))
        run.log(batch.summary("score", "length", "prompt_length", "truncated"))
        run.record(batch)

        # The score lands on an answer's last token, a KL in the reward on every token.
        batch.rebalance(K, seed=cfg.seed + step)
        if reference:
            reference.logprobs(batch, out="logp_ref")
        policy.logprobs(batch, out="logp_old")
        critic.values(batch, out="value_old")
        losses, token_reward = [surrogate, *bonus], rl.advantages.last_token_reward
        if reference:
            if cfg.kl_in == "reward":
                token_reward = partial(rl.advantages.token_reward, kl_coef=kl.coef)
            else:
                losses.append(partial(rl.losses.kl_penalty, coef=kl.coef))
            batch.apply(rl.kl.log_ratio, out="log_ratio", phase="kl")
            seen = float(batch.row_sum("log_ratio", phase="kl").mean())
            run.log({"actor/kl": seen, "actor/kl_coef": kl.coef})
            kl.update(seen, len(batch))
        batch.apply(token_reward, out="token_reward")
        batch["rewards"] = batch.row_sum("token_reward")

        # Advantages inside each answer; after the returns they are whitened over the whole batch.
        batch.apply(gae, out=["advantage", "returns"])
        run.log(batch.summary("rewards") | critic.metrics(batch) | rl.mismatch(batch))
        rl.whiten(batch)

        # Learn: the critic, and from step critic_only_steps on the actor.
        factor = partial(rl.schedules.factor, step=step, total=plan.steps)
        lr = cfg.lr * factor(cfg.schedule, warmup=cfg.warmup_steps)
        critic_lr = cfg.critic_lr * factor(cfg.critic_schedule, warmup=cfg.critic_warmup_steps)
        updates = ((critic, [value_loss], critic_lr), (policy, losses, lr))
        for network, terms, lr in updates[: 1 if step < cfg.critic_only_steps else 2]:
            for minibatch in batch.minibatches(K, seed=cfg.seed + step, passes=cfg.passes):
                minibatch["weight"] = 1.0 / minibatch["loss_tokens"].sum()
                run.log(network.forward_backward(minibatch, terms))
                run.log(network.optim_step(lr=lr, **limits))
        if reference:
            reference.follow(policy, step)

    evaluate.last()


if __name__ == "__main__":
    rl.launch(main, Config)
