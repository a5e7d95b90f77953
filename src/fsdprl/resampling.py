"""Dynamic sampling: groups of answers that teach something, sampled until a step has enough of them.

Yu et al. 2025 (DAPO), section 3.2: groups whose answers are all right or all wrong have no advantage, so more
prompts are sampled in their place. What a step does not use is carried over to the next one, with its token
columns, and saved with the run.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from fsdprl.batch import Batch, Lease
from fsdprl.controller import current
from fsdprl.data.prompt import Prompt
from fsdprl.errors import UserError
from fsdprl.prompts import Prompts

TABLE = "rows.json"


class GroupPool:
    """Where the data stands, and groups kept but not yet trained on. Track it with the run.

        for prompts in pool.rounds(P):
            batch = sampler.generate(prompts, n=G)
            ...
            pool.add(batch[teaches])
        policy.logprobs(pool.fresh(), out="logp_old")
        batch = pool.take(P)

    Rows are added in whole groups, G after G; `take` gives the oldest first.
    """

    def __init__(self, prompts: Prompts, *, group_size: int, per_round: int) -> None:
        """per_round: prompts of one round of sampling. Raises UserError where that makes no sense."""
        if group_size < 2:
            raise UserError(f"--group-size {group_size}: one answer cannot differ from another")
        if not 0 < per_round <= len(prompts):
            raise UserError(
                f"--prompts-per-round {per_round}: must be at least 1 and at most the {len(prompts)} "
                f"rows of --data"
            )
        self.prompts, self.group_size, self.per_round = prompts, group_size, per_round
        self.cursor = 0
        """Prompts sampled from so far."""
        self.carried: Batch | None = None
        self.new: list[Batch] = []
        self.sampled, self.added = 0, 0
        """Groups of this step: sampled, and kept."""

    def __len__(self) -> int:
        """Groups at hand."""
        rows = sum(len(batch) for batch in (self.carried, *self.new) if batch is not None)
        return rows // self.group_size

    def rounds(self, want: int, most: int = 0) -> Iterator[list[Prompt]]:
        """Prompts of one round after the other, until `want` groups are at hand or after `most` rounds.

        most: 0 goes on as long as it takes. Raises UserError if a whole pass over the data then adds no group.
        """
        self.sampled = self.added = idle = 0
        while len(self) < want and (not most or self.sampled < most * self.per_round):
            had = len(self)
            yield self.prompts.take(self.cursor, self.per_round)
            self.cursor += self.per_round
            self.sampled += self.per_round
            idle = 0 if len(self) > had else idle + self.per_round
            if not most and idle >= len(self.prompts):
                raise UserError(
                    f"dynamic sampling: not one of {idle} prompts, a whole pass over --data, gave a group "
                    f"that teaches: it is all too easy or too hard, or --filter-metric does not fit"
                )

    def add(self, batch: Batch) -> None:
        """Keep these rows, whole groups."""
        assert len(batch) % self.group_size == 0, "part of a group"
        self.new.append(batch)
        self.added += len(batch) // self.group_size

    def fresh(self) -> Batch:
        """The rows added since the last `take`, as one batch, for what must be computed before they age."""
        if len(self.new) != 1:
            self.new = [Batch.concat(self.new)] if self.new else []
        return self.new[0] if self.new else no_rows()

    def take(self, count: int, *, short: Literal["error", "train"] = "error") -> Batch:
        """The oldest `count` groups; the others are carried over.

        short: what happens if there are fewer. error raises UserError, train takes what there is.
        """
        if len(self) < count and short == "error":
            raise UserError(
                f"--max-rounds: only {len(self)} of {count} groups differ in --filter-metric after the last "
                f"round: raise it, or train on what there is with --when-short train"
            )
        parts = [part for part in (self.carried, *self.new) if part is not None and len(part)]
        self.carried, self.new = None, []
        if not parts:
            return no_rows()
        batch, rows = Batch.concat(parts), count * self.group_size
        if len(batch) > rows:
            self.carried = batch[rows:]
        return batch[:rows]

    def metrics(self) -> dict[str, float]:
        """Rounds of this step, the share of its sampled groups that were left out, and what is carried over."""
        share = {"train/filtered_share": 1 - self.added / self.sampled} if self.sampled else {}
        return share | {
            "train/num_gen_batches": self.sampled / self.per_round,
            "train/carried_groups": float(len(self)),
        }

    def save(self, folder: Path) -> None:
        """Write the cursor, and the carried rows as each rank holds them."""
        table = {"cursor": self.cursor} | (table_of(self.carried) if self.carried else {})
        (folder / TABLE).write_text(json.dumps(table))
        if self.carried is not None:
            positions = self.carried.by_rank()
            payload = [
                {"rows": self.carried.row_ids[where], "names": where, "folder": str(folder)}
                for where in positions
            ]
            current().call("rows.save", payload, phase="save").wait()

    def load(self, folder: Path) -> None:
        """Restore what save wrote, on any number of ranks."""
        table = json.loads((folder / TABLE).read_text())
        self.cursor, self.new = table["cursor"], []
        self.carried = batch_of(table, folder) if "ranks" in table else None


def no_rows() -> Batch:
    """A batch that trains nothing."""
    none = torch.zeros(0, dtype=torch.int64)
    return Batch.of(Lease(none), {"tokens": none, "loss_tokens": none})


def table_of(batch: Batch) -> dict:
    """The controller's part of a batch as JSON: Python writes float64 so that it reads the same.

    Rows and units go by their place in the batch: row ids are this process's own.
    """
    own = batch.columns | {"unit": _places(batch.columns["unit"])}
    columns = {
        name: {"dtype": str(values.dtype).removeprefix("torch."), "values": values.tolist()}
        for name, values in sorted(own.items())
    }
    return {
        "ranks": batch.ranks.tolist(),
        "columns": columns,
        "token_columns": sorted(batch.token_columns),
    }


def batch_of(table: dict, folder: Path) -> Batch:
    """A saved batch under new row ids. The file of rank r is read by rank r modulo the ranks there are."""
    controller = current()
    saved = torch.tensor(table["ranks"])
    lease = Lease(saved % controller.world_size)
    columns = {
        name: torch.tensor(column["values"], dtype=getattr(torch, column["dtype"]))
        for name, column in table["columns"].items()
    }
    columns["unit"] += lease.start
    payload = []
    for rank in range(controller.world_size):
        here = lease.ranks == rank
        payload.append(
            {
                "folder": str(folder),
                "saved_by": saved[here].unique().tolist(),
                "old": here.nonzero().flatten(),
                "new": lease.row_ids[here],
            }
        )
    controller.call("rows.load", payload, phase="load").wait()
    return Batch.of(lease, columns, table["token_columns"])


def _places(unit: torch.Tensor) -> torch.Tensor:
    """Units named by the place at which each first stands, int64 [N]."""
    _, number = unit.unique(return_inverse=True)
    places = torch.arange(len(number))
    first = torch.full((len(number),), len(number)).scatter_reduce(0, number, places, "amin")
    return first[number]
