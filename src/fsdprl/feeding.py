"""Worker verbs over examples: open a file, measure its rows, make rows of it resident."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


def load(
    worker: Worker, *, name: str, indices: Tensor, row_ids: Tensor, answers: Tensor | None = None
) -> dict[str, Tensor]:
    """Tokenise these rows of the file and keep them under these row ids. Returns their lengths, int64.

    answers: rows whose completions stand behind these rows' prompts, if not their own.
    """
    examples = worker.state["examples"][name]
    others = [] if answers is None else [answers.tolist()]
    lengths = []
    for row_id, example in zip(
        row_ids.tolist(), examples.rows(indices.tolist(), *others), strict=True
    ):
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
}
