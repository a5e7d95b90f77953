"""Importance weights and masks by hand: two rows, one of them drifting."""

import math

import pytest
import torch

from fsdprl.corrections import (
    divergence_mask,
    geometric_mask,
    geometric_mask_truncate,
    mismatch,
    off_policy_sequence_mask,
    sequence_mask,
    sequence_truncate,
    token_mask,
    token_truncate,
    total_variation_mask,
)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


# rho of row 0: 3, 1, .1 (product .3); of row 2: 2, 2 (product 4). Row 1 has no loss tokens.
RHO = (3.0, 1.0, 0.1, 2.0, 2.0)
SAMPLER = t(-1.0, -2.0, -0.5, -3.0, -1.5)
OLD = SAMPLER + t(*RHO).log()
SEGMENT = torch.tensor([0, 0, 0, 2, 2])


def test_token_weights():
    assert token_truncate(OLD, SAMPLER, cap=2.5).tolist() == pytest.approx([2.5, 1, 0.1, 2, 2])
    masked = token_mask(OLD, SAMPLER, low=0.5, high=2.5)
    assert masked.tolist() == pytest.approx([0, 1, 0, 2, 2])


def test_sequence_weights():
    truncated = sequence_truncate(OLD, SAMPLER, SEGMENT, cap=2.5)
    assert truncated.tolist() == pytest.approx([0.3, 0.3, 0.3, 2.5, 2.5])
    masked = sequence_mask(OLD, SAMPLER, SEGMENT, cap=2.5)
    assert masked.tolist() == pytest.approx([0.3, 0.3, 0.3, 0, 0])


def test_geometric_mask_does_not_grow_with_length():
    # Geometric means .3^(1/3) = .669 and 2.
    assert geometric_mask(OLD, SAMPLER, SEGMENT, low=0.6, high=1.5).tolist() == [1, 1, 1, 0, 0]
    assert geometric_mask(OLD, SAMPLER, SEGMENT, low=0.7, high=2.5).tolist() == [0, 0, 0, 1, 1]
    both = geometric_mask_truncate(OLD, SAMPLER, SEGMENT, low=0.6, high=1.5, cap=2.0)
    assert both.tolist() == pytest.approx([2, 1, 0.1, 0, 0])
    long = torch.zeros(1000, dtype=torch.int64)
    drift = torch.full((1000,), 0.005, dtype=torch.float64)
    assert geometric_mask(drift, 0 * drift, long).all()
    assert not sequence_mask(drift, 0 * drift, long).any()


K = {
    "k1": [-math.log(r) for r in RHO],
    "k2": [math.log(r) ** 2 / 2 for r in RHO],
    "k3": [r - 1 - math.log(r) for r in RHO],
}


@pytest.mark.parametrize("kind", K)
@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
def test_divergence_masks(kind, level):
    rows = [K[kind][:3], K[kind][3:]]
    reduce = {"sum": sum, "max": max, "mean": lambda row: sum(row) / len(row)}
    estimates = K[kind] if level == "token" else [reduce[level](row) for row in rows for _ in row]
    for threshold in (-0.9, 0.05, 0.31, 0.8, 1.0, 2.0):
        mask = divergence_mask(OLD, SAMPLER, SEGMENT, kind=kind, level=level, threshold=threshold)
        assert mask.tolist() == [float(e <= threshold) for e in estimates], threshold


def test_unknown_divergence_is_refused():
    for bad in ({"kind": "k4"}, {"level": "row"}):
        with pytest.raises(ValueError, match="k1"):
            divergence_mask(OLD, SAMPLER, SEGMENT, threshold=1.0, **bad)


def test_total_variation_mask():
    # p moves .5 -> .8 and .5 -> .2; a token is dropped only where its advantage pushed it there.
    logp, sampler = t(0.8, 0.8, 0.2, 0.2, 0.6).log(), t(0.5, 0.5, 0.5, 0.5, 0.5).log()
    mask = total_variation_mask(logp, sampler, t(1, -1, 1, -1, 1), threshold=0.2)
    assert mask.tolist() == [0, 1, 1, 0, 1]


def test_off_policy_sequence_mask():
    # Mean drift of logp_sampler - logp: row 0 -log(.3)/3 = .40, row 2 -log 2.
    advantage = t(-1, -1, -1, -1, -1)
    args = (OLD, SAMPLER)
    mask = off_policy_sequence_mask(*args, advantage, SEGMENT, threshold=0.3)
    assert mask.tolist() == [0, 0, 0, 1, 1]
    assert off_policy_sequence_mask(*args, advantage, SEGMENT, threshold=0.5).all()
    assert off_policy_sequence_mask(*args, -advantage, SEGMENT, threshold=0.3).all()


def test_mismatch_columns():
    columns = mismatch(OLD, SAMPLER)
    assert columns["mismatch_kl"].tolist() == pytest.approx(K["k1"])
    assert columns["mismatch_rho"].tolist() == pytest.approx(list(RHO))
    assert columns["mismatch_gap"].tolist() == pytest.approx([abs(x) for x in K["k1"]])


def test_agreement_changes_nothing():
    for weight in (
        token_truncate(OLD, OLD),
        token_mask(OLD, OLD),
        sequence_truncate(OLD, OLD, SEGMENT),
        sequence_mask(OLD, OLD, SEGMENT),
        geometric_mask(OLD, OLD, SEGMENT),
        geometric_mask_truncate(OLD, OLD, SEGMENT),
        divergence_mask(OLD, OLD, SEGMENT, threshold=0.0),
        total_variation_mask(OLD, OLD, OLD),
        off_policy_sequence_mask(OLD, OLD, OLD, SEGMENT, threshold=0.0),
    ):
        assert weight.tolist() == [1.0] * 5


def test_weights_are_finite_without_gradient_and_never_broadcast():
    far = torch.tensor([-900.0, 0.0], requires_grad=True)
    sampler, segment = torch.tensor([0.0, -900.0]), torch.tensor([0, 1])
    calls = (
        lambda a, b: token_truncate(a, b),
        lambda a, b: token_mask(a, b),
        lambda a, b: sequence_truncate(a, b, segment),
        lambda a, b: sequence_mask(a, b, segment),
        lambda a, b: geometric_mask(a, b, segment),
        lambda a, b: divergence_mask(a, b, segment, threshold=1.0),
        lambda a, b: total_variation_mask(a, b, sampler),
        lambda a, b: off_policy_sequence_mask(a, b, sampler, segment, threshold=1.0),
    )
    for call in calls:
        weight = call(far, sampler)
        assert weight.isfinite().all() and not weight.requires_grad
        with pytest.raises(ValueError, match="one shape"):
            call(far, sampler[:1])


def test_no_tokens():
    none, segment = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert sequence_truncate(none, none, segment).tolist() == []
    assert geometric_mask(none, none, segment).tolist() == []
