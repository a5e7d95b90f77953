"""Advantages against worked values and slow row-by-row loops."""

import pytest
import torch

from fsdprl.advantages import (
    batch_normalized,
    decoupled,
    discounted_returns,
    gae,
    group_centered,
    group_normalized,
    group_std,
    last_token_reward,
    leave_one_out,
    magnified,
    token_reward,
    whiten,
    with_teacher,
)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


GROUP = torch.tensor([5, 5, 5, 5])


def test_group_normalized_golden():
    reward = t(1, 0, 0, 1)
    wide = group_normalized(reward, GROUP)
    assert wide.tolist() == pytest.approx([0.865875, -0.865875, -0.865875, 0.865875], abs=5e-7)
    narrow = group_normalized(reward, GROUP, eps=1e-6)
    assert narrow.tolist() == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=5e-7)


def test_groups_may_be_ragged_and_scattered():
    reward, group = t(1, 10, 3, 20, 5, 7), torch.tensor([2, 9, 2, 9, 2, 4])
    assert group_centered(reward, group).tolist() == [-2, -5, 0, 5, 2, 0]
    assert group_std(reward, group).tolist() == pytest.approx([2, 50**0.5, 2, 50**0.5, 2, 0])
    # The others' means: (3+5)/2, 20, (1+5)/2, 10, (1+3)/2.
    assert leave_one_out(reward, group).tolist() == pytest.approx([-3, -10, 0, 10, 3, 0])


def test_a_group_that_agrees_is_exactly_zero():
    # The mean of three 0.1 is not 0.1 in floating point.
    reward, group = t(0.1, 0.1, 0.1, 4.0), torch.tensor([0, 0, 0, 1])
    for advantage in (
        group_normalized(reward, group),
        group_centered(reward, group),
        leave_one_out(reward, group),
        group_std(reward, group),
    ):
        assert advantage.tolist() == [0, 0, 0, 0]


def test_groups_equal_a_view_by_group():
    torch.manual_seed(0)
    reward_PG = torch.randn(6, 4, dtype=torch.float64)
    group = torch.arange(6).repeat_interleave(4)
    mean, std = reward_PG.mean(1, keepdim=True), reward_PG.std(1, keepdim=True)
    expected = ((reward_PG - mean) / (std + 1e-4)).flatten()
    assert torch.allclose(group_normalized(reward_PG.flatten(), group), expected, atol=1e-12)
    others = (reward_PG.sum(1, keepdim=True) - reward_PG) / 3
    expected = (reward_PG - others).flatten()
    assert torch.allclose(leave_one_out(reward_PG.flatten(), group), expected, atol=1e-12)


def test_batch_normalized():
    advantage = batch_normalized(t(1, 2, 3, 6))
    assert advantage.tolist() == pytest.approx(
        [x / 14 * 3 * (14 / 3) ** 0.5 for x in (-2, -1, 0, 3)]
    )
    assert batch_normalized(t(3.0)).tolist() == [0.0]
    assert batch_normalized(t(3.0, 3.0)).tolist() == [0.0, 0.0]
    assert batch_normalized(torch.zeros(0)).tolist() == []


def test_float32_and_integer_rewards_are_computed_in_float64():
    assert group_normalized(torch.tensor([1, 0, 0, 1]), GROUP).dtype == torch.float64
    assert batch_normalized(torch.tensor([1.0, 0.0])).dtype == torch.float64


def test_empty_batch_and_refusal():
    none = torch.zeros(0, dtype=torch.float64)
    ids = torch.zeros(0, dtype=torch.int64)
    for function in (group_normalized, group_centered, leave_one_out, group_std):
        assert function(none, ids).tolist() == []
    with pytest.raises(ValueError, match="group"):
        group_normalized(t(1, 2), GROUP)


@pytest.mark.parametrize(
    ("lam", "expected"), [(1.0, [0.9, 0.8, 0.7, 0.6]), (0.95, [0.799675, 0.7365, 0.67, 0.6])]
)
def test_gae_golden(lam, expected):
    value, reward = t(0.1, 0.2, 0.3, 0.4), t(0, 0, 0, 1)
    result = gae(reward, value, torch.zeros(4, dtype=torch.int64), gamma=1.0, lam=lam)
    assert result["advantage"].tolist() == pytest.approx(expected)
    returns = [a + v for a, v in zip(expected, value.tolist(), strict=True)]
    assert result["returns"].tolist() == pytest.approx(returns)


def slow_gae(reward, value, gamma, lam):
    advantage, carry = [0.0] * len(reward), 0.0
    for i in reversed(range(len(reward))):
        after = value[i + 1] if i + 1 < len(value) else 0.0
        carry = reward[i] + gamma * after - value[i] + gamma * lam * carry
        advantage[i] = carry
    return advantage


def test_gae_over_packed_rows_equals_each_row_alone():
    torch.manual_seed(1)
    lengths = [3, 0, 1, 7, 2]
    segment = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    reward, value = torch.randn(2, 13, dtype=torch.float64)
    result = gae(reward, value, segment, gamma=0.97, lam=0.9)
    expected = []
    for row in range(5):
        own = segment == row
        expected += slow_gae(reward[own].tolist(), value[own].tolist(), 0.97, 0.9)
    assert result["advantage"].tolist() == pytest.approx(expected, abs=1e-13)
    # Value 0 and lambda 1 leave the discounted sum of rewards.
    returns = discounted_returns(reward, segment, gamma=0.97)
    zero = gae(reward, torch.zeros_like(value), segment, gamma=0.97, lam=1.0)
    assert torch.allclose(returns, zero["advantage"], atol=1e-13)


def test_gae_keeps_the_type_and_takes_no_tokens():
    none, segment = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert gae(none, none, segment)["advantage"].tolist() == []
    assert gae(torch.ones(2), torch.ones(2), torch.tensor([0, 1]))["returns"].dtype == torch.float32


def test_reward_lands_on_the_last_loss_token_and_kl_on_each():
    segment = torch.tensor([0, 0, 2, 2, 2])
    reward = t(1, 1, -1, -1, -1)
    old, ref = t(-1, -1, -1, -1, -1), t(-1.5, -1, -0.5, -1, -2)
    assert last_token_reward(reward, segment).tolist() == [0, 1, 0, 0, -1]
    shaped = token_reward(reward, old, ref, segment, kl_coef=0.1)
    assert shaped.tolist() == pytest.approx([-0.05, 1, 0.05, 0, -1.1])


def test_whitening_with_global_moments():
    torch.manual_seed(2)
    advantage = 5 + 3 * torch.randn(1000, dtype=torch.float64)
    mean, variance = advantage.mean().item(), advantage.var().item()
    white = whiten(advantage, mean=mean, variance=variance)
    assert white.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.var().item() == pytest.approx(1, abs=1e-6)
    # Piecewise on two ranks with the same moments: the same numbers.
    halves = [whiten(half, mean=mean, variance=variance) for half in advantage.split(317)]
    assert torch.equal(torch.cat(halves), white)
    assert whiten(t(2.5), mean=2.5, variance=0.0).tolist() == [0.0]


def test_token_functions_refuse_broadcasting():
    x, segment = t(1, 2, 3), torch.tensor([0, 0, 1])
    for call in (
        lambda: gae(x, t(1), segment),
        lambda: token_reward(x, x, t(1), segment, kl_coef=0.1),
        lambda: discounted_returns(t(1), segment),
        lambda: last_token_reward(t(1), segment),
    ):
        with pytest.raises(ValueError, match="one shape"):
            call()


def test_decoupled_rewards_keep_their_say():
    """Two groups of two; a wide reward and a narrow one, which applies to the first group and to one more row."""
    group = torch.tensor([3, 3, 8, 8])
    wide, narrow = t(0, 100, 40, 20), t(0.2, 0.1, float("nan"), 0.7)
    # (x - mean) / std of two numbers is +-0.7071; a group of one gives 0
    root = 0.5**0.5
    total = t(-root + 2 * root, root - 2 * root, root, -root)
    wanted = (total - total.mean()) / total.std()
    found = decoupled([wide, narrow], group, weights=[1.0, 2.0], eps=1e-12)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-9)
    summed = group_normalized(wide + 2 * narrow.nan_to_num(), group)
    assert found[0] > 0 > summed[0]  # summed first, the wide one decides alone
    assert decoupled([t(1, 1, 2, 2)], group).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="1 weights for 2 rewards"):
        decoupled([wide, narrow], group, weights=[1.0])


def test_a_teacher_beside_a_reward_by_hand():
    base, teacher, old = (
        torch.tensor(x, dtype=torch.float64) for x in ([1, -1], [-1, -3], [-2, -1])
    )
    assert with_teacher(base, teacher, old, coef=0.5).tolist() == [1.5, -2.0]
    with pytest.raises(ValueError, match="one shape"):
        with_teacher(base[:1], teacher, old, coef=0.5)


def test_magnified_by_hand():
    """p_told / p_old is 1.1, 2 and 1/2, clipped at 1.2 and 0.8; where A < 0 it counts the other way round."""
    told, old = t(1.1, 2, 0.5).log(), t(1, 1, 1).log()
    assert magnified(t(2, 2, 2), told, old, share=1.0, bound=0.2).tolist() == pytest.approx(
        [2.2, 2.4, 1.6]
    )
    lower = magnified(t(-2, -2, -2), told, old, share=0.5, bound=0.2)
    assert lower.tolist() == pytest.approx([-1 - 1 / 1.1, -1.8, -2.2])
    assert magnified(t(0, 0, 0), told, old).tolist() == [0, 0, 0]
