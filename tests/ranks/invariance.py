"""Every loss on whatever ranks there are: values, metrics, gradient norm and the model after one step, as JSON.

The rows are uneven, and more ranks than some minibatch has rows: some ranks run empty microbatches.
"""

import dataclasses
import inspect
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

import fsdprl as rl
from fsdprl.controller import current
from fsdprl.functions import function_ref
from fsdprl.losses import RowLoss
from fsdprl.pairwise import PAIR_LOSSES
from fsdprl.segments import row_count, segment_mean


@dataclass(frozen=True)
class Config:
    model: str = ""
    data: str = ""
    out: str = ""
    dtype: str = "float64"
    budgets: tuple[int, ...] = (4096, 40)
    run: rl.RunOptions = field(default_factory=rl.RunOptions)


def wave(ids, example, *, salt: float):
    """A number in (-1, 1) for each token that depends on the row and the token alone."""
    return torch.sin(ids.double() * (1.7 + salt) + example.double() * 3.1 + salt)


def shifted(logp, bump, *, scale: float):
    """Log-probs as if another policy had made them."""
    return logp + scale * bump


def row_square(logp, segment):
    """A row-level loss of our own: the squared mean log-prob of a row."""
    mean = segment_mean(logp, segment, row_count(segment))
    return RowLoss(mean.square(), {"mean_logp": mean.detach()})


def reweighed(logp, logp_old, advantage, importance):
    """A token weight beside the sample weight."""
    return rl.losses.reweigh(rl.losses.policy_gradient(logp, advantage), importance.exp())


def ppo(logp, logp_old, gae_white):
    """PPO's surrogate of advantages that differ from token to token."""
    return rl.losses.clipped_surrogate(logp, logp_old, gae_white, clip_low=0.05, clip_high=0.1)


def ppo_value(value, value_old, gae_returns):
    """PPO's value loss on returns out of the scan."""
    return rl.losses.value_loss(value, value_old, gae_returns, clip=0.1)


POLICY_LOSSES = {
    "surrogate": partial(rl.losses.clipped_surrogate, clip_low=0.05, clip_high=0.1),
    "dual_clip": partial(rl.losses.clipped_surrogate, clip_low=0.05, clip_high=0.1, dual_clip=1.2),
    "gspo": rl.losses.gspo_surrogate,
    "cispo": partial(rl.losses.cispo_loss, ratio_high=1.1),
    "chord": rl.surrogates.chord_loss,
    "sapo": partial(rl.surrogates.sapo_loss, tau_negative=2.0),
    "topr": rl.surrogates.topr_loss,
    "fipo": partial(rl.surrogates.fipo_surrogate, half_life=3.0, weight_low=0.8),
    "sdar": partial(rl.surrogates.sdar_loss, coef=0.3, gate_beta=2.0),
    "policy_gradient": rl.losses.policy_gradient,
    "reweighed": reweighed,
    "distill": partial(rl.losses.distill_loss),
    "gkd": partial(rl.losses.gkd_loss, beta=0.3),
    "kl_k1": partial(rl.losses.kl_penalty, coef=0.1, kind="k1"),
    "kl_k2": partial(rl.losses.kl_penalty, coef=0.1, kind="k2"),
    "kl_k3": partial(rl.losses.kl_penalty, coef=0.1, kind="k3"),
    "kl_abs": partial(rl.losses.kl_penalty, coef=0.1, kind="abs"),
    "entropy": partial(rl.losses.entropy_bonus, coef=0.01),
    "sft": rl.losses.sft_loss,
    "row_square": row_square,
}
FREE = {
    "cpo": rl.preference.cpo_loss,
    "simpo": rl.preference.simpo_loss,
    "orpo": rl.preference.orpo_loss,
    "reference_free": rl.preference.dpo_reference_free_loss,
    "wpo": partial(rl.preference.dpo_wpo_loss, rpo_alpha=0.2),
    "real": rl.surrogates.real_loss,
    "mirror descent": rl.surrogates.mirror_descent_loss,
}
"""Losses of rows besides dpo_loss, which is run under each of its names."""
COUPLED = {
    "aot": rl.PairLoss(["aot"], beta=0.3, label_smoothing=0.1),
    "aot_unpaired": rl.PairLoss(["aot_unpaired"]),
    "bco_shift": rl.PairLoss(["bco_pair"], bco_shift=True),
}
"""Losses with a quantity of the whole batch, from a pass without gradient."""


def main(cfg: Config) -> None:
    form = rl.ExampleFormat(path=cfg.data, tokenizer_path=cfg.model, max_length=512)
    examples = rl.Examples(form).measure()
    sharding = rl.ShardingOptions(min_num_params=0)
    model = {"dtype": cfg.dtype, "sharding": sharding, "optimizer": {"kind": "sgd"}}
    policy = rl.Policy(cfg.model, **model)
    critic = rl.Critic(cfg.model, **model, seed=3)
    judge = rl.policy.TrainedRewardModel(cfg.model, name="judge", **model, seed=4)
    networks = (policy, critic, judge)
    for network in networks:
        network.save(Path(cfg.out) / network.name)
    batch = make_batch(examples, policy, critic)
    results = {}
    for budget in cfg.budgets:
        for network in networks:
            network.sharding = dataclasses.replace(network.sharding, tokens_per_microbatch=budget)
        for name, (network, part, losses) in cases(batch, *networks).items():
            results[f"{name} budget {budget}"] = one_step(network, part, losses, cfg)
            results.setdefault("losses", {}).update(dict.fromkeys(names(losses), 1.0))
    for name in ("gae_advantage", "gae_returns", "gae_white"):
        over, rows = batch.reduce(name), batch.row_sum(name)
        results[name] = {"mean": over.mean, "var": over.var, "min": over.min, "max": over.max}
        results[name] |= {f"row {i}": x for i, x in enumerate(rows.tolist())}
    (Path(cfg.out) / f"{current().world_size}.json").write_text(json.dumps(results))


def make_batch(examples, policy, critic) -> rl.Batch:
    """All rows of the file with every column a loss may want, on the ranks a rebalance gave them."""
    batch = examples.load(examples.indices)
    count = len(batch)
    order = torch.arange(count, dtype=torch.float64)
    batch["advantage"] = torch.sin(order * 1.3)
    batch["temperature"] = 1.0 - 0.3 * (order % 2)
    batch["unit"] = torch.arange(count) // 2
    batch["chosen"] = torch.arange(count) % 2 == 0
    policy.logprobs(batch, out="now", entropy="entropy_old")
    critic.values(batch, out="value_now")
    for i, name in enumerate(("logp_old", "logp_ref", "logp_teacher", "importance")):
        batch.apply(partial(wave, salt=float(i)), out="bump")
        batch.apply(partial(rename, scale=0.2), out=name)
    policy.run(batch, {"top_ids": "top_ids", "logp_top": "now_top"}, top=5)
    batch.apply(lowered, out="logp_teacher_top")
    batch.apply(partial(wave, salt=9.0), out="returns")
    batch.apply(partial(value_before, scale=0.3), out="value_old")
    batch["reward"] = torch.cos(order)
    batch["desirable"] = torch.arange(count) % 3 == 0
    batch["correct"] = ~batch["desirable"]
    batch["margin"] = 0.1 * (torch.arange(count) // 2).double()
    batch.rebalance(2, seed=1)
    whitened_advantages(batch)
    return batch


def whitened_advantages(batch) -> None:
    """PPO's: the score on the last token, a KL on each, GAE inside each row, moments of the whole batch."""
    batch.apply(partial(rl.advantages.token_reward, kl_coef=0.3), out="token_reward")
    batch.apply(scan, out=["gae_advantage", "gae_returns"])
    over = batch.reduce("gae_advantage")
    batch.apply(partial(whitened, mean=over.mean, variance=over.var), out="gae_white")


def scan(token_reward, value_old, segment):
    found = rl.advantages.gae(token_reward, value_old, segment, gamma=0.97, lam=0.9)
    return {f"gae_{name}": values for name, values in found.items()}


def whitened(gae_advantage, *, mean: float, variance: float):
    return rl.advantages.whiten(gae_advantage, mean=mean, variance=variance)


def kto(batch, policy):
    """KTO with a baseline out of the batch."""
    policy.logprobs(batch, out="logp_now")
    ratio = batch.row_sum("logp_now") - batch.row_sum("logp_ref")
    return partial(rl.coupled.kto_loss, beta=0.3, baseline=float(ratio.mean().abs()))


def rename(now, bump, *, scale: float):
    return shifted(now, bump, scale=scale)


def lowered(now_top, bump):
    """Log-probs of a teacher who thinks less of some of these words."""
    return now_top - 0.3 * bump.abs()[:, None]


def value_before(value_now, returns, *, scale: float):
    return value_now + scale * returns


def cases(batch, policy, critic, judge):
    """name -> (network, batch with its weights, losses)."""
    tokens = batch["loss_tokens"]
    batch["weight"] = rl.weights.token_mean(tokens)
    found = {name: (policy, batch[:], loss) for name, loss in POLICY_LOSSES.items()}
    found["value"] = (critic, batch[:], partial(rl.losses.value_loss, clip=0.1))
    surrogate = POLICY_LOSSES["surrogate"]
    found["several"] = (
        policy,
        batch[:],
        [surrogate, POLICY_LOSSES["kl_k3"], POLICY_LOSSES["entropy"]],
    )
    for name, weight in {
        "sequence_mean": rl.weights.sequence_mean(tokens),
        "fixed_length": rl.weights.fixed_length(tokens, 64),
        "some_left_out": rl.weights.token_mean(tokens, keep=torch.arange(len(batch)) % 3 != 0),
        "one_row": rl.weights.token_mean(tokens, keep=torch.arange(len(batch)) == 4),
        "none_left": torch.zeros(len(batch), dtype=torch.float64),
    }.items():
        part = batch[:]
        part["weight"] = weight
        found[name] = (policy, part, surrogate)
    pairs = batch[:]
    pairs["weight"] = rl.weights.row_mean(tokens)
    for name, kind in PAIR_LOSSES.items():
        smooth = "label_smoothing" in inspect.signature(kind).parameters
        options = {"losses": [name]} | ({"label_smoothing": 0.1} if smooth else {})
        found[f"pair {name}"] = (policy, pairs, partial(rl.preference.dpo_loss, **options))
    if "num_experts" in (Path(policy.path) / "config.json").read_text():
        found["router"] = (
            policy,
            pairs,
            partial(rl.losses.router_balance_loss, coef=0.5),
        )
    for name, loss in FREE.items():
        found[f"pair {name}"] = (policy, pairs, loss)
    for name in ("bradley_terry_loss", "bradley_terry_margin_loss"):
        loss = partial(getattr(rl.preference, name), center=0.1)
        found[name] = (judge, pairs, loss)
    for name, coupled in COUPLED.items():
        part = batch[:]
        part["weight"] = rl.weights.row_mean(tokens)
        found[f"coupled {name}"] = (policy, part, coupled.of(part, policy))
    found["coupled kto"] = (policy, pairs, kto(pairs, policy))
    found["ppo"] = (policy, batch[:], ppo)
    found["ppo value"] = (critic, batch[:], ppo_value)
    return found


def one_step(network, batch, losses, cfg: Config) -> dict:
    """Loss, metrics and gradient norm; then plain gradient descent and every row's sum under the moved model."""
    metrics = network.forward_backward(batch, losses)
    metrics |= network.optim_step(lr=0.5, max_grad_norm=0.0)
    if network.kind == "policy":
        network.logprobs(batch, out="after")
    elif network.kind == "value":
        network.values(batch, out="after")
    after = network.run(batch, {}) if network.kind == "reward" else batch.row_sum("after")
    network.load(Path(cfg.out) / network.name)
    return metrics | {f"row {i}": x for i, x in enumerate(after.tolist())}


def names(losses) -> list[str]:
    """Of the functions that a step was made with."""
    return [function_ref(f).qualname for f in (losses if isinstance(losses, list) else [losses])]


if __name__ == "__main__":
    rl.launch(main, Config)
