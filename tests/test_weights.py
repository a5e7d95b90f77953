"""Weights say every aggregation mode; empty and dropped rows weigh exactly 0."""

import pytest
import torch

from fsdprl.weights import fixed_length, row_mean, sequence_mean, token_mean

TOKENS = torch.tensor([2, 0, 4, 10])
MODES = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "fixed_length": lambda tokens, keep=None: fixed_length(tokens, 16, keep=keep),
    "row_mean": row_mean,
}


def test_by_hand():
    assert token_mean(TOKENS).tolist() == [1 / 16, 0, 1 / 16, 1 / 16]
    assert sequence_mean(TOKENS).tolist() == pytest.approx([1 / 6, 0, 1 / 12, 1 / 30], abs=1e-15)
    assert fixed_length(TOKENS, 16).tolist() == [1 / 64, 0, 1 / 64, 1 / 64]
    assert row_mean(TOKENS).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3], abs=1e-15)


def test_keep_drops_rows():
    keep = torch.tensor([True, True, True, False])
    assert token_mean(TOKENS, keep=keep).tolist() == [1 / 6, 0, 1 / 6, 0]
    assert sequence_mean(TOKENS, keep=keep).tolist() == [1 / 4, 0, 1 / 8, 0]
    assert fixed_length(TOKENS, 16, keep=keep).tolist() == [1 / 64, 0, 1 / 64, 0]
    assert row_mean(TOKENS, keep=keep).tolist() == [1 / 2, 0, 1 / 2, 0]


@pytest.mark.parametrize("mode", MODES)
def test_degenerate_batches_are_finite(mode):
    weight = MODES[mode]
    for tokens in (torch.tensor([0, 0]), torch.zeros(0, dtype=torch.int64)):
        assert weight(tokens).tolist() == [0.0] * len(tokens)
    nothing = weight(TOKENS, keep=torch.zeros(4, dtype=torch.bool))
    assert nothing.tolist() == [0.0] * 4 and nothing.dtype == torch.float64


def test_sums_say_what_a_mode_means():
    """Token weights times token counts add up to 1, whatever the lengths."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 5000, (512,))
    for mode in (token_mean, sequence_mean):
        assert (mode(tokens) * tokens).sum().item() == pytest.approx(1.0, abs=1e-12)
    assert row_mean(tokens).sum().item() == pytest.approx(1.0, abs=1e-12)


def test_refusals():
    with pytest.raises(ValueError, match="bool"):
        token_mean(TOKENS, keep=torch.ones(4))
    with pytest.raises(ValueError, match="bool"):
        token_mean(TOKENS, keep=torch.ones(4, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="max_tokens"):
        fixed_length(TOKENS, 0)
