"""Advantages of turns: answers of a group that came to the same point of a conversation are compared from there on."""

import torch
from torch import Tensor

from fsdprl.advantages import group_centered, group_normalized
from fsdprl.batch import Batch
from fsdprl.controller import current


def anchored_advantages(
    batch: Batch, *, gamma: float = 0.95, weight: float = 1.0, scale: bool = True
) -> dict[str, float]:
    """GiGPO: token column `advantage`, that of the answer in its group plus weight times that of the turn among turns
    of the group with the same anchor (Feng et al. 2025, arXiv 2505.10978, eq. 3-8).

    The anchor of a turn is what the environment said just before it, to the token; all first turns of a group have the
    same one. The return of a turn is the answer's `reward` times gamma for each turn that came after it. scale: divide
    both by their groups' deviation; off only centres them. A turn that nobody shares has no advantage of its own.

    Returns turns/shared: the share of turns whose anchor another answer of the group has met.
    """
    positions = batch.by_rank()
    payload = [{"rows": batch.row_ids[where]} for where in positions]
    replies = current().call("rows.turns", payload, phase="adv").wait()
    rows = torch.cat(
        [
            where.repeat_interleave(reply["turns"])
            for where, reply in zip(positions, replies, strict=True)
        ]
    )
    left = torch.cat([reply["left"] for reply in replies])
    anchors = torch.stack(
        [batch["group"][rows], torch.cat([reply["anchors"] for reply in replies])], 1
    )
    value, shared = turn_values(
        batch["reward"], batch["group"], rows, left, anchors, gamma, weight, scale
    )
    sizes = [int(reply["turns"].sum()) for reply in replies]
    spread = [
        {"rows": batch.row_ids[where], "values": part, "out": "advantage"}
        for where, part in zip(positions, value.split(sizes), strict=True)
    ]
    current().call("rows.of_turns", spread, phase="adv").wait()
    batch.token_columns.add("advantage")
    return {"turns/shared": float(shared.double().mean())} if len(shared) else {}


def turn_values(
    reward: Tensor,
    group: Tensor,
    rows: Tensor,
    left: Tensor,
    anchors: Tensor,
    gamma: float,
    weight: float,
    scale: bool,
) -> tuple[Tensor, Tensor]:
    """(advantage [M], whether its anchor is shared [M]) of M turns. reward, group: [N]; rows: the answer of each turn;
    left: turns after it; anchors: [M, 2], equal where turns are compared."""
    compare = group_normalized if scale else group_centered
    _, anchor, count = torch.unique(anchors, dim=0, return_inverse=True, return_counts=True)
    returns = reward.double()[rows] * gamma ** left.double()
    value = compare(reward, group)[rows] + weight * compare(returns, anchor)
    return value, count[anchor] > 1
