"""Worker verbs over examples: open a file, measure its rows, make rows of it resident."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdprl.data.feed import Course, Feed
from fsdprl.data.sources import format_of, open_source
from fsdprl.store import Row
from fsdprl.worker import Worker


def open_file(worker: Worker, *, name: str, form: dict, flag: str) -> None:
    """Read the file on this rank; UserError if it is not the one that the controller read."""
    worker.state.setdefault("examples", {})[name] = rows = open_source(format_of(form), flag=flag)
    worker.state.setdefault("tokenizer", rows.tokenizer)


def measure(worker: Worker, *, name: str, indices: Tensor) -> dict[str, Tensor]:
    """Tokens and loss tokens of these rows, int32."""
    tokens, loss_tokens = worker.state["examples"][name].measure(indices.tolist())
    return {"tokens": torch.from_numpy(tokens), "loss_tokens": torch.from_numpy(loss_tokens)}


def feed(
    worker: Worker,
    *,
    name: str,
    course: str,
    form: dict,
    flag: str,
    kept: Tensor,
    tokens: Tensor,
    seed: int,
    count: int,
    per: int,
    workers: int,
    step: int,
) -> None:
    """Start processes that make this rank's rows of every step from this one on. See `data.feed.Course`."""
    rows = Course(np.asarray(kept), np.asarray(tokens), seed, count, per)
    made = Feed(
        form,
        rows,
        rank=worker.world.rank,
        ranks=worker.world.size,
        workers=workers,
        flag=flag,
        step=step,
    )
    worker.state.setdefault("feeds", {})[course] = made


def load(
    worker: Worker,
    *,
    name: str,
    indices: Tensor,
    row_ids: Tensor,
    answers: Tensor | None = None,
    fed: dict | None = None,
) -> dict[str, Tensor]:
    """Tokenise these rows of the file and keep them under these row ids. Returns their lengths, int64.

    answers: rows whose completions stand behind these rows' prompts, if not their own. fed: the course and the step
    whose rows they are, where data processes have made them. Raises ValueError if those made other rows.
    """
    examples = worker.state["examples"][name]
    others = [] if answers is None else [answers.tolist()]
    if fed:
        made = worker.state["feeds"][fed["course"]].take(fed["step"])
        if [number for number, _ in made] != indices.tolist():
            raise ValueError(f"data processes made other rows than step {fed['step']} takes")
        rows = [row for _, row in made]
    else:
        rows = examples.rows(indices.tolist(), *others)
    lengths = []
    for row_id, example in zip(row_ids.tolist(), rows, strict=True):
        ids, mask = torch.from_numpy(example.ids), torch.from_numpy(example.mask)
        first = int(mask.int().argmax()) if bool(mask.any()) else len(ids)
        info = {
            "prompt": examples.tokenizer.decode(ids[:first].tolist()),
            "prompt_length": first,
            "meta": example.meta,
        }
        worker.store.put(row_id, Row(ids, mask, info))
        lengths.append((len(ids), int(mask.sum())))
        worker.progress()
    tokens, loss_tokens = torch.tensor(lengths, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return {"tokens": tokens, "loss_tokens": loss_tokens}


VERBS: dict[str, Callable[..., Any]] = {
    "examples.open": open_file,
    "examples.measure": measure,
    "examples.load": load,
    "examples.feed": feed,
}
