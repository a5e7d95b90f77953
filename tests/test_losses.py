"""Token losses against hand-computed values, finite differences, and their refusals."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

from fsdprl import losses
from fsdprl.functions import function_ref, positional_names
from fsdprl.losses import (
    RowLoss,
    check_shapes,
    cispo_loss,
    clipped_surrogate,
    combine,
    distill_loss,
    entropy_bonus,
    gkd_loss,
    gspo_surrogate,
    kl_penalty,
    policy_gradient,
    reweigh,
    sft_loss,
    value_loss,
)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def logs(*ratios):
    return t(*ratios).log()


OLD = t(0, 0, 0, 0, 0, 0)
RATIOS = (1.5, 1.5, 0.5, 0.5, 1.1, 4.0)
ADVANTAGE = t(1, -1, 1, -1, 2, -2)


def test_clipped_surrogate_by_hand():
    loss, metrics = clipped_surrogate(logs(*RATIOS), OLD, ADVANTAGE, clip_low=0.2, clip_high=0.28)
    # r 1.5: A>0 clips at 1.28, A<0 does not; r .5: A<0 clips at .8, A>0 does not.
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.2, 8.0])
    assert metrics["pg_clipfrac_high"].tolist() == [1, 0, 0, 0, 0, 0]
    assert metrics["pg_clipfrac_low"].tolist() == [0, 0, 0, 1, 0, 0]
    assert metrics["pg_clipfrac"].tolist() == [1, 0, 0, 1, 0, 0]
    assert metrics["ratio"].tolist() == pytest.approx(list(RATIOS))
    assert metrics["ppo_kl"].tolist() == pytest.approx([-math.log(r) for r in RATIOS])
    assert torch.equal(metrics["pg_loss"], loss)


def test_clip_metrics_mark_exactly_the_tokens_without_gradient():
    torch.manual_seed(0)
    logp = torch.randn(400, dtype=torch.float64).requires_grad_()
    old, advantage = torch.zeros(400, dtype=torch.float64), torch.randn(400, dtype=torch.float64)
    advantage[:20] = 0
    loss, metrics = clipped_surrogate(logp, old, advantage, clip_low=0.2, clip_high=0.3)
    loss.sum().backward()
    assert logp.grad is not None
    dead = (logp.grad == 0) & (advantage != 0)
    assert torch.equal(dead, metrics["pg_clipfrac"].bool())
    assert 0.2 < dead.double().mean() < 0.8


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    loss, metrics = clipped_surrogate(
        logs(*RATIOS), OLD, ADVANTAGE, clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.2, 6.0])
    assert metrics["pg_clipfrac_dual"].tolist() == [0, 0, 0, 0, 0, 1]


def test_dual_clip_is_both_published_forms():
    """min(loss, -c A) for A < 0 (dual clip), and min(r, delta) in the unclipped term (two-sided)."""
    torch.manual_seed(1)
    ratio = (2 * torch.randn(300, dtype=torch.float64)).exp()
    advantage = torch.randn(300, dtype=torch.float64)
    loss, _ = clipped_surrogate(ratio.log(), torch.zeros_like(ratio), advantage, dual_clip=3.0)
    single = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    dual = torch.where(advantage < 0, torch.minimum(single, -3.0 * advantage), single)
    two_sided = -torch.minimum(ratio.clamp(max=3.0) * advantage, ratio.clamp(0.8, 1.2) * advantage)
    assert torch.allclose(loss, dual, atol=1e-12) and torch.allclose(loss, two_sided, atol=1e-12)


def test_on_policy_gradient_is_minus_advantage():
    logp = t(-1, -2, -3).requires_grad_()
    advantage = t(0.5, -2, 0)
    loss, metrics = clipped_surrogate(logp, logp.detach(), advantage)
    loss.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [-0.5, 2, 0]
    assert metrics["pg_clipfrac"].sum() == 0 and metrics["ppo_kl"].abs().sum() == 0


def test_extreme_ratios_stay_finite():
    logp = torch.tensor([0.0, 0.0, -500.0, -500.0]).requires_grad_()
    old = torch.tensor([-500.0, -500.0, 0.0, 0.0])
    loss, metrics = clipped_surrogate(logp, old, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    loss.sum().backward()
    assert logp.grad is not None and logp.grad.isfinite().all() and loss.isfinite().all()
    assert all(m.isfinite().all() for m in metrics.values())


def test_gspo_by_hand():
    segment = torch.tensor([0, 0, 2, 2, 2])
    logp, old = t(0.2, 0.4, -0.3, 0.0, 0.0), t(0, 0, 0, 0, 0)
    advantage = t(1, 1, -2, -2, -2)
    loss, metrics = gspo_surrogate(logp, old, advantage, segment, clip_low=0.05, clip_high=0.5)
    # Row ratios exp(.3) and exp(-.1); the second is below .95 with A < 0, so it is clipped there.
    first, second = -math.exp(0.3), 2 * 0.95
    assert loss.tolist() == pytest.approx([first, first, second, second, second])
    assert metrics["pg_clipfrac_low"].tolist() == [0, 0, 1, 1, 1]
    assert metrics["ppo_kl"].tolist() == pytest.approx([-0.2, -0.4, 0.3, 0, 0])


def test_gspo_is_invariant_to_what_else_is_packed():
    torch.manual_seed(2)
    logp, old = torch.randn(2, 7, dtype=torch.float64)
    advantage = t(1, 1, 1, -1, -1, -1, -1)
    segment = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    both, _ = gspo_surrogate(logp, old, advantage, segment)
    alone, _ = gspo_surrogate(logp[3:], old[3:], advantage[3:], segment[3:] - 1)
    assert torch.allclose(both[3:], alone, atol=1e-15)


def test_cispo_weighs_but_never_drops():
    logp = logs(1.5, 6.0, 6.0, 0.5).requires_grad_()
    advantage = t(1, 1, -1, 0)
    loss, metrics = cispo_loss(logp, t(0, 0, 0, 0), advantage, ratio_high=5.0)
    expected = [-1.5 * math.log(1.5), -5 * math.log(6), 5 * math.log(6), 0]
    assert loss.tolist() == pytest.approx(expected)
    loss.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-1.5, -5, 5, 0])
    assert metrics["pg_clipfrac"].tolist() == [0, 1, 1, 0] == metrics["pg_clipfrac_high"].tolist()
    low, metrics = cispo_loss(logp, t(0, 0, 0, 0), t(1, 1, 1, 1), ratio_low=0.8, ratio_high=5.0)
    assert metrics["pg_clipfrac_low"].tolist() == [0, 0, 0, 1]
    assert low[3].item() == pytest.approx(-0.8 * math.log(0.5))


def test_likelihood_and_policy_gradient():
    logp = t(-1, -3).requires_grad_()
    assert sft_loss(logp)[0].tolist() == [1, 3]
    assert sft_loss(logp)[1]["nll"].tolist() == [1, 3]
    assert sft_loss(logp, coef=0.5)[0].tolist() == [0.5, 1.5]
    assert sft_loss(logp, coef=0.5)[1]["nll"].tolist() == [1, 3]
    assert policy_gradient(logp, t(2, -1))[0].tolist() == [2, -3]
    loss, metrics = distill_loss(logp, t(-2, -1))
    loss.sum().backward()
    # The student finds the first token likelier than the teacher does: its log-prob must fall.
    assert logp.grad is not None and logp.grad.tolist() == [1, -2]
    assert metrics["reverse_kl"].tolist() == [1, -2]


def shares(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_gkd_by_hand():
    """Teacher 1/2, 1/4 and 1/4 for all others, student 1/4, 1/4 and 1/2: their mean is 3/8, 1/4, 3/8."""
    teacher, student = shares([1 / 2, 1 / 4]), shares([1 / 4, 1 / 4])
    for beta, expected in {
        0.0: 0.5 * math.log(2) - 0.25 * math.log(2),
        1.0: -0.25 * math.log(2) + 0.5 * math.log(2),
        0.5: 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3),
        0.25: 0.25 * (0.5 * math.log(8 / 5) + 0.25 * math.log(4 / 7))
        + 0.75 * (0.25 * math.log(4 / 5) + 0.5 * math.log(8 / 7)),
    }.items():
        loss, metrics = gkd_loss(student, teacher, beta=beta)
        assert loss.tolist() == pytest.approx([expected]) == metrics["divergence"].tolist()
        assert metrics["teacher_tail"].tolist() == pytest.approx([0.25])
    near = gkd_loss(student, teacher, beta=1e-6)[0] / 1e-6
    assert near.item() == pytest.approx(gkd_loss(student, teacher, beta=0.0)[0].item(), rel=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gkd_is_a_lower_bound_of_the_divergence_over_all_words(beta: float):
    torch.manual_seed(0)
    both = torch.randn(2, 50, 12, dtype=torch.float64).log_softmax(-1)
    order = both[0].argsort(dim=1, descending=True)
    student, teacher = both[1].gather(1, order), both[0].gather(1, order)
    found = [gkd_loss(student[:, :k], teacher[:, :k], beta=beta)[0] for k in (1, 3, 8, 12)]
    for fewer, more in itertools.pairwise(found):
        assert (fewer <= more + 1e-12).all() and (fewer < more).any()
    kl = torch.nn.functional.kl_div
    if beta in (0.0, 1.0):
        first, second = (teacher, student) if beta == 0.0 else (student, teacher)
        whole = kl(second, first, log_target=True, reduction="none").sum(1)
    else:
        mixed = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
        whole = beta * kl(mixed, teacher, log_target=True, reduction="none").sum(1)
        whole += (1 - beta) * kl(mixed, student, log_target=True, reduction="none").sum(1)
    torch.testing.assert_close(found[-1], whole, rtol=1e-9, atol=1e-11)


def test_gkd_of_certain_words_is_finite():
    """In float32 a few words may add up to 1 or more."""
    student = torch.tensor([[0.0, -30.0], [-0.1, -2.5]], requires_grad=True)
    loss, _ = gkd_loss(student, torch.tensor([[1e-6, -40.0], [0.0, -20.0]]))
    loss.sum().backward()
    assert loss.isfinite().all() and student.grad is not None and student.grad.isfinite().all()


def test_distillation_follows_the_reverse_kl():
    """Over a whole vocabulary the expected gradient is that of KL(student || teacher)."""
    torch.manual_seed(3)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    kl = (logp.exp() * (logp - teacher)).sum()
    expected = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    sampled = (logp.exp().detach() * distill_loss(logp, teacher)[0]).sum()
    assert torch.allclose(torch.autograd.grad(sampled, logits)[0], expected, atol=1e-12)


def test_value_loss_by_hand():
    value, old, returns = t(1.0, 1.0, 0.0, 0.3), t(0.5, 0.5, 0.0, 0.5), t(0.0, 2.0, 0.0, 0.0)
    loss, metrics = value_loss(value, old, returns, clip=0.2)
    # Clipped values .7, .7, 0, .3: errors 1|.49, 1|1.69, 0|0, .09|.09.
    assert loss.tolist() == pytest.approx([0.5, 0.845, 0, 0.045])
    assert metrics["vf_clipfrac"].tolist() == [0, 1, 0, 0]
    assert torch.equal(metrics["vf_loss"], loss)
    plain, unclipped = value_loss(value, old, returns, clip=None)
    assert plain.tolist() == pytest.approx([0.5, 0.5, 0, 0.045])
    assert unclipped["vf_clipfrac"].sum() == 0


def test_terms_combine():
    logp, ref, entropy = t(-1, -1), t(-1.2, -0.5), t(0.7, 0.1)
    loss, metrics = combine(
        clipped_surrogate(logp, logp, t(1, -1)),
        kl_penalty(logp, ref, coef=0.5, kind="k2"),
        entropy_bonus(entropy, coef=0.1),
    )
    assert loss.tolist() == pytest.approx([-1 + 0.01 - 0.07, 1 + 0.0625 - 0.01])
    assert metrics["kl_loss"].tolist() == pytest.approx([0.02, 0.125])
    assert metrics["entropy"].tolist() == [0.7, 0.1]
    assert {"pg_loss", "pg_clipfrac", "ppo_kl"} <= metrics.keys()
    with pytest.raises(ValueError, match="'nll'"):
        combine(sft_loss(logp), sft_loss(logp))


def test_reweigh_drops_where_the_weight_is_zero():
    logp = torch.tensor([-1.0, -2.0, float("-inf")], requires_grad=True)
    loss, _ = reweigh(sft_loss(logp), torch.tensor([0.5, 0.0, 0.0]))
    assert loss.tolist() == [0.5, 0.0, 0.0]
    loss.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [-0.5, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_gradients_against_finite_differences(seed):
    torch.manual_seed(seed)
    old, ref = -torch.rand(2, 9, dtype=torch.float64)
    logp = (old + 0.6 * torch.randn(9, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(9, dtype=torch.float64)
    segment = torch.tensor([0, 0, 0, 2, 2, 2, 2, 3, 3])
    functions = [
        lambda x: clipped_surrogate(x, old, advantage, clip_low=0.2, clip_high=0.28)[0],
        lambda x: clipped_surrogate(x, old, advantage, dual_clip=1.5)[0],
        lambda x: gspo_surrogate(x, old, advantage, segment, clip_low=0.1, clip_high=0.2)[0],
        lambda x: policy_gradient(x, advantage)[0],
        lambda x: sft_loss(x)[0],
        lambda x: value_loss(x, old, ref, clip=0.3)[0],
        lambda x: value_loss(x, old, ref, clip=None)[0],
        lambda x: entropy_bonus(x, coef=0.3)[0],
        *[
            partial(lambda kind, x: kl_penalty(x, ref, coef=0.3, kind=kind)[0], kind)
            for kind in ("k1", "k2", "k3", "abs")
        ],
    ]
    for function in functions:
        assert gradcheck(function, (logp,), atol=1e-7)


def test_shapes_are_never_broadcast():
    x, column = t(1, 2, 3), t(1, 2, 3).unsqueeze(1)
    segment = torch.tensor([0, 0, 1])
    one = t(1)
    for bad in (column, one, t(1, 2), torch.tensor(1.0)):
        for call in (
            lambda bad=bad: clipped_surrogate(x, bad, x),
            lambda bad=bad: clipped_surrogate(x, x, bad),
            lambda bad=bad: gspo_surrogate(x, x, bad, segment),
            lambda bad=bad: cispo_loss(x, bad, x),
            lambda bad=bad: policy_gradient(x, bad),
            lambda bad=bad: distill_loss(x, bad),
            lambda bad=bad: value_loss(x, x, bad),
            lambda bad=bad: kl_penalty(x, bad, coef=1.0),
            lambda bad=bad: reweigh(sft_loss(x), bad),
            lambda bad=bad: combine(sft_loss(x), entropy_bonus(bad, coef=1.0)),
        ):
            with pytest.raises(ValueError):
                call()
    with pytest.raises(ValueError, match=r"logp \[3\], advantage \[3, 1\]"):
        check_shapes(logp=x, advantage=column)


def test_nonsense_hyperparameters_are_refused():
    x = t(0.0)
    with pytest.raises(ValueError, match="clip_low"):
        clipped_surrogate(x, x, x, clip_low=1.2)
    with pytest.raises(ValueError, match="must exceed"):
        clipped_surrogate(x, x, x, clip_high=0.28, dual_clip=1.2)
    with pytest.raises(ValueError, match="ratio_high"):
        cispo_loss(x, x, x, ratio_high=0.28)


def test_no_tokens_give_finite_zero_with_a_graph():
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    segment = torch.zeros(0, dtype=torch.int64)
    for loss, metrics in (
        clipped_surrogate(none, none, none),
        gspo_surrogate(none, none, none, segment),
    ):
        assert loss.sum().item() == 0.0 and all(len(m) == 0 for m in metrics.values())
        loss.sum().backward()


def test_losses_travel_by_name():
    """Positional parameters are columns and keywords are settings, as dispatch expects."""
    ref = function_ref(partial(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28))
    assert ref.kwargs == {"clip_low": 0.2, "clip_high": 0.28}
    assert positional_names(losses.gspo_surrogate) == ("logp", "logp_old", "advantage", "segment")
    assert positional_names(losses.value_loss) == ("value", "value_old", "returns")
    assert RowLoss(t(1)).metrics == {}


def test_shares_of_answers_by_hand():
    """Three answers of 2, 1 and 3 tokens, of which 1/2, 0 and 1/3 are clipped low; the fourth has no token."""
    clipped = torch.tensor([True, False, False, False, False, True])
    shares = losses.clip_shares(clipped, t(-1, 1, 1, 1, 1, -1))
    assert shares["pg_clipfrac_low"].tolist() == [1, 0, 0, 0, 0, 1]
    assert shares["pg_clipfrac_high"].sum() == 0
    segment = torch.tensor([0, 0, 1, 2, 2, 2])
    found = losses.row_extremes(shares, segment)
    low = {name: value.item() for name, value in found.items()}
    assert low == {"min/pg_clipfrac_low": 0, "max/pg_clipfrac_high": 0}
    high = losses.row_extremes({"pg_clipfrac_high": shares["pg_clipfrac_low"]}, segment)
    assert {name: value.item() for name, value in high.items()} == {"max/pg_clipfrac_high": 0.5}
    some = losses.row_extremes({"entropy": t(1, 3, 5)}, torch.tensor([0, 0, 2]))  # row 1 is empty
    assert {name: value.item() for name, value in some.items()} == {
        "min/entropy": 2,
        "max/entropy": 5,
    }
    assert losses.row_extremes({"entropy": t()}, torch.zeros(0, dtype=torch.int64)) == {}
