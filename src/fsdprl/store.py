"""Resident rows: token tensors that stay on the rank that made them, named by row id.

A row is one sample: its token ids, the mask of the tokens trained on (loss tokens), and token columns that hold one
number per loss token. Columns are compact (loss tokens only): a thousand-token prompt costs nothing in `logp_old`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Row:
    """One sample on its rank. Everything here is a CPU tensor."""

    ids: Tensor
    """int32 [L], prompt and response."""
    mask: Tensor
    """bool [L], True on loss tokens; the first token is never one."""
    info: dict[str, Any] = field(default_factory=dict)
    """msgpack-able facts for rewards and people: prompt, answer, meta, prompt_length, truncated."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """name -> [loss tokens], in order, or [loss tokens, K] of a column with K numbers a token."""
    loss_tokens: int = -1
    """How many tokens are loss tokens: counted when not given, and then asked for by every verb."""
    text: str | None = None
    """The response as text, once somebody has asked for it: of this rank alone, rows travel without."""

    def __post_init__(self) -> None:
        if self.loss_tokens < 0:
            self.loss_tokens = int(self.mask.sum())


class Store:
    """Row id -> Row on one rank. A missing id is a bug of ours, so it raises KeyError with the id."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def put(self, row_id: int, row: Row) -> None:
        """Add a row. Raises ValueError where shapes disagree or the first token is a loss token."""
        if (
            row.ids.dtype != torch.int32
            or row.mask.dtype != torch.bool
            or row.ids.shape != row.mask.shape
        ):
            raise ValueError(f"row {row_id}: ids must be int32 and mask bool of one shape")
        if row.mask.numel() and bool(row.mask[0]):
            raise ValueError(
                f"row {row_id}: the first token has no prefix and cannot be a loss token"
            )
        loss_tokens = row.loss_tokens
        for name, values in row.columns.items():
            if values.ndim not in (1, 2) or len(values) != loss_tokens:
                raise ValueError(
                    f"row {row_id}: column {name!r} has shape {tuple(values.shape)}, not ({loss_tokens},)"
                )
        self.rows[row_id] = row

    def select(self, row_ids: Iterable[int]) -> list[Row]:
        return [self.rows[int(i)] for i in row_ids]

    def column(self, name: str, row_ids: Iterable[int]) -> Tensor:
        """The named column of these rows back to back, [S] or [S, K]. Raises KeyError where a row lacks it."""
        parts = []
        for i in row_ids:
            row = self.rows[int(i)]
            if name not in row.columns:
                raise KeyError(
                    f"row {int(i)} has no token column {name!r}; it has {sorted(row.columns)}"
                )
            parts.append(row.columns[name])
        return torch.cat(parts) if parts else torch.zeros(0)

    def set_column(self, name: str, row_ids: Sequence[int], values: Tensor) -> None:
        """Split values [S] or [S, K] (rows back to back) into the rows' columns."""
        lengths = [self.rows[int(i)].loss_tokens for i in row_ids]
        if values.ndim not in (1, 2) or len(values) != sum(lengths):
            raise ValueError(
                f"column {name!r}: {tuple(values.shape)} values for {sum(lengths)} loss tokens"
            )
        # clone: a view would keep the whole packed tensor alive for as long as one row lives
        for i, part in zip(row_ids, values.split(lengths), strict=True):
            self.rows[int(i)].columns[name] = part.clone()

    def segments(self, row_ids: Sequence[int]) -> Tensor:
        """Row ordinal of each loss token, int64 [S]."""
        lengths = torch.tensor([self.rows[int(i)].loss_tokens for i in row_ids], dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(row_ids)), lengths)

    def free(self, spans: Iterable[tuple[int, int]]) -> None:
        """Forget every row whose id lies in one of the half-open spans."""
        for start, stop in spans:
            if stop - start > len(self.rows):
                for i in [i for i in self.rows if start <= i < stop]:
                    del self.rows[i]
            else:
                for i in range(start, stop):
                    self.rows.pop(i, None)
