"""Reward model: a score for each completion, so that the chosen one of a pair beats the rejected one.

    torchrun --nproc-per-node 8 recipes/reward_model.py --model Qwen/Qwen3-0.6B --data pairs.jsonl

Bradley and Terry 1952; Ouyang et al. 2022, eq. 1: -log sigma(score(chosen) - score(rejected)), the score read at a
completion's last token by a fresh head on the model's body. A margin column makes clearly better completions win by
more (Touvron et al. 2023). The checkpoint loads as AutoModelForSequenceClassification, and in recipes/ppo.py as
--reward-model or --critic.

Shapes: B pairs of a step, N = 2 B rows.
"""

from dataclasses import dataclass, field
from functools import partial

import fsdprl as rl


@dataclass(frozen=True)
class Config:
    model: str = "Qwen/Qwen3-0.6B"  # Hugging Face checkpoint: a folder or a hub name
    data: str = "pairs.jsonl"  # pairs: jsonl, json, csv, parquet, or a hub name
    eval_data: str = ""  # held-out pairs; empty holds out eval_share of data
    eval_share: float = 0.02  # share of data held out where there is no eval_data
    prompt_key: str = "prompt"  # column of the prompt; else `conversations` or `messages`
    chosen_key: str = "chosen"  # column of the better completion: text, message or messages
    rejected_key: str = "rejected"  # column of the worse one
    margin_key: str = ""  # column of a number that the chosen score must win by; empty: none
    prompt_format: rl.PromptFormat = "auto"  # how string prompts are read
    chat_template: str = ""  # Jinja file in place of the tokenizer's own template
    system: str = ""  # system prompt, or a file that holds it
    max_length: int = 2048  # most tokens of prompt and completion
    over_length: rl.OverLength = "error"  # what becomes of pairs with a longer one
    steps: int = 0  # steps to train; 0 takes as many as epochs need
    epochs: float = 1.0  # passes over data, where steps is 0
    seed: int = 0  # of data order and of the fresh head
    data_workers: int = 0  # processes of each rank that make rows ahead of their step; 0: none
    batch_size: int = 64  # B, pairs of an optimizer step
    lr: float = 1e-5  # peak learning rate
    schedule: rl.Schedule = "linear"  # of the learning rate after warm-up
    warmup_steps: int = 10  # steps of linear warm-up
    weight_decay: float = 0.0  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    center: float = 0.0  # weight of (chosen + rejected score)^2, which keeps scores around 0
    eval_every: int = 100  # steps between evaluations over all held-out pairs; 0 for none
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/reward_model"))


def main(cfg: Config) -> None:
    loss = partial(rl.preference.bradley_terry_loss, center=cfg.center)
    if cfg.margin_key:
        loss = partial(rl.preference.bradley_terry_margin_loss, center=cfg.center)
    run = rl.Run(cfg.run)
    form = rl.PreferenceFormat(
        path=cfg.data,
        tokenizer_path=cfg.model,
        max_length=cfg.max_length,
        over_length=cfg.over_length,
        prompt_format=cfg.prompt_format,
        chat_template=cfg.chat_template,
        system=cfg.system,
        prompt_key=cfg.prompt_key,
        chosen_key=cfg.chosen_key,
        rejected_key=cfg.rejected_key,
        margin_key=cfg.margin_key,
    )
    sets = (form, cfg.eval_data, cfg.eval_share)
    train, held_out = rl.preference_sets(
        *sets, paired=True, seed=cfg.seed, workers=cfg.data_workers
    )
    plan = rl.Plan(len(train), cfg.batch_size, steps=cfg.steps, epochs=cfg.epochs)
    model = rl.TrainedRewardModel(cfg.model, sharding=cfg.sharding, dtype=cfg.dtype, seed=cfg.seed)
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    run.track(model=model)

    for step in run.steps(plan):
        if cfg.eval_every and step % cfg.eval_every == 0:
            run.log(evaluate(model, loss, held_out))
        batch = train.batch(step, cfg.batch_size)
        batch["weight"] = rl.weights.row_mean(batch["loss_tokens"])  # a mean over pairs
        run.log(model.forward_backward(batch, loss))
        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        run.log(model.optim_step(lr=lr, **limits))

    if cfg.eval_every:
        run.log(evaluate(model, loss, held_out))


def evaluate(model, loss, held_out) -> dict[str, float]:
    """Loss, accuracy and scores over every held-out pair."""
    batch = held_out.load(held_out.all())
    batch["weight"] = rl.weights.row_mean(batch["loss_tokens"])
    return model.evaluate(batch, loss)


if __name__ == "__main__":
    rl.launch(main, Config)
