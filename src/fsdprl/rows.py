"""Worker verbs over resident rows: grade, transform, reduce, trade, show, free."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from fsdprl import ferry
from fsdprl.errors import UserError
from fsdprl.exchange import exchange_rows
from fsdprl.functions import FunctionRef, positional_names, resolve
from fsdprl.mesh import cpu_group
from fsdprl.options import RewardOptions
from fsdprl.redaction import redacted
from fsdprl.sample import Sample
from fsdprl.store import Row, Store
from fsdprl.worker import Worker


def gather_columns(
    store: Store, row_ids: Sequence[int], names: Sequence[str], samples: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Columns by name over the loss tokens of these rows, each [S].

    A name is `segment` (row ordinal of each token), `ids` (the tokens themselves), a sample column (its row's number
    on every token) or a token column. samples: name -> [R], aligned with row_ids.
    """
    segment = store.segments(row_ids)
    columns = {}
    for name in names:
        if name == "segment":
            columns[name] = segment
        elif name == "ids":
            rows = store.select(row_ids)
            columns[name] = (
                torch.cat([row.ids[row.mask] for row in rows]) if rows else segment.int()
            )
        elif name in samples:
            columns[name] = samples[name][segment]
        else:
            columns[name] = store.column(name, row_ids)
    return columns


def apply(
    worker: Worker, *, rows: Tensor, fn: dict, samples: dict[str, Tensor], out: list[str]
) -> None:
    """Row-local token arithmetic: fn's result(s) become token columns."""
    function = resolve(FunctionRef(**fn))
    row_ids = rows.tolist()
    result = function(**gather_columns(worker.store, row_ids, positional_names(function), samples))
    results = result if isinstance(result, dict) else {out[0]: result}
    if set(results) != set(out):
        raise ValueError(
            f"{fn['qualname']} returned columns {sorted(results)}, but out names {sorted(out)}"
        )
    for name, values in results.items():
        worker.store.set_column(name, row_ids, values)


def reduce(worker: Worker, *, rows: Tensor, column: str, weight: Tensor) -> dict[str, Any]:
    """Sums in float64 over the loss tokens of rows with a non-zero weight."""
    row_ids = rows[weight != 0].tolist()
    values = worker.store.column(column, row_ids).double()
    token_weight = weight[weight != 0].double()[worker.store.segments(row_ids)]
    return {
        "sum": float((values * token_weight).sum()),
        "square": float((values.square() * token_weight).sum()),
        "weight": float(token_weight.sum()),
        "count": float(len(values)),
        "min": float(values.min()) if len(values) else float("inf"),
        "max": float(values.max()) if len(values) else float("-inf"),
    }


def row_sum(worker: Worker, *, rows: Tensor, column: str) -> Tensor:
    """Sum of a token column over each row, float64 [R]."""
    row_ids = rows.tolist()
    sums = torch.zeros(len(row_ids), dtype=torch.float64)
    return sums.index_add_(
        0, worker.store.segments(row_ids), worker.store.column(column, row_ids).double()
    )


def digits(worker: Worker, *, rows: Tensor, column: str, found: int, shift: int) -> Tensor:
    """How many values of a float32 token column go on from the bits `found`, which stand above the next 8, with each
    of these: int64 [256]. The next 8 bits begin at `shift`; the bits are those of `sortable`."""
    key = sortable(worker.store.column(column, rows.tolist()))
    key = key[key >> (shift + 8) == found]
    return torch.bincount(key >> shift & 0xFF, minlength=256)


def sortable(values: Tensor) -> Tensor:
    """The bits of float32 values, turned so that as whole numbers (0 to 2^32 - 1, int64) they are in the same order."""
    bits = values.float().view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >> 31 == 1, ~bits & 0xFFFFFFFF, bits | 1 << 31)


def turns(worker: Worker, *, rows: Tensor) -> dict[str, Tensor]:
    """Of each row its number of `turns`, int64 [R]; of each turn back to back how many are `left` after it in its row
    and its anchor: a hash of the tokens between it and the turn before, 0 for the first one. int64 [turns]."""
    counts, left, anchors = [], [], []
    for row in worker.store.select(rows.tolist()):
        starts, ends = spans(row)
        counts.append(len(starts))
        left += range(len(starts) - 1, -1, -1)
        for before, start in zip([-1, *ends], starts, strict=False):
            said = row.ids[before:start].numpy().tobytes() if before >= 0 else b""
            digest = hashlib.blake2b(said, digest_size=8).digest()
            anchors.append(int.from_bytes(digest, "little", signed=True) if said else 0)
    found = {"turns": counts, "left": left, "anchors": anchors}
    return {name: torch.tensor(values, dtype=torch.int64) for name, values in found.items()}


def spans(row: Row) -> tuple[list[int], list[int]]:
    """Where each turn of the model begins in the row's ids, and the place behind its end."""
    edges = row.mask.int().diff(append=torch.zeros(1, dtype=torch.int32))
    return (edges > 0).nonzero().add(1).flatten().tolist(), (edges < 0).nonzero().add(
        1
    ).flatten().tolist()


def of_turns(worker: Worker, *, rows: Tensor, values: Tensor, out: str) -> None:
    """One number a turn, back to back, becomes a token column: each loss token has its turn's."""
    row_ids = rows.tolist()
    lengths = [
        end - start
        for row in worker.store.select(row_ids)
        for start, end in zip(*spans(row), strict=True)
    ]
    column = values.float().repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    worker.store.set_column(out, row_ids, column)


def exchange(worker: Worker, *, rows: Tensor, to: Tensor, ranks: list[int]) -> None:
    """Trade rows with the other ranks; `to` is the rank each of these rows shall live on, int32 [R]."""
    here = worker.world.rank
    leaving = [rows[to == rank].tolist() if rank != here else [] for rank in ranks]
    exchange_rows(worker.store, leaving, cpu_group(ranks))


def free(worker: Worker, *, spans: list[tuple[int, int]]) -> None:
    worker.store.free(spans)


def samples_of(
    worker: Worker,
    row_ids: Sequence[int],
    *,
    tokens: bool = False,
    step: int = 0,
    groups: Sequence[int] | None = None,
    turn: int = -1,
) -> list[Sample]:
    """The rows as reward functions see them. Text is decoded from the engine's own token ids.

    tokens: whether the responses' token ids come along. groups: of each row, for rewards over groups. turn: of a
    conversation, the turn of the model's that is the response.
    """
    tokenizer = worker.state["tokenizer"]
    rows = worker.store.select(row_ids)
    if not rows:
        return []  # some tokenizers decode no rows to one empty text
    ids = [row.ids[row.info["prompt_length"] :].tolist() for row in rows]
    responses = _texts(tokenizer, rows, ids)
    for index, row in enumerate(rows):
        if turns := row.info.get("turns"):
            responses[index] = [t["content"] for t in turns if t["role"] == "assistant"][turn]
    numbers = groups if groups is not None else [-1] * len(rows)
    return [
        Sample(
            prompt=row.info["prompt"],
            response=response,
            answer=row.info.get("answer"),
            length=len(answer),
            truncated=row.info.get("truncated", False),
            meta=row.info.get("meta") or {},
            messages=row.info.get("messages"),
            row=row_id,
            ids=answer if tokens else [],
            max_new_tokens=row.info.get("max_new_tokens", 0),
            turns=row.info.get("turns"),
            step=step,
            group=group,
        )
        for row_id, row, response, answer, group in zip(
            row_ids, rows, responses, ids, numbers, strict=True
        )
    ]


def _texts(tokenizer: Any, rows: Sequence[Row], ids: Sequence[list[int]]) -> list[str]:
    """What the rows' responses (their ids) say. Decoded once: rewards and records both ask."""
    new = [i for i, row in enumerate(rows) if row.text is None]
    if new:
        said = tokenizer.batch_decode([ids[i] for i in new], skip_special_tokens=True)
        for i, text in zip(new, said, strict=True):
            rows[i].text = text
    return [row.text or "" for row in rows]


def grade(
    worker: Worker,
    *,
    rows: Tensor,
    fn: dict,
    options: dict,
    name: str = "",
    step: int = 0,
    groups: Tensor | None = None,
    allowed: int | None = None,
    turn: int = -1,
) -> dict[str, Any]:
    """Run a reward function over rows. Scores: float64 [R], NaN for None and for failed processes.

    name: the reward's, for rows that say which rewards count. groups: of a reward over whole groups, int64 [R].
    allowed: how many of all ranks' rows may fail; this rank alone stops at more.
    turn: of conversations, the one that is graded.
    """
    from fsdprl.grading import Grader  # heavy only when rewards are used

    wanted = RewardOptions(**options)
    if worker.grader is None or worker.state.get("reward_options") != wanted:
        if worker.grader is not None:
            worker.grader.close()
        worker.grader, worker.state["reward_options"] = Grader(wanted, debug=worker.debug), wanted
    numbers = None if groups is None else groups.tolist()
    samples = samples_of(worker, rows.tolist(), tokens=True, step=step, groups=numbers, turn=turn)
    counts = [worker.store.rows[sample.row].info.get("rewards") for sample in samples]
    wanted_here = [i for i, listed in enumerate(counts) if not (name and listed) or name in listed]
    some = [samples[index] for index in wanted_here]
    graded = worker.grader.grade(FunctionRef(**fn), some, worker.progress, allowed=allowed)
    scores = torch.full((len(samples),), float("nan"), dtype=torch.float64)
    for index, score in zip(wanted_here, graded.scores, strict=True):
        scores[index] = float("nan") if score is None else score
    failed = [(wanted_here[failure.index], failure.cause) for failure in graded.failures]
    for index, extra in graded.extras.items():
        info = worker.store.rows[some[index].row].info
        info["extra"] = info.get("extra", {}) | extra
    return {"scores": scores, "failed": failed, "metrics": graded.metrics}


def peek(worker: Worker, *, rows: Tensor) -> list[dict[str, Any]]:
    """Samples as dicts, for people to read."""
    fields = ("prompt", "response", "answer", "length", "truncated", "row")
    return [
        {name: getattr(sample, name) for name in fields}
        for sample in samples_of(worker, rows.tolist())
    ]


def write_completions(
    worker: Worker, *, rows: Tensor, path: str, step: int, samples: dict[str, Tensor]
) -> None:
    """Append one JSON line a row to this rank's own shard of the completions folder.

    Raises UserError where the disk refuses: a resumed run cuts off what was half written.
    """
    columns = {name: values.tolist() for name, values in samples.items()}
    lines = []
    for i, sample in enumerate(samples_of(worker, rows.tolist())):
        line: dict[str, Any] = {
            "step": step,
            "prompt": sample.prompt,
            "response": sample.response,
            "answer": sample.answer,
        }
        if sample.turns:
            line["turns"] = sample.turns
        line |= worker.store.rows[sample.row].info.get("extra", {})
        line |= {name: values[i] for name, values in columns.items()}
        # a reward that does not apply is NaN, which becomes null
        lines.append(msgspec.json.encode(line, enc_hook=str).decode() + "\n")
    # All at once: one look for what is secret, however many rows.
    text = redacted("".join(lines), prose=True)
    file = Path(path) / f"rank-{worker.world.rank:05d}.jsonl"
    try:
        ferry.deliver(worker, file, text.encode(), append=True)
    except OSError as error:
        raise UserError(
            f"writing {file}: {error.strerror or error}. Free space (or mend the folder) and give the same command "
            f"again: it continues from the last checkpoint"
        ) from error


VERBS: dict[str, Callable[..., Any]] = {
    "rows.apply": apply,
    "rows.reduce": reduce,
    "rows.row_sum": row_sum,
    "rows.digits": digits,
    "rows.turns": turns,
    "rows.of_turns": of_turns,
    "rows.exchange": exchange,
    "rows.free": free,
    "rows.grade": grade,
    "rows.peek": peek,
    "rows.write_completions": write_completions,
}
