r"""On-policy distillation: the student samples, and a teacher says of every token how likely it was.

    torchrun --nproc-per-node 8 recipes/distill.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B \
        --data gsm8k_train.jsonl --prompt-key question

Agarwal et al. 2023; Lu 2025 ("On-policy distillation"). The advantage of a token is logp_teacher - logp_old, minus an
unbiased estimate of its reverse KL, so that a policy gradient step lowers KL(student || teacher) where the student
really goes. No reward is needed; --rewards only evaluates.

Shapes: P prompts, G answers per prompt, N = P * G samples; S response tokens packed on a rank.
"""

from dataclasses import dataclass, field
from functools import partial

import fsdprl as rl


@dataclass(frozen=True)
class Config:
    model: str = "Qwen/Qwen3-0.6B"  # Hugging Face checkpoint: a folder or a hub name
    teacher: str = "Qwen/Qwen3-8B"  # another one with the same tokenizer
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
    prompts_per_step: int = 64  # P
    group_size: int = 4  # G, answers to each prompt
    temperature: float = 1.0  # training divides logits by it too
    max_prompt_length: int = 1024  # tokens
    long_prompts: rl.LongPrompts = "error"  # what becomes of longer ones above 1 % of data
    max_new_tokens: int = 1024  # most tokens of an answer
    rewards: tuple[str, ...] = ()  # to evaluate by: built-in names, or module:function; may be none
    reward_weights: tuple[float, ...] = ()  # one a reward; none weighs all 1
    # learning
    minibatches: int = 1  # optimizer steps of each pass over a batch; 1 is exactly on-policy
    passes: int = 1  # over each batch of samples
    lr: float = 1e-5  # peak learning rate
    schedule: rl.Schedule = "constant"  # of the learning rate after warm-up
    warmup_steps: int = 0  # steps of linear warm-up
    weight_decay: float = 0.0  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high
    eval_every: int = 20  # steps between held-out evaluations; 0 for none
    eval_prompts: int = 256  # most held-out prompts of one evaluation
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    engine: rl.EngineOptions = field(default_factory=rl.EngineOptions)
    reward: rl.RewardOptions = field(default_factory=rl.RewardOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/distill"))


# ---- on the workers: pure functions, sent by name; positional parameters name columns, all [S]


def towards_teacher(logp_teacher, logp_old):
    """Minus the reverse KL of the tokens that the student chose, estimated from them."""
    return logp_teacher - logp_old


# ---- on the controller: the algorithm


def main(cfg: Config) -> None:
    run = rl.Run(cfg.run)
    rewards = rl.Rewards(cfg.rewards, cfg.reward_weights, cfg.reward) if cfg.rewards else None
    train, held_out = rl.prompt_sets(cfg)
    theirs = rl.load_tokenizer(cfg.teacher, flag="--teacher").get_vocab()
    if theirs != train.tokenizer.get_vocab():
        raise rl.UserError(f"--teacher {cfg.teacher}: its tokenizer is another one than --model's")
    P, G, K = cfg.prompts_per_step, cfg.group_size, cfg.minibatches
    plan = rl.Plan(len(train), P, G, K, cfg.steps, cfg.epochs, passes=cfg.passes)
    policy = rl.Policy(cfg.model, sharding=cfg.sharding, dtype=cfg.dtype)
    teacher = rl.Reference(cfg.teacher, name="teacher", sharding=cfg.sharding, dtype=cfg.dtype)
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
    loss = partial(rl.losses.clipped_surrogate, **clips)
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    run.track(policy=policy)

    for step in run.steps(plan):
        sampler.pull()
        if cfg.eval_every and step % cfg.eval_every == 0:
            evaluate(run, sampler, teacher, rewards, held_out.first(cfg.eval_prompts))

        batch = sampler.generate(train.at(step, P), n=G)
        run.log(batch.summary("length", "prompt_length", "truncated"))
        run.record(batch)

        batch.rebalance(K, seed=cfg.seed + step)
        run.log({"actor/reverse_kl": compare(policy, teacher, batch)} | rl.mismatch(batch))
        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        for minibatch in batch.minibatches(K, seed=cfg.seed + step, passes=cfg.passes):
            minibatch["weight"] = 1.0 / minibatch["loss_tokens"].sum()  # a mean over tokens
            run.log(policy.forward_backward(minibatch, loss))
            run.log(policy.optim_step(lr=lr, **limits))

    if cfg.eval_every:
        sampler.pull()
        evaluate(run, sampler, teacher, rewards, held_out.first(cfg.eval_prompts))


def compare(policy, teacher, batch) -> float:
    """Log-probs under both, the advantage of each token, and the reverse KL in nats a token."""
    policy.logprobs(batch, out="logp_old")
    teacher.logprobs(batch, out="logp_teacher")
    batch.apply(towards_teacher, out="advantage")
    return -batch.reduce("advantage").mean


def evaluate(run, sampler, teacher, rewards, prompts) -> None:
    """Reverse KL, and mean reward if there is one, of one answer to each held-out prompt."""
    answers = sampler.generate(prompts, phase="eval")
    run.log({"eval/reverse_kl": compare(sampler.policy, teacher, answers)})
    if rewards:
        answers["reward"] = rewards(answers)
        run.log({"eval/reward": float(answers["reward"].mean())})
    run.show(answers.peek(3))


if __name__ == "__main__":
    rl.launch(main, Config)
