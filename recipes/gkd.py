r"""GKD: match a teacher's whole distribution at every token, on the student's own answers and on the data's.

    torchrun --nproc-per-node 8 recipes/gkd.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B \
        --data gsm8k_train.jsonl --prompt-key question --completion-key answer

Agarwal et al. 2023, algorithm 1: in a share of the steps the student samples, in the others answers are those of the
data; a generalised Jensen-Shannon divergence to the teacher is lowered on either, without a gradient through sampling.
Of the teacher's distribution its likeliest words are kept, and all others as one. distill.py needs no more of it than
the probability of the tokens that were sampled. No reward is needed; --rewards only evaluates.

Shapes: P prompts, one answer each; S response tokens packed on a rank, K words at each.
"""

from dataclasses import dataclass, field
from functools import partial
from random import Random

import fsdprl as rl


@dataclass(frozen=True)
class Config:
    model: str = "Qwen/Qwen3-0.6B"  # Hugging Face checkpoint: a folder or a hub name
    teacher: str = "Qwen/Qwen3-8B"  # another one with the same tokenizer
    data: str = "gsm8k_train.jsonl"  # prompts: jsonl, json, csv, parquet, or a hub name
    eval_data: str = ""  # held-out prompts; empty holds out eval_share of data
    eval_share: float = 0.02  # share of data held out where there is no eval_data
    prompt_key: str = "prompt"  # column of the prompt: a string or chat messages
    completion_key: str = "completion"  # column of the data's own answer to it
    answer_key: str = ""  # column of the reference answer, for the rewards
    prompt_format: rl.PromptFormat = "auto"  # how string prompts are read
    chat_template: str = ""  # Jinja file in place of the tokenizer's own template
    system: str = ""  # system prompt, or a file that holds it
    steps: int = 0  # steps to train; 0 takes as many as epochs need
    epochs: float = 1.0  # passes over data, where steps is 0
    seed: int = 0  # of data order, sampling, and whose answers a step takes
    # sampling
    prompts_per_step: int = 64  # P
    student_share: float = 0.5  # share of steps whose answers the student samples (lambda)
    temperature: float = 1.0  # training divides both models' logits by it too
    max_prompt_length: int = 1024  # tokens
    long_prompts: rl.LongPrompts = "error"  # what becomes of longer ones above 1 % of data
    max_new_tokens: int = 1024  # most tokens of an answer; longer rows of the data are cut
    rewards: tuple[str, ...] = ()  # to evaluate by: built-in names, or module:function; may be none
    reward_weights: tuple[float, ...] = ()  # one a reward; none weighs all 1
    # learning
    beta: float = 0.5  # 0: KL(teacher to student), 1: KL(student to teacher), or between
    sft_alpha: float = 0.0  # weight of the cross-entropy beside it, on the data's own answers only
    top_k: int = 64  # K, the teacher's likeliest words that are told apart
    lr: float = 1e-5  # peak learning rate
    schedule: rl.Schedule = "constant"  # of the learning rate after warm-up
    warmup_steps: int = 0  # steps of linear warm-up
    weight_decay: float = 0.0  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    eval_every: int = 20  # steps between held-out evaluations; 0 for none
    eval_prompts: int = 256  # most held-out prompts of one evaluation
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    engine: rl.EngineOptions = field(default_factory=rl.EngineOptions)
    reward: rl.RewardOptions = field(default_factory=rl.RewardOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/gkd"))


def main(cfg: Config) -> None:
    run = rl.Run(cfg.run)
    rewards = rl.Rewards(cfg.rewards, cfg.reward_weights, cfg.reward) if cfg.rewards else None
    train, held_out = rl.prompt_sets(cfg)
    theirs = rl.load_tokenizer(cfg.teacher, flag="--teacher").get_vocab()
    if theirs != train.tokenizer.get_vocab():
        raise rl.UserError(f"--teacher {cfg.teacher}: its tokenizer is another one than --model's")
    if not 0 <= cfg.beta <= 1 or not 0 <= cfg.student_share <= 1 or cfg.top_k < 1:
        raise rl.UserError("--beta and --student-share lie between 0 and 1; --top-k is at least 1")
    if cfg.sft_alpha < 0 or (cfg.sft_alpha and cfg.student_share == 1):
        said = "0 (off) or more, and --student-share below 1: it is of the data's own answers"
        raise rl.UserError(f"--sft-alpha {cfg.sft_alpha}: {said}")
    written = written_answers(cfg) if cfg.student_share < 1 else None
    P = cfg.prompts_per_step
    plan = rl.Plan(len(train), P, steps=cfg.steps, epochs=cfg.epochs)
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
    loss = partial(rl.losses.gkd_loss, beta=cfg.beta)
    imitation = [partial(rl.losses.sft_loss, coef=cfg.sft_alpha)] if cfg.sft_alpha else []
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    run.track(policy=policy)

    def evaluate() -> None:
        """Divergence, and mean reward if there is one, of one answer to each held-out prompt."""
        sampler.pull()
        answers = sampler.generate(held_out.first(cfg.eval_prompts), phase="eval")
        teacher.top(answers, cfg.top_k)
        answers["weight"] = 1.0 / answers["loss_tokens"].sum()
        run.log({"eval/divergence": policy.evaluate(answers, loss)["val/divergence"]})
        if rewards:
            answers["reward"] = rewards(answers)
            run.log({"eval/reward": float(answers["reward"].mean())})
        run.show(answers.peek(3))

    for step in run.steps(plan):
        if cfg.eval_every and step % cfg.eval_every == 0:
            evaluate()

        # Whose answers? Both kinds are to the same prompts, wherever a run is resumed.
        prompts = train.at(step, P)
        if written is None or Random(f"{cfg.seed} {step}").random() < cfg.student_share:
            sampler.pull()
            batch, losses = sampler.generate(prompts), [loss]
            run.log(batch.summary("length", "prompt_length", "truncated"))
            run.record(batch)
        else:
            batch, losses = written.load([prompt.index for prompt in prompts]), [loss, *imitation]
            batch["temperature"] = cfg.temperature

        batch.rebalance()
        teacher.top(batch, cfg.top_k)
        batch["weight"] = 1.0 / batch["loss_tokens"].sum()  # a mean over tokens
        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        run.log(policy.forward_backward(batch, losses))
        run.log(policy.optim_step(lr=lr, **limits))

    if cfg.eval_every:
        evaluate()


def written_answers(cfg: Config):
    """The data's own answers, behind the prompts that the student would be given."""
    form = rl.ExampleFormat(
        path=cfg.data,
        tokenizer_path=cfg.model,
        max_length=cfg.max_prompt_length + cfg.max_new_tokens,
        over_length="truncate",
        prompt_format=cfg.prompt_format,
        chat_template=cfg.chat_template,
        system=cfg.system,
        prompt_key=cfg.prompt_key,
        completion_key=cfg.completion_key,
    )
    return rl.Examples(form).measure()


if __name__ == "__main__":
    rl.launch(main, Config)
