"""Our losses and advantages against verl.trainer.ppo.core_algos, in float64 on random ragged batches.

Runs where verl can be imported: pip install verl. Written against verl 0.9.1. Differences that are verl's:

- A group of one: verl keeps its score as the advantage (GRPO: (score - 0) / (1 + eps); RLOO: the score itself).
  Ours is 0: one answer says nothing about the others. Tested below.
- seq-mean-token-mean divides by tokens + 1e-8: the tolerance is 1e-7 there.
- The KL k3 is always clamped; ours with clamp=True.
- CISPO's bounds are widths around 1; ours are bounds on the ratio, as in MiniMax-M1.
- Dual clip is always on, at a ratio of 3; ours is off unless asked for.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdprl import advantages, kl, losses, weights
from tests.oracles.ragged import Ragged, reduced, same

core = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed", exc_type=ImportError
)
SEEDS = pytest.mark.parametrize("seed", range(4))
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum")


def actor(**fields: Any) -> Any:
    """Their configuration of an actor."""
    config = pytest.importorskip(
        "verl.workers.config", reason="verl's config cannot be imported", exc_type=ImportError
    )
    names = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return config.ActorConfig(**names, **fields)


def weight_of(mode: str, rows: Ragged) -> Tensor:
    """verl's loss_agg_mode as our weight column."""
    return {
        "token-mean": weights.token_mean(rows.lengths),
        "seq-mean-token-mean": weights.sequence_mean(rows.lengths),
        "seq-mean-token-sum-norm": weights.fixed_length(rows.lengths, rows.mask.shape[1]),
        "seq-mean-token-sum": weights.row_mean(rows.lengths),
    }[mode]


@SEEDS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo"])
def test_policy_losses(name: str, mode: str, seed: int):
    rows = Ragged.of(seed)
    old = rows.logps()
    start, advantage = rows.near(old), rows.numbers()
    low, high = (0.03, 0.05) if name == "gspo" else (0.2, 0.28)
    config = actor(clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1.5)
    ours_of = {
        "vanilla": partial(losses.clipped_surrogate, clip_low=low, clip_high=high, dual_clip=1.5),
        "gspo": partial(losses.gspo_surrogate, segment=rows.segment, clip_low=low, clip_high=high),
        "cispo": partial(losses.cispo_loss, ratio_low=1 - low, ratio_high=1 + high),
    }[name]
    weight = weight_of(mode, rows)

    def ours(logp: Tensor) -> Tensor:
        result = ours_of(rows.pack(logp), rows.pack(old), rows.spread(advantage))
        return reduced(result, weight, rows.segment)

    def theirs(logp: Tensor) -> Tensor:
        function = core.get_policy_loss_fn(name)
        wide = advantage[:, None].expand_as(logp)
        return function(old, logp, wide, rows.mask.double(), loss_agg_mode=mode, config=config)[0]

    same(ours, theirs, start, rows.mask, tolerance=1e-7)


@SEEDS
def test_policy_metrics(seed: int):
    rows = Ragged.of(seed)
    old = rows.logps()
    logp, advantage = rows.near(old), rows.numbers()
    config = actor(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5)
    wide = advantage[:, None].expand_as(logp)
    _, theirs = core.get_policy_loss_fn("vanilla")(
        old, logp, wide, rows.mask.double(), "token-mean", config
    )
    columns = (rows.pack(logp), rows.pack(old), rows.spread(advantage))
    _, ours = losses.clipped_surrogate(*columns, clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    for name, other in {
        "pg_clipfrac": "pg_clipfrac",
        "ppo_kl": "ppo_kl",
        "pg_clipfrac_dual": "pg_clipfrac_lower",
    }.items():
        assert float(ours[name].mean()) == pytest.approx(theirs[f"actor/{other}"], abs=1e-7), name


@SEEDS
@pytest.mark.parametrize("mode", MODES)
def test_value_loss(mode: str, seed: int):
    rows = Ragged.of(seed)
    old, returns, start = rows.noise(), rows.noise(), rows.noise()
    weight = weight_of(mode, rows)

    def ours(value: Tensor) -> Tensor:
        result = losses.value_loss(*map(rows.pack, (value, old, returns)), clip=0.3)
        return reduced(result, weight, rows.segment)

    def theirs(value: Tensor) -> Tensor:
        return core.compute_value_loss(value, returns, old, rows.mask.double(), 0.3, mode)[0]

    same(ours, theirs, start, rows.mask, tolerance=1e-7)
    _, metrics = losses.value_loss(*map(rows.pack, (start, old, returns)), clip=0.3)
    _, clipped = core.compute_value_loss(start, returns, old, rows.mask.double(), 0.3)
    assert float(metrics["vf_clipfrac"].mean()) == pytest.approx(float(clipped), abs=1e-7)


@SEEDS
@pytest.mark.parametrize(
    ("kind", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")]
)
def test_kl_estimates(kind: kl.KLKind, name: str, seed: int):
    rows = Ragged.of(seed)
    ref = rows.logps()
    ref[0, 0] -= 30  # beyond the clamp
    ours = partial(kl.kl_estimate, logp_ref=ref, kind=kind, clamp=kind == "k3")
    same(
        lambda logp: rows.pack(ours(logp)).sum(),
        lambda logp: rows.pack(core.kl_penalty(logp, ref, name)).sum(),
        rows.near(ref),
        rows.mask,
    )


@SEEDS
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.6)])
def test_gae_and_whitening(gamma: float, lam: float, seed: int):
    rows = Ragged.of(seed)
    reward, value = rows.noise(), rows.noise()
    found = advantages.gae(rows.pack(reward), rows.pack(value), rows.segment, gamma=gamma, lam=lam)
    raw = found["advantage"]
    white = advantages.whiten(raw, mean=float(raw.mean()), variance=float(raw.var()))
    theirs = core.compute_gae_advantage_return(reward, value, rows.mask.double(), gamma, lam)
    torch.testing.assert_close(white, rows.pack(theirs[0]), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found["returns"], rows.pack(theirs[1]), rtol=1e-10, atol=1e-10)


@SEEDS
def test_kl_in_the_reward_and_reinforce_pp(seed: int):
    rows = Ragged.of(seed)
    reward, old, ref = rows.numbers(), rows.logps(), rows.logps()
    scores = torch.zeros_like(old)
    scores[torch.arange(len(scores)), rows.lengths - 1] = reward
    columns = (rows.spread(reward), rows.pack(old), rows.pack(ref), rows.segment)
    ours = advantages.token_reward(*columns, kl_coef=0.3)
    theirs = core.compute_rewards(scores, old, ref, 0.3)
    torch.testing.assert_close(ours, rows.pack(theirs))
    returns = advantages.discounted_returns(ours, rows.segment, gamma=0.9)
    white = advantages.whiten(returns, mean=float(returns.mean()), variance=float(returns.var()))

    class Config:
        gamma = 0.9

    expected = core.compute_reinforce_plus_plus_outcome_advantage(
        theirs.masked_fill(~rows.mask, 0.0), rows.mask.double(), config=Config()
    )
    torch.testing.assert_close(returns, rows.pack(expected[1]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(white, rows.pack(expected[0]), rtol=1e-7, atol=1e-7)


@SEEDS
def test_group_advantages(seed: int):
    rows = Ragged.of(seed, rows=12)
    group = torch.tensor([3, 0, 0, 1, 1, 1, 1, 3, 0, 1, 3, 1])
    scores = rows.noise().masked_fill(~rows.mask, 0.0)
    reward, mask = scores.sum(1), rows.mask.double()
    index = group.numpy().astype(str).astype(object)
    theirs = {
        "grpo": core.compute_grpo_outcome_advantage(scores, mask, index),
        "dr_grpo": core.compute_grpo_outcome_advantage(
            scores, mask, index, norm_adv_by_std_in_grpo=False
        ),
        "rloo": core.compute_rloo_outcome_advantage(scores, mask, index),
    }
    ours = {
        "grpo": advantages.group_normalized(reward, group, eps=1e-6),
        "dr_grpo": advantages.group_centered(reward, group),
        "rloo": advantages.leave_one_out(reward, group),
    }
    for name in ours:
        expected = rows.pack(theirs[name][0])
        torch.testing.assert_close(
            rows.spread(ours[name]), expected, rtol=1e-9, atol=1e-9, msg=name
        )


def test_a_group_of_one_is_theirs_to_explain():
    scores, mask, index = torch.tensor([[2.0]]), torch.ones(1, 1), np.array(["a"], dtype=object)
    assert float(core.compute_grpo_outcome_advantage(scores, mask, index)[0]) == pytest.approx(
        2.0, abs=1e-5
    )
    assert float(core.compute_rloo_outcome_advantage(scores, mask, index)[0]) == 2.0
    one, group = torch.tensor([2.0]), torch.tensor([0])
    assert advantages.group_normalized(one, group).item() == 0.0
    assert advantages.leave_one_out(one, group).item() == 0.0


def test_adaptive_controller():
    ours, theirs = (
        kl.AdaptiveKL(0.01, target=100.0, horizon=1000),
        core.AdaptiveKLController(0.01, 100.0, 1000),
    )
    for seen in (150.0, 90.0, 3.0, 101.0):
        theirs.update(seen, 256)
        assert ours.update(seen, 256) == pytest.approx(theirs.value, rel=1e-12)
