"""Normalisation as a sample column: weight [N] float64, one number a row.

A worker adds up loss * weight over loss tokens (or over rows, for a RowLoss) and nothing else is
divided anywhere, so that loss and gradient cannot depend on ranks, microbatches or packing. Make the
column from all rows of one optimizer step, on the controller.

loss_tokens [N] counts the trained-on tokens of a row (with tools or in SFT that is not its length).
keep [N] bool leaves rows out of loss, metrics and counts (overlong filtering: keep=~truncated); they
still count in advantages computed before. A row left out, or without loss tokens, weighs 0; if that
is every row, all weights are 0 and finite.
"""

import torch
from torch import Tensor


def token_mean(loss_tokens: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """1 / sum(loss_tokens): every token counts the same (DAPO, Yu et al. 2025, section 3.3)."""
    tokens = _counted(loss_tokens, keep)
    return _present(tokens) / tokens.sum().clamp(min=1)


def sequence_mean(loss_tokens: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """1 / (N * loss_tokens): every row counts the same (GRPO, Shao et al. 2024, eq. 3; GSPO).

    N counts the rows that have a weight.
    """
    tokens = _counted(loss_tokens, keep)
    present = _present(tokens)
    return present / (present.sum().clamp(min=1) * tokens.clamp(min=1))


def fixed_length(loss_tokens: Tensor, max_tokens: int, *, keep: Tensor | None = None) -> Tensor:
    """1 / (N * max_tokens): a constant for every token (Dr. GRPO, Liu et al. 2025, section 3.2).

    max_tokens: the generation limit. N counts all rows, kept or not, so that the constant does not
    move with the answers.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    present = _present(_counted(loss_tokens, keep))
    return present / (max(len(present), 1) * max_tokens)


def row_mean(loss_tokens: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """1 / N: the mean over rows of a RowLoss, or of a token-level loss summed over each row.

    N counts the rows that have a weight. For pairs N is twice their number and both rows carry
    their pair's loss, which makes it the mean over pairs.
    """
    present = _present(_counted(loss_tokens, keep))
    return present / present.sum().clamp(min=1)


def _counted(loss_tokens: Tensor, keep: Tensor | None) -> Tensor:
    tokens = loss_tokens.to(torch.float64)
    if keep is None:
        return tokens
    if keep.dtype != torch.bool or keep.shape != tokens.shape:
        raise ValueError(
            f"keep must be bool {list(tokens.shape)}, got {keep.dtype} {list(keep.shape)}"
        )
    return torch.where(keep, tokens, torch.zeros_like(tokens))


def _present(tokens: Tensor) -> Tensor:
    return (tokens > 0).to(torch.float64)
