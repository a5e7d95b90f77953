"""Random ragged rows in two layouts: ours, loss tokens back to back, and theirs, a padded table with a mask."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdprl.losses import RowLoss


@dataclass(frozen=True)
class Ragged:
    """Rows of 1 to 9 loss tokens. mask: [N, longest] bool, each row's tokens at its left."""

    mask: Tensor
    segment: Tensor
    draw: torch.Generator

    @classmethod
    def of(cls, seed: int, rows: int = 8) -> "Ragged":
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 10, (rows,), generator=draw)
        lengths[0], lengths[-1] = 1, 9
        mask = torch.arange(9) < lengths[:, None]
        return cls(mask, torch.repeat_interleave(torch.arange(rows), lengths), draw)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    def noise(self, scale: float = 1.0) -> Tensor:
        """A padded table of numbers around 0. What lies in the padding must not matter: it is 7."""
        table = scale * torch.randn(self.mask.shape, dtype=torch.float64, generator=self.draw)
        return table.masked_fill(~self.mask, 7.0)

    def numbers(self) -> Tensor:
        """One number a row."""
        return torch.randn(len(self.mask), dtype=torch.float64, generator=self.draw)

    def logps(self) -> Tensor:
        """Log-probs: below 0."""
        return -self.noise().abs()

    def near(self, table: Tensor, scale: float = 0.3) -> Tensor:
        """Those of a policy not far away."""
        return (table + self.noise(scale)).clamp(max=-1e-3)

    def pack(self, table: Tensor) -> Tensor:
        """[N, longest] -> [S]."""
        return table[self.mask]

    def spread(self, numbers: Tensor) -> Tensor:
        """[N] -> [S]: a sample column as a loss sees it."""
        return numbers[self.segment]


def reduced(result: object, weight: Tensor, segment: Tensor) -> Tensor:
    """What a worker adds up: loss times its row's weight."""
    if isinstance(result, RowLoss):
        return (result.loss * weight).sum()
    assert isinstance(result, tuple)
    return (result[0] * weight[segment]).sum()


def same(
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor], Tensor],
    at: Tensor,
    mask: Tensor,
    tolerance: float = 1e-10,
) -> None:
    """Value and gradient of two functions of one padded table agree, the gradient inside the mask."""
    both = []
    for function in (ours, theirs):
        table = at.clone().requires_grad_()
        value = function(table)
        value.backward()
        assert table.grad is not None
        both.append((value.detach(), table.grad[mask]))
    torch.testing.assert_close(both[0], both[1], rtol=tolerance, atol=tolerance)
    assert both[0][1].abs().max() > 1e-6, "a gradient of 0 says nothing"
