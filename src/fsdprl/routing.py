"""How evenly a mixture of experts is used, row by row, from what its routers said."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdprl.errors import UserError


def experts_per_token(config: Any) -> int:
    """Experts that each token goes to. Raises UserError for a model without routers."""
    count = getattr(config.get_text_config(), "num_experts_per_tok", None)
    if not count:
        raise UserError(
            f"--router-aux-coef: {config.model_type} is no mixture of experts, it has no routers to balance"
        )
    return count


def router_balance(logits: Sequence[Tensor], lengths: Sequence[int], chosen: int) -> Tensor:
    """E sum_e f_e P_e of each row, a mean over layers: [R], `chosen` where experts are used evenly.

    Fedus et al. 2021 (Switch), eq. 4-6, inside each row as in DeepSeek-V3 (2024), eq. 17-20, so that it
    depends on no other row: f_e is the share of the row's tokens that go to expert e, which has no
    gradient, P_e the mean of the router's softmax over them. transformers takes one f and one P over all
    layers and rows of a microbatch.

    logits: [T, E] of each layer, over rows back to back. lengths: tokens of each row. chosen: experts a token.
    """
    row_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    row_T = row_T.to(logits[0].device)
    total = logits[0].new_zeros(
        len(lengths), dtype=torch.promote_types(logits[0].dtype, torch.float32)
    )
    count_R = torch.tensor(lengths, device=total.device).to(total)
    for logits_TE in logits:
        probability_TE = logits_TE.to(total.dtype).softmax(-1)
        taken_TE = torch.zeros_like(probability_TE)
        taken_TE = taken_TE.scatter(1, probability_TE.detach().topk(chosen).indices, 1.0)
        share_RE, mean_RE = (
            x.new_zeros(len(lengths), x.shape[1]).index_add(0, row_T, x) / count_R[:, None]
            for x in (taken_TE, probability_TE)
        )
        total = total + logits_TE.shape[1] * (share_RE * mean_RE).sum(1)
    return total / len(logits)
