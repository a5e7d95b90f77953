"""DPO and its relatives: raise the likelihood of chosen completions over rejected ones, measured from a reference.

    torchrun --nproc-per-node 8 recipes/dpo.py --model Qwen/Qwen3-0.6B --data pairs.jsonl

Rafailov et al. 2023. With c and r the log-ratios of policy to reference, summed over each completion's tokens, the
loss is -log sigma(beta (c - r)). --losses names it or another one, or several, which are added with --loss-weights
(MPO: sigmoid bco_pair sft with 0.8 0.2 1). Both rows of a pair stay together on one rank.

Shapes: B pairs of a step, N = 2 B rows; S learnt tokens packed on a rank.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

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
    prompt_format: rl.PromptFormat = "auto"  # how string prompts are read
    chat_template: str = ""  # Jinja file in place of the tokenizer's own template
    system: str = ""  # system prompt, or a file that holds it
    max_length: int = 2048  # most tokens of prompt and completion
    over_length: rl.OverLength = "error"  # what becomes of pairs with a longer one
    steps: int = 0  # steps to train; 0 takes as many as epochs need
    epochs: float = 1.0  # passes over data, where steps is 0
    seed: int = 0  # of data order
    data_workers: int = 0  # processes of each rank that make rows ahead of their step; 0: none
    batch_size: int = 64  # B, pairs of an optimizer step
    lr: float = 1e-6  # peak learning rate
    schedule: rl.Schedule = "linear"  # of the learning rate after warm-up
    warmup_steps: int = 10  # steps of linear warm-up
    weight_decay: float = 0.0  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # clip of the global gradient norm; 0 never clips
    # the loss
    losses: tuple[str, ...] = ("sigmoid",)  # of pairwise.py, or aot or aot_unpaired alone
    loss_weights: tuple[float, ...] = ()  # one a loss; none weighs all 1
    beta: float = 0.1  # how strongly the reference holds
    label_smoothing: float = 0.0  # probability that a label is wrong (cDPO, robust, exo_pair)
    rpo_alpha: float = 0.0  # weight of the chosen completion's likelihood beside the loss
    ld_alpha: float = 1.0  # weight of tokens beyond the shorter completion's length
    # what takes reverse KL's place (f-DPO)
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        "reverse_kl"
    )
    f_alpha: float = 0.5  # of alpha_divergence
    discopop_tau: float = 0.05  # of discopop
    bco_shift: bool = False  # of bco_pair: the running mean reward instead of 0
    wpo: bool = False  # weigh pairs by how likely the policy itself would write them
    router_aux_coef: float = 0.0  # weight of the even use of experts (mixtures of experts)
    # the reference: a model of its own; the policy's log-probs before the first step; or none at all
    reference: Literal["model", "precomputed", "uniform"] = "model"
    reference_model: str = ""  # checkpoint of a reference of its own; empty: model
    follow_every: int = 0  # steps after which it moves towards the policy (TR-DPO); 0: never
    follow_share: float = 0.6  # by this share
    eval_every: int = 100  # steps between evaluations over all held-out pairs; 0 for none
    dtype: rl.DType | None = None  # of the computation; none: bfloat16, on CPU float32
    sharding: rl.ShardingOptions = field(default_factory=rl.ShardingOptions)
    run: rl.RunOptions = field(default_factory=lambda: rl.RunOptions(out="runs/dpo"))


def main(cfg: Config) -> None:
    check(cfg)
    loss = rl.PairLoss(
        cfg.losses,
        cfg.loss_weights,
        beta=cfg.beta,
        label_smoothing=cfg.label_smoothing,
        rpo_alpha=cfg.rpo_alpha,
        ld_alpha=cfg.ld_alpha,
        f_divergence=cfg.f_divergence,
        f_alpha=cfg.f_alpha,
        discopop_tau=cfg.discopop_tau,
        bco_shift=cfg.bco_shift,
        wpo=cfg.wpo,
    )
    even = partial(rl.losses.router_balance_loss, coef=cfg.router_aux_coef)
    balance = [even] if cfg.router_aux_coef else []
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
    )
    sets = (form, cfg.eval_data, cfg.eval_share)
    train, held_out = rl.preference_sets(
        *sets, paired=True, seed=cfg.seed, workers=cfg.data_workers
    )
    plan = rl.Plan(len(train), cfg.batch_size, steps=cfg.steps, epochs=cfg.epochs)
    layout = {"sharding": cfg.sharding, "dtype": cfg.dtype}
    policy = rl.Policy(cfg.model, **layout)
    limits = {"weight_decay": cfg.weight_decay, "max_grad_norm": cfg.max_grad_norm}
    if cfg.reference == "uniform":
        reference = rl.UniformReference()
    elif cfg.reference == "precomputed":
        reference = rl.PrecomputedReference(policy, train, held_out)
    else:
        follow = {"follow_every": cfg.follow_every, "follow_share": cfg.follow_share}
        reference = rl.Reference(cfg.reference_model or cfg.model, **layout, **follow)
    run.track(policy=policy, loss=loss, reference=reference)

    for step in run.steps(plan):
        if isinstance(reference, rl.PrecomputedReference):
            reference.prepare()
        if cfg.eval_every and step % cfg.eval_every == 0:
            run.log(evaluate(policy, reference, loss, held_out))

        batch = train.batch(step, cfg.batch_size)
        reference.logprobs(batch)
        batch["weight"] = rl.weights.row_mean(batch["loss_tokens"])  # a mean over pairs
        run.log(policy.forward_backward(batch, [loss.of(batch, policy), *balance]))
        lr = cfg.lr * rl.schedules.factor(cfg.schedule, step, plan.steps, cfg.warmup_steps)
        run.log(policy.optim_step(lr=lr, **limits))
        reference.follow(policy, step)

    if cfg.eval_every:
        run.log(evaluate(policy, reference, loss, held_out))


def evaluate(policy, reference, loss, held_out) -> dict[str, float]:
    """Loss, accuracy and rewards over every held-out pair."""
    batch = held_out.load(held_out.all())
    reference.logprobs(batch)
    batch["weight"] = rl.weights.row_mean(batch["loss_tokens"])
    return policy.evaluate(batch, loss.of(batch, policy, training=False))


def check(cfg: Config) -> None:
    """Flags that the chosen kind of reference would ignore."""
    if cfg.reference != "model" and (cfg.reference_model or cfg.follow_every):
        raise rl.UserError("--reference-model and --follow-every need --reference model")
    if cfg.reference == "precomputed" and cfg.ld_alpha != 1.0:
        raise rl.UserError("--ld-alpha needs log-probs of tokens; a precomputed reference has sums")


if __name__ == "__main__":
    rl.launch(main, Config)
