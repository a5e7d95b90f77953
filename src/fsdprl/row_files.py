"""Worker verbs over rows in files: what a rank holds of a carried batch, saved with the run and read back."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdprl.exchange import decode_rows, encode_rows
from fsdprl.ferry import deliver, here
from fsdprl.worker import Worker


def file_of(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank:05d}.rows"


def save(
    worker: Worker, *, rows: Tensor, names: Tensor, folder: str
) -> tuple[int, str, str] | None:
    """Write these rows under these names, in the encoding in which ranks trade them.

    What the disk refused is the answer, as errno, text and file: raised, it would end the job, which can try again.
    """
    data = b""
    if len(rows):
        named = zip(names.tolist(), rows.tolist(), strict=True)
        data = encode_rows([(name, worker.store.rows[i]) for name, i in named]).numpy().tobytes()
    file = file_of(folder, worker.world.rank)
    try:
        deliver(worker, file, data)
    except OSError as error:
        return error.errno or 0, error.strerror or str(error), str(error.filename or file)
    return None


def load(worker: Worker, *, folder: str, saved_by: Sequence[int], old: Tensor, new: Tensor) -> None:
    """Put the rows that these ranks saved under `old` names into the store, under new ids."""
    names = dict(zip(old.tolist(), new.tolist(), strict=True))
    for rank in saved_by:
        data = bytearray(here(worker, file_of(folder, rank)).read_bytes())
        for row_id, row in decode_rows(torch.frombuffer(data, dtype=torch.uint8)):
            worker.store.put(names[row_id], row)


VERBS: dict[str, Callable[..., Any]] = {"rows.save": save, "rows.load": load}
