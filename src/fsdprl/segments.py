"""Arithmetic over the rows of a packed microbatch, from `segment` alone.

Shapes: S loss tokens, R rows. segment [S] int64 names the row of each token; rows ascend and a
row's tokens are neighbours. A row without loss tokens is a gap in `segment`: it sums to 0.
"""

import torch
from torch import Tensor


def row_count(segment: Tensor) -> int:
    """Rows up to the last one that has a loss token."""
    return int(segment[-1]) + 1 if len(segment) else 0


def segment_sum(x: Tensor, segment: Tensor, rows: int) -> Tensor:
    """Sum of x [S] over each row: [R], 0 for a row without tokens. Differentiable."""
    return x.new_zeros(rows).index_add(0, segment, x)


def segment_count(segment: Tensor, rows: int) -> Tensor:
    """Tokens of each row: int64 [R]."""
    return segment_sum(torch.ones_like(segment), segment, rows)


def segment_mean(x: Tensor, segment: Tensor, rows: int) -> Tensor:
    """Mean of x [S] over each row: [R], 0 for a row without tokens. Differentiable."""
    return segment_sum(x, segment, rows) / segment_count(segment, rows).clamp(min=1)


def segment_max(x: Tensor, segment: Tensor, rows: int) -> Tensor:
    """Largest x [S] of each row: [R], 0 for a row without tokens."""
    return x.new_zeros(rows).scatter_reduce(0, segment, x, "amax", include_self=False)


def segment_first(x: Tensor, segment: Tensor, rows: int) -> Tensor:
    """x [S] at the first token of each row: [R], 0 for a row without tokens.

    Turns a sample column, which arrives with the row's number on every token, back into rows.
    """
    count = segment_count(segment, rows)
    if not len(x):
        return x.new_zeros(rows)
    first = (count.cumsum(0) - count).clamp(max=len(x) - 1)
    return torch.where(count > 0, x[first], torch.zeros_like(x[first]))


def segment_position(segment: Tensor) -> Tensor:
    """Ordinal of each token among its row's loss tokens, from 0: int64 [S]."""
    rows = row_count(segment)
    count = segment_count(segment, rows)
    return torch.arange(len(segment), device=segment.device) - (count.cumsum(0) - count)[segment]


def is_last(segment: Tensor) -> Tensor:
    """Whether a token is the last loss token of its row: bool [S]."""
    last = torch.ones_like(segment, dtype=torch.bool)
    last[:-1] = segment[1:] != segment[:-1]
    return last
