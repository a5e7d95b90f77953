"""KTO: learn from completions that are good or bad by themselves, without pairs.

    torchrun --nproc-per-node 8 recipes/kto.py --model Qwen/Qwen3-0.6B --data labels.jsonl

Ethayarajh et al. 2024, eq. 8. With x the log-ratio of policy to reference over a completion, a desirable one has the
loss 1 - sigma(beta (x - z)), another one 1 - sigma(beta (z - x)). The baseline z is the KL between policy and
reference, estimated at each step from prompts with other prompts' completions. A file of pairs will do as well: chosen
completions are then desirable.

Shapes: N completions of a step; S learnt tokens packed on a rank.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import fsdprl as rl


@dataclass(frozen=True)
class Config:
    model: str = "Qwen/Qwen3-0.6B"  # Hugging Face checkpoint: a folder or a hub name
    data: str = "labels.jsonl"  # completions: jsonl, json, csv, parquet, or a hub name
    eval_data: str = ""  # held-out completions; empty holds out eval_share of data
    eval_share: float = 0.02  # share of data held out where there is no eval_data
    prompt_key: str = "prompt"  # column of the prompt; else `conversations` or `messages`
    completion_key: str = "completion"  # column of the completion: text, message or messages
    label_key: str = "label"  # column that says whether it is desirable
    chosen_key: str = "chosen"  # of a file of pairs: column of the better completion
    rejected_key: str = "rejected"  # and of the worse one
    prompt_format: rl.PromptFormat = "auto"  # how string prompts are read
    chat_template: str = ""  # Jinja file in place of the tokenizer's own template
    system: str = ""  # system prompt, or a file that holds it
    max_length: int = 2048  # most tokens of prompt and completion
    over_length: rl.OverLength = "error"  # what becomes of longer ones
    steps: int = 0  # steps to train; 0 takes as many as epochs need
    epochs: float = 1.0  # passes over data, where steps is 0
    seed: int = 0  # of data order
    data_workers: int = 0  # processes of each rank that make rows ahead of their step; 0: none
    batch_size: int = 64  # N, completions of an optimizer step
    lr: float = 1e-6  # peak learning rate
    schedule: rl.Schedule = "linear"  # of the learning rate after warm-up
    warmup_steps: int = 10  # steps of linear warm-up
    weight_decay: float = 0.0  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    loss: Literal["kto", "apo_zero"] = "kto"  # apo_zero: without a baseline
    beta: float = 0.1  # how strongly the reference holds
    # weight times number should be 1 to 4/3 times as much on the desirable side as on the other
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference_model: str = ""  # checkpoint of the reference; empty: model
    follow_every: int = 0  # steps after which the reference moves towards the policy; 0: never
    follow_share: float = 0.6  # by this share
    eval_every: int = 100  # steps between evaluations over all that is held out; 0 for none
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/kto"))


def main(cfg: Config) -> None:
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
        completion_key=cfg.completion_key,
        label_key=cfg.label_key,
    )
    sets = (form, cfg.eval_data, cfg.eval_share)
    train, held_out = rl.preference_sets(
        *sets, paired=False, seed=cfg.seed, workers=cfg.data_workers
    )
    plan = rl.Plan(len(train), cfg.batch_size, steps=cfg.steps, epochs=cfg.epochs)
    layout = {"sharding": cfg.sharding, "dtype": cfg.dtype}
    policy = rl.Policy(cfg.model, **layout)
    follow = {"follow_every": cfg.follow_every, "follow_share": cfg.follow_share}
    reference = rl.Reference(cfg.reference_model or cfg.model, **layout, **follow)
    loss = partial(
        rl.coupled.kto_loss,
        beta=cfg.beta,
        desirable_weight=cfg.desirable_weight,
        undesirable_weight=cfg.undesirable_weight,
    )
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    run.track(policy=policy, reference=reference)

    for step in run.steps(plan):
        if cfg.eval_every and step % cfg.eval_every == 0:
            run.log(evaluate(policy, reference, loss, held_out, cfg))

        wanted = train.at(step, cfg.batch_size)
        z = baseline(policy, reference, train.mismatched(wanted)) if cfg.loss == "kto" else 0.0
        batch = train.batch(step, cfg.batch_size)
        reference.logprobs(batch)
        batch["weight"] = rl.weights.row_mean(batch["loss_tokens"])  # a mean over completions
        run.log(policy.forward_backward(batch, partial(loss, baseline=z)) | {"actor/baseline": z})
        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        run.log(policy.optim_step(lr=lr, **limits))
        reference.follow(policy, step)

    if cfg.eval_every:
        run.log(evaluate(policy, reference, loss, held_out, cfg))


def baseline(policy, reference, mismatched) -> float:
    """z: the mean log-ratio of completions that answer something else, at least 0; without gradient."""
    policy.logprobs(mismatched, out="logp_now")
    reference.logprobs(mismatched)
    ratio = mismatched.row_sum("logp_now") - mismatched.row_sum("logp_ref")
    return max(float(ratio.mean()), 0.0)


def evaluate(policy, reference, loss, held_out, cfg: Config) -> dict[str, float]:
    """Loss, accuracy and rewards over everything that is held out."""
    batch, z = held_out.load(held_out.all()), 0.0
    if cfg.loss == "kto":
        z = baseline(policy, reference, held_out.mismatched(held_out.all()))
    reference.logprobs(batch)
    batch["weight"] = rl.weights.row_mean(batch["loss_tokens"])
    return policy.evaluate(batch, partial(loss, baseline=z))


if __name__ == "__main__":
    rl.launch(main, Config)
