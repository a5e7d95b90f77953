"""Dynamic sampling: groups of answers that teach something, sampled until a step has enough of them.

Yu et al. 2025 (DAPO), section 3.2: groups whose answers are all right or all wrong have no advantage, so more
prompts are sampled in their place. What a step does not use is carried over to the next one, with its token
columns, and saved with the run.

Partial rollout (Kimi k1.5, 2025, section 2.6; MindSpeed-RL's partial_rollout_max_split): a round samples one slice of
each answer, so that a step need not wait for the longest ones. Groups with unfinished answers go on in the next round,
which the next step's weights draw once a step has enough complete groups.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from fsdprl.batch import Batch, Lease
from fsdprl.controller import current
from fsdprl.data.prompt import Prompt
from fsdprl.errors import UserError
from fsdprl.prompts import Prompts
from fsdprl.sampler import Sampler

TABLE = "rows.json"
WAITING, NEW = "waiting", "new"
"""Of the table, and the folders of their rows."""


class GroupPool:
    """Where the data stands, and groups kept but not yet trained on. Track it with the run.

        for prompts in pool.rounds(P):
            batch = pool.generate(sampler, prompts)
            ...
            pool.add(batch[teaches])
        policy.logprobs(pool.fresh(), out="logp_old")
        batch = pool.take(P)

    Rows are added in whole groups, G after G; `take` gives the oldest first.
    """

    def __init__(
        self, prompts: Prompts, *, group_size: int, per_round: int, splits: int = 1
    ) -> None:
        """per_round: groups of one round of sampling. splits: slices of an answer, one a round; 1 does not slice.

        Raises UserError where that makes no sense.
        """
        if group_size < 2:
            raise UserError(f"--group-size {group_size}: one answer cannot differ from another")
        if not 0 < per_round <= len(prompts):
            raise UserError(
                f"--prompts-per-round {per_round}: must be at least 1 and at most the {len(prompts)} "
                f"rows of --data"
            )
        if splits < 1:
            raise UserError(f"--rollout-splits {splits}: an answer has at least one slice")
        self.prompts, self.group_size, self.per_round = prompts, group_size, per_round
        self.splits = splits
        self.cursor = 0
        """Prompts sampled from so far."""
        self.carried: Batch | None = None
        self.new: list[Batch] = []
        self.waiting: Batch | None = None
        """Groups with unfinished answers, the oldest first."""
        self.turns, self.complete, self.added, self.continued = 0, 0, 0, 0
        """Of this step: rounds, groups completed, groups kept, and rows that went on."""
        self.age = 0.0
        """Mean slices of this step's rows; 0 for none."""

    def __len__(self) -> int:
        """Groups at hand."""
        rows = sum(len(batch) for batch in (self.carried, *self.new) if batch is not None)
        return rows // self.group_size

    @property
    def open_groups(self) -> int:
        """Groups with unfinished answers."""
        return len(self.waiting) // self.group_size if self.waiting else 0

    def rounds(self, want: int, most: int = 0) -> Iterator[list[Prompt]]:
        """Prompts of one round after the other, until `want` groups are at hand or after `most` rounds.

        A round has per_round groups under way: those that wait go on, and new prompts fill the places that they
        leave. A step begins with what waits even if it has enough groups, then without new prompts: so an answer
        that was begun in one step is complete `splits` - 1 steps later. `most` counts rounds by their new prompts;
        when these are used up, what waits goes on until nothing does.

        most: 0 goes on as long as it takes. Raises UserError if a whole pass over the data then adds no group.
        """
        self.turns = self.complete = self.added = self.continued = drawn = idle = 0
        self.age = 0.0
        while len(self) < want or (self.waiting and not self.turns):
            had, under_way = len(self), self.open_groups
            new = self.per_round - under_way if had < want else 0
            if most:
                new = min(new, most * self.per_round - drawn)
            if new <= 0 and not under_way:
                return
            prompts = self.prompts.take(self.cursor, max(new, 0))
            yield prompts
            self.cursor += len(prompts)
            drawn += len(prompts)
            self.turns += 1
            done = under_way + len(prompts) - self.open_groups
            self.complete += done
            idle = 0 if len(self) > had else idle + done
            if not most and idle >= len(self.prompts):
                raise UserError(
                    f"dynamic sampling: not one of {idle} prompts, a whole pass over --data, gave a group "
                    f"that teaches: it is all too easy or too hard, or --filter-metric does not fit"
                )

    def generate(self, sampler: Sampler, prompts: Sequence[Prompt]) -> Batch:
        """Sample a round: the groups that it completes. The others wait."""
        if self.splits == 1:
            return sampler.generate(prompts, n=self.group_size)
        if self.waiting:
            self.continued += int(self.waiting["unfinished"].sum())
        batch = sampler.slice(prompts, self.waiting, n=self.group_size, splits=self.splits)
        waits = batch["unfinished"].view(-1, self.group_size).any(1)
        waits = waits.repeat_interleave(self.group_size)
        self.waiting = batch[waits] if bool(waits.any()) else None
        return batch[~waits]

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
        batch = batch[:rows]
        if "slices" in batch:
            self.age = float(batch["slices"].double().mean())
        return batch

    def metrics(self) -> dict[str, float]:
        """Rounds of this step, the share of its complete groups that were left out, and what is carried over; of
        partial rollouts also rows that went on, groups that wait, and slices of a row trained on."""
        found = {"train/filtered_share": 1 - self.added / self.complete} if self.complete else {}
        found |= {
            "train/num_gen_batches": float(self.turns),
            "train/carried_groups": float(len(self)),
        }
        if self.splits > 1:
            found |= {
                "partial/continued": float(self.continued),
                "partial/waiting": float(self.open_groups),
            }
            found |= {"partial/age": self.age} if self.age else {}
        return found

    def save(self, folder: Path) -> None:
        """Write the cursor, and the rows that are carried over, are new and wait, as each rank holds them."""
        table: dict[str, Any] = {"cursor": self.cursor}
        if self.carried is not None:
            table |= table_of(self.carried)
            save_rows(self.carried, folder)
        for name, batch in ((NEW, self.fresh()), (WAITING, self.waiting)):
            if batch is not None and len(batch):
                table[name] = table_of(batch)
                save_rows(batch, folder / name)
        (folder / TABLE).write_text(json.dumps(table))

    def load(self, folder: Path) -> None:
        """Restore what save wrote, on any number of ranks."""
        table = json.loads((folder / TABLE).read_text())
        self.cursor = table["cursor"]
        self.carried = batch_of(table, folder) if "ranks" in table else None
        new, self.waiting = (
            batch_of(table[name], folder / name) if name in table else None
            for name in (NEW, WAITING)
        )
        self.new = [new] if new else []


def save_rows(batch: Batch, folder: Path) -> None:
    """Have each rank write its rows of a batch, named by their places in it. OSError where a disk refuses."""
    payload = [
        {"rows": batch.row_ids[where], "names": where, "folder": str(folder)}
        for where in batch.by_rank()
    ]
    for rank, refused in enumerate(current().call("rows.save", payload, phase="save").wait()):
        if refused:
            number, text, name = refused
            raise OSError(number, f"{text} (rank {rank})", name)


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
