"""Worker verb: one slice of answers that are sampled in several, each with the weights that are then in the engine.

A row that is not finished keeps its tokens, the log-probs that they were drawn with, and its seed. It goes on as a
conversation does: prompt and answer so far are the next request, whose seed is a function of the row's own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsdprl.conversing import turn_seed
from fsdprl.engines import Completion, Request
from fsdprl.rollout import sampling_of
from fsdprl.store import Row
from fsdprl.worker import Worker


def generate_slice(
    worker: Worker,
    *,
    first_row: list[int],
    lengths: Tensor,
    ids: Tensor,
    infos: list[dict],
    seeds: Tensor,
    n: int,
    begun: Tensor,
    splits: int,
    sampling: dict,
    version: int,
) -> dict[str, Any]:
    """Sample up to the end of the next slice: n new rows of each prompt, and these rows that have begun.

    begun: row ids, int64 [B]. splits: slices of max_new_tokens. The others are arguments of `engine.generate`.
    Returns sample columns [prompts * n + B], new rows first, and the engine's statistics.
    """
    wanted = sampling_of(worker, sampling, version)
    most = wanted.max_new_tokens
    prompts = ids.split(lengths.tolist()) if len(lengths) else ()
    new = [first_row[i // n] + i % n for i in range(len(seeds))]
    for i, (row_id, seed) in enumerate(zip(new, seeds.tolist(), strict=True)):
        worker.store.put(row_id, begin(prompts[i // n], infos[i // n], seed, most))
    row_ids = [*new, *begun.tolist()]
    rows = worker.store.select(row_ids)
    whole = [min(most, worker.engine.max_model_len - row.info["prompt_length"]) for row in rows]
    limits = [
        min(slice_end(row.loss_tokens, most, splits), whole[lane]) - row.loss_tokens
        for lane, row in enumerate(rows)
    ]
    wanted = replace(wanted, max_new_tokens=max([1, *limits]))
    session = worker.engine.session(len(rows), wanted, worker.progress)
    for lane, row in enumerate(rows):
        if limits[lane] > 0:  # none are left where max_new_tokens is less than it was
            seed = turn_seed(row.info["seed"], row.loss_tokens)
            session.add(lane, Request(row.ids.tolist(), seed), limits[lane])
    stopped = [False] * len(rows)
    while not session.over:
        for lane, completion in session.step(False):
            rows[lane] = grown(rows[lane], completion)
            stopped[lane] = completion.finish == "stop"
    for lane, row in enumerate(rows):
        row.info["truncated"] = row.loss_tokens >= whole[lane] and not stopped[lane]
        worker.store.put(row_ids[lane], row)
    truncated = torch.tensor([row.info["truncated"] for row in rows], dtype=torch.bool)
    return {
        "length": torch.tensor([row.loss_tokens for row in rows], dtype=torch.int64),
        "truncated": truncated,
        "unfinished": ~truncated & ~torch.tensor(stopped, dtype=torch.bool),
        "stats": {name: float(value) for name, value in worker.engine.stats().items()},
    }


def slice_end(length: int, most: int, splits: int) -> int:
    """Tokens that an answer of `length` may have after its next slice: the first k * most / splits above it."""
    ends = (k * most // splits for k in range(1, splits))
    return next((end for end in ends if end > length), most)


def begin(prompt: Tensor, info: dict[str, Any], seed: int, most: int) -> Row:
    """A row without an answer yet. The seed stays with it, wherever and whenever it goes on."""
    about = {"prompt_length": len(prompt), "max_new_tokens": most, "seed": seed}
    columns = {"logp_sampler": torch.zeros(0, dtype=torch.float32)}
    ids = prompt.to(torch.int32).clone()
    return Row(ids, torch.zeros(len(ids), dtype=torch.bool), info | about, columns, 0)


def grown(row: Row, completion: Completion) -> Row:
    """The row with what was sampled behind it."""
    count = len(completion.ids)
    return Row(
        torch.cat([row.ids, completion.ids.to(torch.int32)]),
        torch.cat([row.mask, torch.ones(count, dtype=torch.bool)]),
        row.info,
        {"logp_sampler": torch.cat([row.columns["logp_sampler"], completion.logp])},
        row.loss_tokens + count,
    )


VERBS: dict[str, Callable[..., Any]] = {"engine.slice": generate_slice}
