r"""Self-correction in two turns: the model answers, is asked to check itself, and answers again.

    torchrun --nproc-per-node 8 recipes/grpo_self_correct.py --model Qwen/Qwen3-0.6B --data gsm8k_train.jsonl \
        --prompt-key question --answer-key answer

Differs from grpo.py in `ask_again` and in the reward: that of the second turn, and a bonus for what it gains over
the first, as in SCoRe's second stage (Kumar et al. 2024), so that answering twice alike is not the easy way out.

Shapes: P prompts, G conversations per prompt, N = P * G rows; S tokens of the model packed on a rank.
"""

from dataclasses import dataclass, field
from functools import partial

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
    question: str = "Check your answer step by step, and correct it if it is wrong."  # of turn 2
    gain: float = 1.0  # weight of what the second turn scores above the first
    prompts_per_step: int = 64  # P
    group_size: int = 8  # G, conversations from each prompt
    temperature: float = 1.0  # training divides logits by it too
    max_prompt_length: int = 1024  # tokens
    long_prompts: rl.LongPrompts = "error"  # what becomes of longer ones above 1 % of data
    max_new_tokens: int = 2048  # most tokens behind the prompt, both turns together
    turns: rl.TurnOptions = field(  # keep: the second turn sees the first one's thinking
        default_factory=lambda: rl.TurnOptions(max_turns=2, history="keep")
    )
    rewards: tuple[str, ...] = ("accuracy",)  # of each turn: built-in names, or module:function
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
    clip_high: float = 0.28  # and at 1 + clip_high
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative; 0: none
    eval_every: int = 20  # steps between held-out evaluations; 0 for none
    eval_prompts: int = 256  # most held-out prompts of one evaluation
    eval_samples: int = 1  # conversations from each, for mean@n and pass@k; 0: a greedy one
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    correction: rl.CorrectionOptions = field(default_factory=rl.CorrectionOptions)
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    engine: rl.EngineOptions = field(default_factory=rl.EngineOptions)
    reward: rl.RewardOptions = field(default_factory=rl.RewardOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/grpo_self_correct"))


# ---- on the workers: pure functions, sent by name; positional parameters name columns, all [S]


def surrogate(logp, logp_old, advantage, is_weight, *, clip_low, clip_high, dual_clip):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logp - logp_old), times is_weight."""
    ratio = (logp - logp_old).exp()
    if dual_clip:
        ratio = ratio.clamp(max=dual_clip)  # binds where the advantage is negative
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -(ratio * advantage).minimum(clipped * advantage)
    shares = rl.losses.clip_shares(clipped * advantage < ratio * advantage, advantage)
    metrics = {"pg_loss": loss, "ppo_kl": logp_old - logp, **shares}
    return rl.losses.reweigh((loss, metrics), is_weight)


def ask_again(conversation, *, question: str):
    """The environment: one question behind the first turn."""
    return {"role": "user", "content": question} if conversation.turn == 1 else None


# ---- on the controller: every rank runs this file, rank 0 also `main`; it sees samples, ranks see tokens


def main(cfg: Config) -> None:
    run = rl.Run(cfg.run)
    rewards = rl.Rewards(cfg.rewards, cfg.reward_weights, cfg.reward)
    env = partial(ask_again, question=cfg.question)
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
    loss = partial(surrogate, **rl.clips(cfg.clip_low, cfg.clip_high, cfg.dual_clip))
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    run.track(policy=policy)

    often = {"every": cfg.eval_every, "prompts": cfg.eval_prompts, "samples": cfg.eval_samples}
    evaluate = rl.Evaluator(run, sampler, rewards, held_out, env=env, turns=cfg.turns, **often)

    for step in run.steps(plan):
        sampler.pull()
        evaluate(step)

        # Hold G conversations from each prompt. Rows are group-major: a column [N] views as [P, G].
        batch = sampler.rollout(env, train.at(step, P), n=G, turns=cfg.turns)
        batch["first"], batch["second"] = rewards(batch, turn=0), rewards(batch)
        batch["reward"] = batch["second"] + cfg.gain * (batch["second"] - batch["first"])
        run.log(rewards.metrics(batch, "grpo/score"))
        run.log(batch.summary("reward", "length", "prompt_length", "truncated"))
        run.log(batch.summary("first", "second", "turns", "rewritten"))
        run.record(batch)

        # Center and scale inside each group; a group that agrees teaches nothing and is left out.
        reward_PG = batch["reward"].view(P, G)
        std_P1 = reward_PG.std(dim=1, keepdim=True)
        advantage_PG = (reward_PG - reward_PG.mean(dim=1, keepdim=True)) / (std_P1 + 1e-4)
        batch["advantage"] = advantage_PG.flatten()
        batch = batch[(std_P1 > 0).expand_as(reward_PG).flatten()]  # no rows left: no updates

        # Learn. loss_tokens counts the model's own tokens: the question is not trained on.
        batch.rebalance(K, seed=cfg.seed + step)
        policy.logprobs(batch, out="logp_old")
        run.log(rl.correct(batch, cfg.correction))
        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        for minibatch in batch.minibatches(K, seed=cfg.seed + step, passes=cfg.passes):
            minibatch["weight"] = 1.0 / minibatch["loss_tokens"].sum()  # a mean over tokens
            run.log(policy.forward_backward(minibatch, loss))
            run.log(policy.optim_step(lr=lr, **limits))

    evaluate.last()


if __name__ == "__main__":
    rl.launch(main, Config)
