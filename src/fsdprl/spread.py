"""What depends on the tokens of a whole batch: quantiles and whitening, exact, while the tokens stay on their ranks."""

import math
from functools import partial

import torch
from torch import Tensor

from fsdprl import advantages
from fsdprl.batch import Batch
from fsdprl.controller import current
from fsdprl.errors import UserError

DIGIT = 8
"""Bits that a round of questions settles. Each rank answers with 2^8 counts, however many tokens it has."""


def whiten(batch: Batch) -> None:
    """Give token column `advantage` mean 0 and variance 1 (unbiased) over all loss tokens; without spread it becomes 0.

    PPO whitens after the returns are known (Ouyang et al. 2022's code), REINFORCE++ instead of a baseline (Hu 2025).
    """
    over = batch.reduce("advantage")
    batch.apply(partial(advantages.whiten, mean=over.mean, variance=over.var), out="advantage")


def quantile(batch: Batch, column: str, share: float) -> float:
    """The value of a token column at `share` (0 to 1) of all loss tokens in order; between two, the higher one.

    The same for any number of ranks: the float's bits, sign and exponent first, are found digit by digit in four
    rounds of counting. NaN where the batch has no token. Raises UserError for an unknown column or another share.
    """
    batch.check_token_column(column)
    if not 0.0 <= share <= 1.0:
        raise UserError(f"quantile({column!r}, {share}): the share must be from 0 to 1")
    rows = [batch.row_ids[where] for where in batch.by_rank()]
    found, below = 0, -1
    for shift in range(32 - DIGIT, -1, -DIGIT):
        payload = [
            {"rows": some, "column": column, "found": found, "shift": shift} for some in rows
        ]
        counts = torch.stack(current().call("rows.digits", payload, phase="adv").wait()).sum(0)
        if below < 0:
            if not int(counts.sum()):
                return math.nan
            below = math.ceil(
                round(share * (int(counts.sum()) - 1), 6)
            )  # values before the wanted one
        upto = counts.cumsum(0)
        digit = int(torch.searchsorted(upto, below, right=True))
        below -= int(upto[digit - 1]) if digit else 0
        found = found << DIGIT | digit
    return float(_value(torch.tensor(found)))


def _value(key: Tensor) -> Tensor:
    """The float32 whose sortable bits these are: the inverse of `sortable`."""
    bits = torch.where(key >> 31 == 1, key - (1 << 31), ~key & 0xFFFFFFFF)
    return torch.where(bits >> 31 == 1, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
