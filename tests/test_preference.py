"""Preference losses: golden values, gradients, modifiers, and rows that do not pair up."""

import math
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

from fsdprl.functions import positional_names
from fsdprl.pairwise import OF_SCORES, PAIR_LOSSES, find_pairs
from fsdprl.preference import (
    bradley_terry_loss,
    bradley_terry_margin_loss,
    check_dpo_options,
    cpo_loss,
    dpo_loss,
    dpo_reference_free_loss,
    dpo_wpo_loss,
    orpo_loss,
    simpo_loss,
)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def packed(rows):
    """Columns of rows given as (chosen, unit, logp, logp_ref)."""
    lengths = torch.tensor([len(row[2]) for row in rows])
    spread = partial(torch.repeat_interleave, repeats=lengths)
    return {
        "logp": torch.tensor([x for row in rows for x in row[2]], dtype=torch.float64),
        "logp_ref": torch.tensor([x for row in rows for x in row[3]], dtype=torch.float64),
        "chosen": spread(torch.tensor([row[0] for row in rows])),
        "unit": spread(torch.tensor([row[1] for row in rows])),
        "segment": spread(torch.arange(len(rows))),
    }


# Sums: chosen -10 against -11 over 5 tokens, rejected -12 against -11.5 over 8. The rejected row
# comes first, and the unit is no ordinal.
GOLDEN = packed(
    [
        (False, 41, [-1.5] * 8, [-1.4375] * 8),
        (True, 41, [-1.0, -3.0, -2.0, -2.0, -2.0], [-2.2] * 5),
    ]
)


def golden(**options):
    return dpo_loss(**GOLDEN, beta=0.1, **options).loss


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sigmoid", {}, 0.620957),
        ("sigmoid", {"label_smoothing": 0.1}, 0.635957),
        ("robust", {"label_smoothing": 0.1}, 0.602207),
        ("hinge", {}, 0.850000),
        ("ipo", {}, 22.443906),
        ("ipo_sum", {}, 12.250000),
        ("exo_pair", {"label_smoothing": 1e-3}, 2.505517),
        ("nca_pair", {}, 1.350825),
        ("bco_pair", {"shift": 0.025}, 1.312700),
        ("bco_pair", {}, 1.312856),
        ("sppo_hard", {}, 36.25),
        ("apo_zero", {}, 0.962523),
        ("apo_down", {}, 0.987549),
        ("discopop", {}, 0.849338),
        ("sigmoid_norm", {}, 0.680108),
        ("sft", {}, 2.0),
    ],
)
def test_golden_values(name, options, expected):
    assert golden(losses=[name], **options).tolist() == pytest.approx([expected] * 2, abs=1e-6)


def test_mixture_weighs_each_loss():
    mpo = golden(losses=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])
    expected = 0.8 * 0.620957 + 0.2 * 1.312856 + 1.0 * 2.0
    assert mpo.tolist() == pytest.approx([expected] * 2, abs=2e-6)
    # One length-normalised member must not normalise the others.
    mixed = golden(losses=["ipo", "hinge"])
    assert mixed[0].item() == pytest.approx(22.443906 + 0.85, abs=1e-6)


def test_metrics_by_hand():
    metrics = dpo_loss(**GOLDEN, beta=0.1).metrics
    expected = {
        "acc": 1.0,
        "chosen_reward": 0.1,
        "reject_reward": -0.05,
        "margin": 0.15,
        "chosen_logp": -10.0,
        "reject_logp": -12.0,
        "nll": 2.0,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name].tolist() == pytest.approx([value] * 2), name


@pytest.mark.parametrize(
    ("divergence", "score"),
    [
        ("forward_kl", lambda x: 1 - math.exp(-x)),
        ("js_divergence", lambda x: math.log(2 * math.exp(x) / (1 + math.exp(x)))),
        ("alpha_divergence", lambda x: (math.exp(-0.5 * x) - 1) / -0.5),
    ],
)
def test_f_divergences(divergence, score):
    c, r = score(1.0), score(-0.5)
    loss = golden(f_divergence=divergence)[0].item()
    assert loss == pytest.approx(math.log1p(math.exp(-0.1 * (c - r))))
    ipo = golden(losses=["ipo"], f_divergence=divergence)[0].item()
    assert ipo == pytest.approx((c / 5 - r / 8 - 5) ** 2)
    # Rewards are reported as log ratios whatever the divergence.
    assert dpo_loss(**GOLDEN, f_divergence=divergence).metrics["margin"][0].item() == pytest.approx(
        0.15
    )


def test_alpha_one_is_reverse_kl():
    same = golden(f_divergence="alpha_divergence", f_alpha=1.0)
    assert torch.equal(same, golden())


def test_large_ratios_stay_finite_under_every_divergence():
    rows = packed([(True, 0, [-900.0], [-1.0]), (False, 0, [-1.0], [-900.0])])
    rows = {k: v.float() if v.is_floating_point() else v for k, v in rows.items()}
    rows["logp"].requires_grad_()
    for divergence in ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"):
        loss = dpo_loss(**rows, f_divergence=divergence).loss.sum()
        (gradient,) = torch.autograd.grad(loss, rows["logp"])
        assert loss.isfinite() and gradient.isfinite().all(), divergence


def test_rpo_adds_the_likelihood_of_the_chosen():
    assert golden(rpo_alpha=0.5)[0].item() == pytest.approx(0.620957 + 0.5 * 2.0, abs=1e-6)


def test_wpo_weighs_a_pair_by_its_likelihood_beside_the_policys_own():
    """Mean log-probs -2 and -1.5; of own draws -0.4 and -0.2. exp(-1.6 - 1.3) times the pair's loss."""
    rows = {**GOLDEN, "collision": torch.where(GOLDEN["chosen"], -0.4, -0.2).double()}
    factor = math.exp((-2 + 0.4) + (-1.5 + 0.2))
    plain, weighed = dpo_loss(**GOLDEN), dpo_wpo_loss(**rows)
    assert weighed.loss.tolist() == pytest.approx([factor * 0.620957] * 2, abs=1e-7)
    assert weighed.metrics["wpo_factor"].tolist() == pytest.approx([factor] * 2)
    for name, values in plain.metrics.items():  # acc and rewards are means over pairs as ever
        assert torch.equal(weighed.metrics[name], values)
    beside = dpo_wpo_loss(**rows, rpo_alpha=0.5).loss - weighed.loss
    assert beside.tolist() == pytest.approx([0.5 * 2.0] * 2)


def test_wpo_factor_has_no_gradient():
    columns = packed(random_rows(seed=13))
    columns["collision"] = -columns["logp"].abs() / 3
    logp = columns.pop("logp").requires_grad_()
    weighed = dpo_wpo_loss(logp, **columns)
    columns.pop("collision")
    by_hand = weighed.metrics["wpo_factor"] * dpo_loss(logp, **columns).loss
    wanted = torch.autograd.grad(by_hand.sum(), logp)
    torch.testing.assert_close(torch.autograd.grad(weighed.loss.sum(), logp), wanted)


def test_ld_alpha_scales_what_is_beyond_the_shorter_completion():
    # The rejected row has 8 tokens against 5: three tokens of -1.5 against -1.4375 count half.
    c, r = 1.0, 5 * -0.0625 + 0.5 * 3 * -0.0625
    loss = golden(ld_alpha=0.5)[0].item()
    assert loss == pytest.approx(math.log1p(math.exp(-0.1 * (c - r))))
    assert torch.equal(golden(ld_alpha=1.0), golden())


def test_reference_free_is_a_reference_of_zero():
    free = {k: v for k, v in GOLDEN.items() if k != "logp_ref"}
    loss = dpo_reference_free_loss(**free, beta=0.1).loss
    assert loss[0].item() == pytest.approx(math.log1p(math.exp(-0.1 * 2.0)))


def random_rows(seed, pairs=4):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for unit in torch.randperm(50, generator=generator)[:pairs].tolist():
        for chosen in (True, False):
            n = int(torch.randint(1, 6, (1,), generator=generator))
            logp, ref = -2 * torch.rand(2, n, generator=generator)
            rows.append((chosen, unit, logp.tolist(), ref.tolist()))
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [rows[i] for i in order]


def options_of(name):
    return {"label_smoothing": 1e-2} if name in ("exo_pair", "robust") else {}


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_against_finite_differences(name):
    columns = packed(random_rows(seed=3))
    logp = columns.pop("logp").requires_grad_()
    options = options_of(name)
    divergences = ["reverse_kl"]
    if name in OF_SCORES:
        divergences += ["forward_kl", "js_divergence", "alpha_divergence"]
    for divergence in divergences:
        kinds = {"losses": [name], "f_divergence": divergence, **options}

        def function(x, kinds=kinds):
            return dpo_loss(x, **columns, **kinds, rpo_alpha=0.3, ld_alpha=0.7).loss

        assert gradcheck(function, (logp,), atol=1e-7)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_packing_does_not_matter(name):
    """Every pair alone, or all packed in any order: the same loss and gradient on each row."""
    rows = random_rows(seed=5)

    def run(some):
        columns = packed(some)
        columns["logp"].requires_grad_()
        result = dpo_loss(**columns, losses=[name], **options_of(name))
        result.loss.sum().backward()
        grads = columns["logp"].grad.split([len(row[2]) for row in some])
        return {row[:2]: (x.item(), g) for row, x, g in zip(some, result.loss, grads, strict=True)}

    together = run(rows)
    for unit in {row[1] for row in rows}:
        for key, (loss, grad) in run([row for row in rows if row[1] == unit]).items():
            assert loss == pytest.approx(together[key][0], abs=1e-14)
            assert torch.allclose(grad, together[key][1], atol=1e-15)


def test_every_option_changes_the_loss():
    columns = packed(random_rows(seed=7))
    cases = {
        "beta": (["sigmoid"], 0.3),
        "label_smoothing": (["sigmoid"], 0.2),
        "rpo_alpha": (["sigmoid"], 1.0),
        "ld_alpha": (["sigmoid"], 0.3),
        "f_divergence": (["sigmoid"], "forward_kl"),
        "discopop_tau": (["discopop"], 0.5),
        "shift": (["bco_pair"], 0.5),
        "loss_weights": (["sigmoid", "hinge"], [0.1, 2.0]),
    }
    for name, (kinds, value) in cases.items():
        before = dpo_loss(**columns, losses=kinds).loss
        assert not torch.allclose(
            before, dpo_loss(**columns, losses=kinds, **{name: value}).loss
        ), name
    alpha = partial(dpo_loss, **columns, f_divergence="alpha_divergence")
    assert not torch.allclose(alpha(f_alpha=0.5).loss, alpha(f_alpha=0.2).loss)
    everything = {k: dpo_loss(**columns, losses=[k], **options_of(k)).loss for k in PAIR_LOSSES}
    values = [tuple(loss.tolist()) for loss in everything.values()]
    assert len(set(values)) == len(PAIR_LOSSES)
    for name in PAIR_LOSSES:  # beta reaches every loss that has one
        if name != "sft":
            other = dpo_loss(**columns, losses=[name], beta=0.4, **options_of(name)).loss
            assert not torch.allclose(everything[name], other), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"losses": ["sigmod"]}, "'sigmod' is not among sigmoid"),
        ({"losses": []}, "empty"),
        ({"losses": ["aot"]}, "aot_loss"),
        ({"losses": ["sigmoid"], "loss_weights": [1.0, 2.0]}, "2 weights for 1"),
        ({"losses": ["hinge"], "label_smoothing": 0.1}, "no effect on hinge"),
        ({"losses": ["sigmoid"], "shift": 0.5}, "belongs to bco_pair"),
        ({"losses": ["sigmoid"], "discopop_tau": 0.5}, "belongs to discopop"),
        ({"losses": ["apo_zero"], "f_divergence": "forward_kl"}, "apo_zero is defined"),
        ({"losses": ["sigmoid"], "f_divergence": "kl"}, "'kl'"),
        ({"losses": ["exo_pair"]}, "exo_pair needs label_smoothing"),
        ({"losses": ["robust"], "label_smoothing": 0.5}, "robust needs"),
        ({"losses": ["sigmoid"], "beta": 0.0}, "beta"),
        ({"losses": ["sigmoid"], "epsilon": 1.0}, "epsilon: no preference loss"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_dpo_options(**options)
    if "epsilon" not in options:
        with pytest.raises(ValueError, match=message):
            dpo_loss(**GOLDEN, **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(True, 1, [-1.0], [0.0]), (True, 1, [-1.0], [0.0])], "unit 1 has 2 chosen of 2"),
        ([(True, 0, [-1.0], [0.0]), (False, 1, [-1.0], [0.0])], "unit 0 has 1 chosen of 1"),
        ([(True, 3, [-1.0], [0.0]), (False, 3, [], [])], "unit 3 has 1 chosen of 1"),
        ([(True, 3, [-1.0], [0.0])] + [(False, 3, [-1.0], [0.0])] * 2, "of 3 rows"),
    ],
)
def test_rows_that_do_not_pair_up_are_refused(rows, message):
    columns = packed(rows)
    with pytest.raises(ValueError, match=message):
        dpo_loss(**columns)


def test_rows_without_tokens_between_pairs_are_finite():
    rows = random_rows(seed=9, pairs=2)
    columns = packed(rows)
    # The same rows with ordinals 1, 2, 5, 6: rows 0, 3 and 4 have no loss tokens.
    moved = {**columns, "segment": torch.tensor([1, 2, 5, 6])[columns["segment"]]}
    dense, gaps = dpo_loss(**columns), dpo_loss(**moved)
    assert gaps.loss.shape == (7,)
    assert gaps.loss[[1, 2, 5, 6]].tolist() == dense.loss.tolist()
    assert gaps.loss[[0, 3, 4]].tolist() == [0, 0, 0]
    assert all(m.isfinite().all() and m.shape == (7,) for m in gaps.metrics.values())


def test_no_rows_at_all():
    columns = {name: values[:0] for name, values in GOLDEN.items()}
    columns["logp"] = columns["logp"].clone().requires_grad_()
    result = dpo_loss(**columns, losses=["sigmoid", "ipo", "sft"])
    assert result.loss.sum().item() == 0.0
    result.loss.sum().backward()


def test_shapes_are_never_broadcast():
    for name in ("logp", "logp_ref", "chosen", "unit"):
        for bad in (GOLDEN[name][:1], GOLDEN[name].unsqueeze(1)):
            with pytest.raises(ValueError, match="one shape"):
                dpo_loss(**{**GOLDEN, name: bad})


def test_find_pairs_by_hand():
    chosen, unit = torch.tensor([False, True, True, False]), torch.tensor([7, 3, 7, 3])
    pairs = find_pairs(chosen, unit, torch.arange(4), 4)
    assert pairs.chosen.tolist() == [1, 2] and pairs.rejected.tolist() == [3, 0]
    assert pairs.spread(t(0.5, 2.0)).tolist() == [2.0, 0.5, 2.0, 0.5]


# ---- losses without a reference ----------------------------------------------------------------

FREE = {k: v for k, v in GOLDEN.items() if k != "logp_ref"}


def sigma(x):
    return 1 / (1 + math.exp(-x))


def test_cpo():
    loss = cpo_loss(**FREE, beta=0.1, cpo_alpha=0.5).loss[0].item()
    assert loss == pytest.approx(-math.log(sigma(0.1 * (-10 + 12))) + 0.5 * 2.0)
    smooth = cpo_loss(**FREE, beta=0.1, cpo_alpha=0.0, label_smoothing=0.2).loss[0].item()
    assert smooth == pytest.approx(-0.8 * math.log(sigma(0.2)) - 0.2 * math.log(sigma(-0.2)))


def test_simpo():
    # Means -2 and -1.5: the rejected completion is likelier per token.
    result = simpo_loss(**FREE, beta=2.0, gamma=1.0)
    assert result.loss[0].item() == pytest.approx(-math.log(sigma(2.0 * (-2 + 1.5) - 1.0)))
    assert result.metrics["chosen_reward"].tolist() == pytest.approx([-4.0, -4.0])
    assert result.metrics["acc"].tolist() == [0.0, 0.0]
    smooth = simpo_loss(**FREE, label_smoothing=0.2).loss[0].item()
    assert smooth == pytest.approx(-0.8 * math.log(sigma(-2)) - 0.2 * math.log(sigma(2)))


def test_orpo():
    def log_odds(x):
        return x - math.log(1 - math.exp(x))

    loss = orpo_loss(**FREE, beta=0.1).loss[0].item()
    expected = 2.0 - 0.1 * math.log(sigma(log_odds(-2.0) - log_odds(-1.5)))
    assert loss == pytest.approx(expected)


def test_orpo_survives_certainty():
    rows = packed([(True, 0, [0.0, 0.0], [0.0] * 2), (False, 0, [-800.0], [0.0])])
    rows.pop("logp_ref")
    rows["logp"] = rows["logp"].float().requires_grad_()
    loss = orpo_loss(**rows).loss.sum()
    loss.backward()
    assert loss.isfinite() and rows["logp"].grad.isfinite().all()


@pytest.mark.parametrize("function", [cpo_loss, simpo_loss, orpo_loss])
def test_reference_free_gradients(function):
    columns = packed(random_rows(seed=11))
    columns.pop("logp_ref")
    logp = columns.pop("logp").requires_grad_()
    assert gradcheck(lambda x: function(x, **columns).loss, (logp,), atol=1e-7)
    assert not torch.allclose(
        function(logp, **columns).loss, function(logp, **columns, beta=0.7).loss
    )


# ---- reward models -----------------------------------------------------------------------------

CHOSEN, UNIT = torch.tensor([True, False, False, True]), torch.tensor([4, 4, 9, 9])
SCORE = t(1.0, 0.5, 2.0, -1.0)
TWO_TOKENS = torch.arange(4).repeat_interleave(2)


def rewards(function, *columns, **options):
    spread = [c.repeat_interleave(2) for c in (*columns, CHOSEN, UNIT)]
    return function(SCORE, *spread, TWO_TOKENS, **options)


def test_bradley_terry():
    result = rewards(bradley_terry_loss)
    first, second = -math.log(sigma(0.5)), -math.log(sigma(-3.0))
    assert result.loss.tolist() == pytest.approx([first, first, second, second])
    assert result.metrics["acc"].tolist() == [1, 1, 0, 0]
    assert result.metrics["margin"].tolist() == pytest.approx([0.5, 0.5, -3, -3])
    assert result.metrics["chosen_reward"].tolist() == [1, 1, -1, -1]
    centered = rewards(bradley_terry_loss, center=0.01)
    extra = (centered.loss - result.loss).tolist()
    assert extra == pytest.approx([0.0225, 0.0225, 0.01, 0.01])


def test_bradley_terry_margin():
    result = rewards(bradley_terry_margin_loss, t(0.3, 0.3, 1.0, 1.0))
    first, second = -math.log(sigma(0.2)), -math.log(sigma(-4.0))
    assert result.loss.tolist() == pytest.approx([first, first, second, second])
    assert result.metrics["margin"].tolist() == pytest.approx([0.5, 0.5, -3, -3])


def test_bradley_terry_gradient():
    def function(score):
        spread = [c.repeat_interleave(2) for c in (CHOSEN, UNIT)]
        return bradley_terry_loss(score, *spread, TWO_TOKENS, center=0.1).loss

    assert gradcheck(function, (SCORE.clone().requires_grad_(),))


def test_column_names():
    assert positional_names(dpo_loss) == ("logp", "logp_ref", "chosen", "unit", "segment")
    assert positional_names(orpo_loss) == ("logp", "chosen", "unit", "segment")
    assert positional_names(bradley_terry_loss) == ("score", "chosen", "unit", "segment")
