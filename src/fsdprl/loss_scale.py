"""Scaling of a float16 loss, so that small gradients do not vanish in the 5 bits of its exponent.

The loss is multiplied before backward and the gradient divided in float32 before the step. A gradient that overflows
skips the step and halves the scale; many good steps in a row double it (Micikevicius et al. 2018, arXiv:1710.03740).
"""

import torch
from torch import Tensor

FIRST, LARGEST = 2.0**15, 2.0**24
GROW_AFTER = 500
"""Good steps in a row after which a larger scale is tried."""


class LossScale:
    """The scale of one model's loss. The same on every rank, as all see the same global norm."""

    def __init__(self) -> None:
        self.state = torch.tensor([FIRST, 0.0], dtype=torch.float64)
        """[scale, good steps since it last changed]: what a checkpoint keeps."""

    @property
    def value(self) -> float:
        return float(self.state[0])

    def overflowed(self) -> bool:
        """Halve the scale; False if it is 1 already, and so not to blame."""
        if self.value <= 1.0:
            return False
        self.state.copy_(_state(self.value / 2.0, 0.0))
        return True

    def held(self) -> None:
        """Count a good step."""
        good = float(self.state[1]) + 1.0
        if good < GROW_AFTER:
            self.state.copy_(_state(self.value, good))
        else:
            self.state.copy_(_state(min(2.0 * self.value, LARGEST), 0.0))


def _state(scale: float, good: float) -> Tensor:
    return torch.tensor([scale, good], dtype=torch.float64)
