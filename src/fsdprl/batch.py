"""Batch: the controller's table of rows. Sample columns live here; token columns stay on the ranks, named by row id."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from fsdprl.controller import current
from fsdprl.errors import UserError
from fsdprl.functions import function_ref, positional_names
from fsdprl.grades import grade
from fsdprl.options import RewardOptions
from fsdprl.packing import balance, minibatch_plan, pack_rows

SHOWN_AS = {
    "length": "response_length",
    "truncated": "response_length/truncated",
    "score": "critic/score",
    "rewards": "critic/rewards",
    "tool_calls": "tool_call_num",
}
"""Metric names where they differ from the column's."""


class Lease:
    """Row ids [start, stop) of one call that made rows, and the rank each row lives on.

    When the last Batch that names any of them is gone, the whole span is queued and the ranks forget it.
    """

    made: ClassVar[int] = 0
    freed: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, ranks: Tensor) -> None:
        self.start, self.stop = Lease.made, Lease.made + len(ranks)
        self.ranks = ranks
        Lease.made = self.stop
        weakref.finalize(self, Lease.freed.append, (self.start, self.stop))

    @property
    def row_ids(self) -> Tensor:
        return torch.arange(self.start, self.stop)

    def of(self, row_ids: Tensor) -> Tensor:
        """Which of these ids it leases, bool [N]."""
        return (row_ids >= self.start) & (row_ids < self.stop)

    @classmethod
    def flush(cls) -> None:
        """Tell every rank to forget the rows that no Batch names any more."""
        if cls.freed:
            spans, cls.freed[:] = list(cls.freed), []
            current().call("rows.free", {"spans": spans}).wait()


@dataclass(frozen=True)
class Reduction:
    """Exact global sums of a token column over loss tokens, in float64."""

    sum: float
    square: float
    weight: float
    count: int
    min: float
    max: float

    @property
    def mean(self) -> float:
        return self.sum / self.weight if self.weight else 0.0

    @property
    def var(self) -> float:
        """Unbiased variance; meaningful for weights of one. Zero for fewer than two tokens."""
        return (
            max(self.square - self.sum * self.mean, 0.0) / (self.count - 1)
            if self.count > 1
            else 0.0
        )

    def summary(self, name: str) -> dict[str, float]:
        """mean, max and min as metrics of this name; none of no tokens."""
        values = {"mean": self.mean, "max": self.max, "min": self.min} if self.count else {}
        return {f"{name}/{how}": value for how, value in values.items()}


class Batch:
    """N rows. `batch["reward"]` is a sample column, a tensor [N]; `batch[mask]` is a smaller batch.

    Row order never changes by itself: filters keep it, and rebalance moves rows between ranks, not in the table.
    """

    def __init__(
        self,
        row_ids: Tensor,
        leases: Sequence[Lease],
        columns: dict[str, Tensor],
        token_columns: set[str],
    ) -> None:
        self.row_ids = row_ids
        self.leases = list(leases)
        self.columns = columns
        self.token_columns = token_columns

    @classmethod
    def of(
        cls, lease: Lease, columns: dict[str, Tensor], token_columns: Sequence[str] = ()
    ) -> "Batch":
        """A batch of a whole lease; `temperature` is 1 and every row its own `unit` where the columns do not say."""
        count = lease.stop - lease.start
        defaults = {"temperature": torch.ones(count, dtype=torch.float64), "unit": lease.row_ids}
        return cls(lease.row_ids, [lease], defaults | columns, set(token_columns))

    def __len__(self) -> int:
        return len(self.row_ids)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @overload
    def __getitem__(self, key: str) -> Tensor: ...
    @overload
    def __getitem__(self, key: Tensor | slice | Sequence[int]) -> "Batch": ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self.columns:
                raise UserError(
                    f"the batch has no sample column {key!r}; it has {', '.join(sorted(self.columns))}"
                )
            return self.columns[key]
        index = (
            key if isinstance(key, (Tensor, slice)) else torch.tensor(list(key), dtype=torch.int64)
        )
        if (
            isinstance(index, Tensor)
            and index.dtype == torch.bool
            and index.shape != self.row_ids.shape
        ):
            raise UserError(
                f"a mask over this batch has shape ({len(self)},), not {tuple(index.shape)}"
            )
        columns = {name: values[index] for name, values in self.columns.items()}
        row_ids = self.row_ids[index]
        # Only those of its own rows: what goes on from step to step would keep all rows there ever were alive.
        leases = [lease for lease in self.leases if bool(lease.of(row_ids).any())]
        return Batch(row_ids, leases, columns, self.token_columns)

    def __setitem__(self, name: str, values: Tensor | float) -> None:
        """Set a sample column from a tensor [N], or one number for all rows."""
        if not isinstance(values, Tensor) or values.ndim == 0:
            values = torch.full((len(self),), float(values), dtype=torch.float64)
        if values.shape != (len(self),):
            raise UserError(
                f"column {name!r} has shape {tuple(values.shape)}; this batch has {len(self)} rows"
            )
        self.columns[name] = values.double() if values.is_floating_point() else values

    @classmethod
    def concat(cls, batches: Sequence["Batch"]) -> "Batch":
        """Rows of several batches, in order; keeps the columns they share, as the first one has them in order."""
        leases = list({id(lease): lease for batch in batches for lease in batch.leases}.values())
        shared = set.intersection(*(set(batch.columns) for batch in batches))
        names = [
            name for name in batches[0].columns if name in shared
        ]  # a set's order differs by process
        columns = {name: torch.cat([batch.columns[name] for batch in batches]) for name in names}
        token_columns = set.intersection(*(batch.token_columns for batch in batches))
        return cls(torch.cat([batch.row_ids for batch in batches]), leases, columns, token_columns)

    # ---- where rows are --------------------------------------------------------------------

    @property
    def ranks(self) -> Tensor:
        """Rank of each row, int64 [N]."""
        ranks = torch.full((len(self),), -1, dtype=torch.int64)
        for lease in self.leases:
            here = lease.of(self.row_ids)
            ranks[here] = lease.ranks[self.row_ids[here] - lease.start]
        return ranks

    def by_rank(self, keep: Tensor | None = None) -> list[Tensor]:
        """Positions in this batch of each rank's rows, in row order. keep: bool [N], rows to leave out are False."""
        ranks = self.ranks
        if keep is not None:
            ranks = torch.where(keep, ranks, -1)
        return [(ranks == rank).nonzero().flatten() for rank in range(current().world_size)]

    def gather(self, positions: Sequence[Tensor], replies: Sequence[Tensor]) -> Tensor:
        """Per-rank replies, one number a row, back in row order."""
        out = torch.zeros(len(self), dtype=replies[0].dtype)
        for where, values in zip(positions, replies, strict=True):
            out[where] = values
        return out

    def microbatches(self, positions: Sequence[Tensor], budget: int) -> list[dict[str, Tensor]]:
        """Which microbatch each of a rank's rows runs in (`microbatch`, int32 [R]), whole units together, and how
        many there are (`microbatches`), the same on every rank. Fixed-width: traffic does not grow with tokens."""
        plans, most = [], 0
        for where in positions:
            unit_rows: dict[int, list[int]] = {}
            for place, unit in enumerate(self.columns["unit"][where].tolist()):
                unit_rows.setdefault(int(unit), []).append(place)
            units = list(unit_rows.values())
            tokens = self.columns["tokens"][where].tolist()
            packed = pack_rows([sum(tokens[place] for place in unit) for unit in units], budget)
            number = torch.zeros(len(where), dtype=torch.int32)
            for k, microbatch in enumerate(packed):
                number[[place for u in microbatch for place in units[u]]] = k
            plans.append(number)
            most = max(most, len(packed))
        count = torch.tensor(most, dtype=torch.int32)
        return [{"microbatch": number, "microbatches": count} for number in plans]

    def rebalance(self, minibatches: int = 1, seed: int | None = None) -> None:
        """Even out every (minibatch, rank) cell by cost; ranks trade whole rows in one all-to-all.

        Use the same arguments for `minibatches`. Cost is tokens plus the quadratic attention term.
        """
        controller = current()
        world = controller.world_size
        if world == 1 or not len(self):
            return
        units = self.columns["unit"].tolist()
        number = torch.tensor(minibatch_plan(units, minibatches, seed))
        cost = self.columns.get("cost", self.columns["tokens"]).double()
        after, ranks = torch.zeros(len(self), dtype=torch.int64), self.ranks
        for k in range(int(number.max()) + 1):
            where = (number == k).nonzero().flatten()
            of_units = [units[i] for i in where.tolist()]
            after[where] = torch.tensor(
                balance(cost[where].tolist(), of_units, world, ranks[where].tolist())
            )
        # Every row names its rank, moving or not: as many bytes whatever the plan.
        payload = [
            {"rows": self.row_ids[where], "to": after[where].int(), "ranks": list(range(world))}
            for where in self.by_rank()
        ]
        controller.call("rows.exchange", payload, phase="rebalance").wait()
        for lease in self.leases:
            here = lease.of(self.row_ids)
            lease.ranks[self.row_ids[here] - lease.start] = after[here]

    def minibatches(
        self, count: int = 1, seed: int | None = None, passes: int = 1
    ) -> Iterator["Batch"]:
        """Up to `count` minibatches of whole units, shuffled by seed (None: in row order). No rows give none.

        passes: how often over all rows, each time in another order; rebalance evens out the first one's.
        """
        units = self.columns["unit"].tolist()
        for i in range(passes):
            order = None if seed is None else seed + i
            number = torch.tensor(minibatch_plan(units, count, order), dtype=torch.int64)
            for k in range(int(number.max()) + 1 if len(self) else 0):
                yield self[number == k]

    # ---- work on the ranks -----------------------------------------------------------------

    def map(
        self,
        fn: Callable[..., Any],
        *,
        options: RewardOptions | None = None,
        allow_none: bool = False,
    ) -> Tensor:
        """Score every row with a reward function, in killable processes beside the text. Returns float64 [N].

        A sample whose process crashed or missed its deadline scores 0 and is counted in `reward/failed`.
        allow_none: None means not applicable and becomes NaN. Raises UserError where the function returns None
        without that, or where more than options.max_failed_share of the samples failed.
        """
        graded = grade(self, fn, options)
        scores = torch.where(graded.failed, 0.0, graded.scores)
        if not allow_none and bool(scores.isnan().any()):
            row, name = int(self.row_ids[scores.isnan()][0]), function_ref(fn).qualname
            raise UserError(
                f"reward {name} returned None for row {row}: None means that a reward does not apply, "
                f"and no other reward covers this row; return a number"
            )
        return scores

    def apply(
        self, fn: Callable[..., Any], *, out: str | Sequence[str], phase: str = "adv"
    ) -> None:
        """Row-local token arithmetic on the ranks: fn(columns...) -> [S] or {name: [S]} becomes token columns.

        fn's positional parameters are column names (token, sample, `segment` or `ids`). phase: whose time it
        counts as. Raises UserError for unknown columns.
        """
        names = [out] if isinstance(out, str) else list(out)
        wanted = positional_names(fn)
        self.check_columns(fn, wanted, known=("segment", "ids"))
        ref = asdict_ref(fn)
        payload = [
            {
                "rows": self.row_ids[where],
                "fn": ref,
                "samples": self.sample_columns(wanted, where),
                "out": names,
            }
            for where in self.by_rank()
        ]
        current().call("rows.apply", payload, phase=phase).wait()
        self.token_columns |= set(names)

    def reduce(self, column: str, weight: str | None = None) -> Reduction:
        """Exact global sum, sum of squares, count, min and max of a token column, weighted by a sample column."""
        self.check_token_column(column)
        weights = (
            self.columns[weight].double() if weight else torch.ones(len(self), dtype=torch.float64)
        )
        payload = [
            {"rows": self.row_ids[where], "column": column, "weight": weights[where]}
            for where in self.by_rank()
        ]
        parts = current().call("rows.reduce", payload, phase="adv").wait()
        return Reduction(
            sum=sum(p["sum"] for p in parts),
            square=sum(p["square"] for p in parts),
            weight=sum(p["weight"] for p in parts),
            count=int(sum(p["count"] for p in parts)),
            min=min(p["min"] for p in parts),
            max=max(p["max"] for p in parts),
        )

    def row_sum(self, column: str, *, phase: str = "adv") -> Tensor:
        """Sum of a token column over each row's loss tokens, float64 [N]."""
        self.check_token_column(column)
        positions = self.by_rank()
        payload = [{"rows": self.row_ids[where], "column": column} for where in positions]
        return self.gather(positions, current().call("rows.row_sum", payload, phase=phase).wait())

    # ---- for people ------------------------------------------------------------------------

    def summary(self, *names: str) -> dict[str, float]:
        """mean, min and max of sample columns (the mean alone for booleans), under their metric names."""
        metrics = {}
        for name in names:
            values, shown = self[name].double(), SHOWN_AS.get(name, name)
            if not len(values):
                continue
            if self[name].dtype == torch.bool:
                metrics[shown] = float(values.mean())
            else:
                metrics |= {
                    f"{shown}/{how}": float(getattr(values, how)())
                    for how in ("mean", "min", "max")
                }
        return metrics

    def peek(self, count: int = 3) -> list[dict[str, Any]]:
        """The first rows as text with their sample columns, fetched for the eye (metered apart)."""
        some = self[:count]
        positions = some.by_rank()
        payload = [{"rows": some.row_ids[where]} for where in positions]
        replies = current().call("rows.peek", payload, metered=False).wait()
        shown: list[dict[str, Any]] = [{} for _ in range(len(some))]
        for where, reply in zip(positions, replies, strict=True):
            for position, text in zip(where.tolist(), reply, strict=True):
                shown[position] = {
                    name: values[position].item() for name, values in some.columns.items()
                } | text
        return shown

    def write_completions(
        self, folder: Path, step: int, names: Sequence[str] = ("reward", "length", "truncated")
    ) -> None:
        """Every rank appends its own rows, with these sample columns, to its shard in the folder."""
        present = [name for name in self.columns if name in names or name.endswith("_rewards")]
        payload = [
            {
                "rows": self.row_ids[where],
                "path": str(folder),
                "step": step,
                "samples": self.sample_columns(present, where),
            }
            for where in self.by_rank()
        ]
        current().call("rows.write_completions", payload).wait()

    # ---- checks ----------------------------------------------------------------------------

    def sample_columns(self, names: Sequence[str], where: Tensor) -> dict[str, Tensor]:
        """The named columns that are sample columns, at these positions."""
        return {name: self.columns[name][where] for name in names if name in self.columns}

    def check_columns(
        self, fn: Callable[..., Any], wanted: Sequence[str], known: Sequence[str]
    ) -> None:
        """Raise UserError where a function asks for a column that nobody made."""
        have = set(self.columns) | self.token_columns | set(known)
        if missing := [name for name in wanted if name not in have]:
            shown = getattr(fn, "__name__", None) or getattr(
                getattr(fn, "func", fn), "__name__", fn
            )
            raise UserError(
                f"{shown} asks for column {missing[0]!r}; there are sample columns {', '.join(sorted(self.columns))}, "
                f"token columns {', '.join(sorted(self.token_columns)) or 'none'}, and {', '.join(known)}"
            )

    def check_token_column(self, name: str) -> None:
        if name not in self.token_columns:
            raise UserError(
                f"there is no token column {name!r}; there are {', '.join(sorted(self.token_columns))}"
            )


def asdict_ref(fn: Callable[..., Any]) -> dict[str, Any]:
    """A function as it travels: module, qualname and keyword arguments."""
    ref = function_ref(fn)
    return {"module": ref.module, "qualname": ref.qualname, "kwargs": ref.kwargs}
