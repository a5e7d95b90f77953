"""Advantages: sample columns from rewards on the controller, token columns by row-local scans.

Shapes: N samples, S loss tokens of R rows. The first half is arithmetic on [N]; the second half is
made for Batch.apply (positional parameters are column names, every column is [S]) and whitens with
sums over the whole batch from Batch.reduce.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .losses import LOG_RATIO_BOUND, check_shapes
from .segments import is_last, row_count, segment_count, segment_position

# ---- on the controller: one number a sample ----------------------------------------------------


def _group_sums(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float64 rewards, index of each sample's group, and sum and count of each sample's group."""
    check_shapes(reward=reward, group=group)
    reward = reward.to(torch.float64)
    groups, index = torch.unique(group, return_inverse=True)
    sums = reward.new_zeros(len(groups)).index_add(0, index, reward)
    count = reward.new_zeros(len(groups)).index_add(0, index, torch.ones_like(reward))
    return reward, index, sums[index], count[index]


def group_std(reward: Tensor, group: Tensor) -> Tensor:
    """Unbiased standard deviation of each sample's group, [N] float64.

    Exactly 0 where a group's rewards are all equal, or where it has one sample, so that `> 0` is the
    test for a group that teaches something.
    """
    reward, index, total, count = _group_sums(reward, group)
    square = (reward - total / count).square()
    sums = reward.new_zeros(int(index.max()) + 1 if len(index) else 0).index_add(0, index, square)
    std = (sums[index] / (count - 1).clamp(min=1)).sqrt()
    # A mean of equal numbers may differ from them in the last bit.
    low = torch.full_like(sums, float("inf")).scatter_reduce(0, index, reward, "amin")
    high = torch.full_like(sums, float("-inf")).scatter_reduce(0, index, reward, "amax")
    return torch.where((low == high)[index], torch.zeros_like(std), std)


def group_centered(reward: Tensor, group: Tensor) -> Tensor:
    """reward - mean of its group, [N] float64 (Dr. GRPO, Liu et al. 2025, section 3.2).

    Exactly 0 in a group whose rewards are all equal, and in a group of one.
    """
    reward, _, total, count = _group_sums(reward, group)
    centered = reward - total / count
    return torch.where(group_std(reward, group) > 0, centered, torch.zeros_like(centered))


def group_normalized(reward: Tensor, group: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(reward - mean) / (unbiased std + eps) inside each group (GRPO, Shao et al. 2024, section 4.1).

    [N] float64; 0 in a group of one. eps: 1e-4 as in TRL and ms-swift, 1e-6 as in verl.
    """
    return group_centered(reward, group) / (group_std(reward, group) + eps)


def leave_one_out(reward: Tensor, group: Tensor) -> Tensor:
    """reward - mean of the others in its group (RLOO, Ahmadian et al. 2024, eq. 8).

    [N] float64; 0 in a group of one.
    """
    _, _, _, count = _group_sums(reward, group)
    return group_centered(reward, group) * count / (count - 1).clamp(min=1)


def batch_normalized(reward: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(reward - mean) / (unbiased std + eps) over the batch (REINFORCE++, Hu 2025, eq. 8).

    [N] float64; 0 with fewer than two samples. Give it group_centered rewards for REINFORCE++ with
    a group baseline (as TRL's scale_rewards="batch").
    """
    reward = reward.to(torch.float64)
    if len(reward) < 2:
        return torch.zeros_like(reward)
    return (reward - reward.mean()) / (reward.std() + eps)


def decoupled(
    rewards: Sequence[Tensor], group: Tensor, *, weights: Sequence[float] = (), eps: float = 1e-4
) -> Tensor:
    """Each reward normalised inside its groups, then their weighted sum over the batch (GDPO, Liu et al. 2026).

    arXiv 2601.05242, eq. 4-6: rewards of different scale or spread keep their say, where the sum of them
    would be the widest one's. [N] float64. rewards: one [N] each; NaN where one does not apply, which adds 0
    and is left out of its group. weights: one a reward; none is all 1. eps: 1e-4 in TRL, 1e-8 in ms-swift.
    """
    if weights and len(weights) != len(rewards):
        raise ValueError(f"{len(weights)} weights for {len(rewards)} rewards")
    total = torch.zeros(len(group), dtype=torch.float64)
    for weight, reward in zip(weights or [1.0] * len(rewards), rewards, strict=True):
        applies = ~reward.isnan()
        total[applies] += weight * group_normalized(reward[applies], group[applies], eps=eps)
    return batch_normalized(total, eps=eps)


# ---- on the workers: token columns, row by row -------------------------------------------------


def token_reward(
    reward: Tensor, logp_old: Tensor, logp_ref: Tensor, segment: Tensor, *, kl_coef: float
) -> Tensor:
    """The row's reward on its last loss token, minus kl_coef * (logp_old - logp_ref) on each: [S].

    PPO with KL in the reward (Ouyang et al. 2022, eq. 2).
    """
    check_shapes(reward=reward, logp_old=logp_old, logp_ref=logp_ref, segment=segment)
    return last_token_reward(reward, segment) - kl_coef * (logp_old - logp_ref)


def last_token_reward(reward: Tensor, segment: Tensor) -> Tensor:
    """The row's reward on its last loss token, 0 on the others: [S]."""
    check_shapes(reward=reward, segment=segment)
    return torch.where(is_last(segment), reward, torch.zeros_like(reward))


def with_teacher(base: Tensor, logp_teacher: Tensor, logp_old: Tensor, *, coef: float) -> Tensor:
    """base + coef * (logp_teacher - logp_old): a reward's advantage, and minus the reverse KL to a teacher
    as the token that was sampled estimates it (Lu 2025, "On-policy distillation"; ms-swift's OPD-RL): [S]."""
    check_shapes(base=base, logp_teacher=logp_teacher, logp_old=logp_old)
    return base + coef * (logp_teacher - logp_old)


def magnified(
    base: Tensor, logp_told: Tensor, logp_old: Tensor, *, share: float = 0.5, bound: float = 0.2
) -> Tensor:
    """RLSD: base (1 - share + share w), w = clip((p_told / p_old)^sign(base), 1 - bound, 1 + bound): [S].

    Yang et al. 2026 (arXiv 2604.03128): the reward says which way a token is pushed, and the same policy
    behind a prompt that tells it the solution (telling.py) how far.
    """
    check_shapes(base=base, logp_told=logp_told, logp_old=logp_old)
    gain = (logp_told - logp_old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = (base.sign() * gain).exp().clamp(1 - bound, 1 + bound)
    return base * (1 - share + share * weight)


def forking(base: Tensor, entropy: Tensor, *, threshold: float) -> Tensor:
    """base where the policy was at least this uncertain (entropy in nats), 0 elsewhere: [S].

    Wang et al. 2025 (arXiv 2506.01939): the fifth of the tokens at which answers fork carries what there is to learn.
    """
    check_shapes(base=base, entropy=entropy)
    return torch.where(entropy >= threshold, base, torch.zeros_like(base))


def discounted_returns(token_reward: Tensor, segment: Tensor, *, gamma: float = 1.0) -> Tensor:
    """sum over k >= 0 of gamma^k * reward at t + k, inside each row: [S]."""
    check_shapes(token_reward=token_reward, segment=segment)
    return _backward_scan(token_reward, segment, gamma)


def gae(
    token_reward: Tensor,
    value_old: Tensor,
    segment: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> dict[str, Tensor]:
    """Generalised advantage estimates inside each row (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 after a row's last token;
    A_t = delta_t + gamma lam A_{t+1}; returns = A + V, before any whitening.
    value_old: V of the state that token t was sampled from. Result: advantage and returns, each [S].
    """
    check_shapes(token_reward=token_reward, value_old=value_old, segment=segment)
    after = torch.zeros_like(value_old)
    after[:-1] = value_old[1:]
    after = torch.where(is_last(segment), torch.zeros_like(after), after)
    advantage = _backward_scan(token_reward + gamma * after - value_old, segment, gamma * lam)
    return {"advantage": advantage, "returns": advantage + value_old}


def _backward_scan(x: Tensor, segment: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1} inside each row, in float64; all rows step together."""
    rows = row_count(segment)
    length = segment_count(segment, rows)
    place = (length[segment] - 1 - segment_position(segment), segment)  # distance to the row's end
    longest = int(length.max()) if rows else 0
    table = torch.zeros(longest, rows, dtype=torch.float64, device=x.device)
    table[place] = x.to(torch.float64)
    for i in range(1, longest):
        table[i] += decay * table[i - 1]
    return table[place].to(x.dtype)


def whiten(advantage: Tensor, *, mean: float, variance: float, eps: float = 1e-8) -> Tensor:
    """(advantage - mean) / sqrt(variance + eps), with the moments of the whole batch: [S].

    Moments: Batch.reduce, unbiased variance. A batch without spread becomes 0.
    """
    return (advantage - mean) / (variance + eps) ** 0.5
