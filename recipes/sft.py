"""SFT: maximise the likelihood of what an assistant says, token by token.

    torchrun --nproc-per-node 8 recipes/sft.py --model Qwen/Qwen3-0.6B-Base --data chats.jsonl

Rows are conversations (`messages`), of which the assistant's turns are learnt, prompts with completions, or plain
text. Rows are packed without padding; the loss is a mean over all learnt tokens of the batch, wherever they lie.

Shapes: B rows of a step; S learnt tokens packed on a rank.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import fsdprl as rl


@dataclass(frozen=True)
class Config:
    model: str = "Qwen/Qwen3-0.6B-Base"  # Hugging Face checkpoint: a folder or a hub name
    data: str = "train.jsonl"  # rows: jsonl, json, csv, parquet, or a hub name
    eval_data: str = ""  # held-out rows; empty holds out eval_share of data
    eval_share: float = 0.02  # share of data held out where there is no eval_data
    messages_key: str = "messages"  # column of a conversation
    prompt_key: str = "prompt"  # column of a prompt
    completion_key: str = "completion"  # column of its completion
    text_key: str = "text"  # column of plain text, learnt whole
    prompt_format: Literal["auto", "chat", "raw"] = "auto"  # how string prompts are read
    assistant_turns: Literal["all", "last"] = "all"  # which assistant messages are learnt
    chat_template: str = ""  # Jinja file in place of the tokenizer's own template
    system: str = ""  # system prompt, or a file that holds it
    max_length: int = 4096  # most tokens of a row
    over_length: rl.OverLength = "error"  # what becomes of longer rows
    steps: int = 0  # steps to train; 0 takes as many as epochs need
    epochs: float = 1.0  # passes over data, where steps is 0
    seed: int = 0  # of data order
    data_workers: int = 0  # processes of each rank that make rows ahead of their step; 0: none
    batch_size: int = 64  # B, rows of an optimizer step
    lr: float = 1e-5  # peak learning rate
    schedule: Literal["cosine", "linear", "constant"] = (
        "cosine"  # of the learning rate after warm-up
    )
    warmup_steps: int = 20  # steps of linear warm-up
    weight_decay: float = 0.01  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    beta2: float = 0.95  # of AdamW; beta1 is 0.9
    eval_every: int = 100  # steps between held-out evaluations; 0 for none
    eval_rows: int = 512  # most held-out rows of one evaluation
    dtype: rl.DType | None = (
        None  # of the computation; none: bfloat16 on accelerators, float32 on CPU
    )
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/sft"))


def nll(logp):
    """-log p(token), not reduced; [S]."""
    return -logp, {"nll": -logp}


def main(cfg: Config) -> None:
    run = rl.Run(cfg.run)
    train, held_out = load_examples(cfg)
    plan = rl.Plan(
        rows=len(train),
        prompts_per_step=cfg.batch_size,
        steps=cfg.steps,
        epochs=cfg.epochs,
        flag="--batch-size",
    )
    policy = rl.Policy(
        cfg.model, sharding=cfg.sharding, dtype=cfg.dtype, optimizer={"betas": (0.9, cfg.beta2)}
    )
    run.track(policy=policy)

    for step in run.steps(plan):
        if cfg.eval_every and step % cfg.eval_every == 0:
            run.log(evaluate(policy, held_out, cfg))
        batch = train.batch(step, cfg.batch_size)
        batch["weight"] = 1.0 / batch["loss_tokens"].sum()
        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        run.log(policy.forward_backward(batch, nll))
        run.log(
            policy.optim_step(lr=lr, weight_decay=cfg.weight_decay, max_grad_norm=cfg.max_grad_norm)
        )

    if cfg.eval_every:
        run.log(evaluate(policy, held_out, cfg))


def evaluate(policy, held_out, cfg: Config) -> dict[str, float]:
    """Mean negative log-likelihood per learnt token of held-out rows."""
    batch = held_out.load(held_out.first(cfg.eval_rows))
    policy.logprobs(batch, out="logp")
    return {"val/loss": -batch.reduce("logp").mean}


def load_examples(cfg: Config):
    """Training and held-out rows, tokenised and measured on the ranks."""
    form = partial(
        rl.ExampleFormat,
        tokenizer_path=cfg.model,
        max_length=cfg.max_length,
        over_length=cfg.over_length,
        assistant_turns=cfg.assistant_turns,
        prompt_format=cfg.prompt_format,
        chat_template=cfg.chat_template,
        system=cfg.system,
        messages_key=cfg.messages_key,
        prompt_key=cfg.prompt_key,
        completion_key=cfg.completion_key,
        text_key=cfg.text_key,
    )
    examples = rl.Examples(form(path=cfg.data), seed=cfg.seed, workers=cfg.data_workers).measure()
    if cfg.eval_data:
        return examples, rl.Examples(form(path=cfg.eval_data), flag="--eval-data").measure()
    return examples.split(cfg.eval_share if cfg.eval_every else 0.0)


if __name__ == "__main__":
    rl.launch(main, Config)
