"""Row arithmetic over a packed microbatch, by hand."""

import torch

from fsdprl.segments import (
    is_last,
    row_count,
    segment_count,
    segment_first,
    segment_max,
    segment_mean,
    segment_position,
    segment_sum,
)

X = torch.tensor([1.0, 2.0, 3.0, -4.0, -5.0, 6.0], dtype=torch.float64)
SEGMENT = torch.tensor([0, 0, 0, 2, 2, 3])  # row 1 has no loss tokens


def test_by_hand_with_an_empty_row():
    assert row_count(SEGMENT) == 4
    assert segment_count(SEGMENT, 4).tolist() == [3, 0, 2, 1]
    assert segment_sum(X, SEGMENT, 4).tolist() == [6, 0, -9, 6]
    assert segment_mean(X, SEGMENT, 4).tolist() == [2, 0, -4.5, 6]
    assert segment_max(X, SEGMENT, 4).tolist() == [3, 0, -4, 6]
    assert segment_first(X, SEGMENT, 4).tolist() == [1, 0, -4, 6]
    assert segment_position(SEGMENT).tolist() == [0, 1, 2, 0, 1, 0]
    assert is_last(SEGMENT).tolist() == [False, False, True, False, True, True]


def test_trailing_rows_without_tokens_and_other_types():
    assert segment_first(SEGMENT, SEGMENT, 6).tolist() == [0, 0, 2, 3, 0, 0]
    flags = torch.tensor([True, True, True, False, False, True])
    assert segment_first(flags, SEGMENT, 5).tolist() == [True, False, False, True, False]


def test_no_tokens_at_all():
    none, segment = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    assert row_count(segment) == 0
    for over in (segment_sum, segment_mean, segment_max, segment_first):
        assert over(none, segment, 2).tolist() == [0, 0]
    assert segment_position(segment).tolist() == [] and is_last(segment).tolist() == []


def test_gradient_of_first_reaches_the_first_token_only():
    x = X.clone().requires_grad_()
    segment_first(x, SEGMENT, 4).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 0, 0, 1, 0, 1]
