"""Rows from data processes: the order of (seed, step), whatever their number, from any step on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from fsdprl.data import order
from fsdprl.data.example_rows import ExampleFormat
from fsdprl.data.feed import Course, Feed
from fsdprl.data.rows import fingerprint
from fsdprl.data.sources import open_source
from tests import warm

ROWS, COUNT = 23, 6


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    warm.context()  # the same server as other tests': a process has one
    path = tmp_path_factory.mktemp("feed") / "texts.jsonl"
    lines = [{"prompt": f"say {i}", "completion": "x" * (1 + i % 5)} for i in range(ROWS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = ExampleFormat(
        path=str(path), tokenizer_path=str(tiny.checkpoint("qwen3")), max_length=99
    )
    return dataclasses.asdict(dataclasses.replace(made, fingerprint=fingerprint(str(path))))


def course(**other: Any) -> Course:
    tokens = np.arange(ROWS, dtype=np.int32) % 7 + 10
    fields = {"kept": np.arange(ROWS, dtype=np.int64), "tokens": tokens, "seed": 4, "count": COUNT}
    return Course(**fields | other)


def test_ranks_share_the_rows_of_every_step():
    for step in range(8):
        rows = course().rows(step)
        assert rows.tolist() == order.window(ROWS, 4, step * COUNT, COUNT).tolist()
        for ranks in (1, 2, 3):
            parts = [course().of_rank(step, rank, ranks) for rank in range(ranks)]
            assert sorted(row for part in parts for row in part) == sorted(rows.tolist())
    pairs = course(kept=np.arange(11, dtype=np.int64), per=2)
    for step in range(4):
        both = [pairs.of_rank(step, rank, 2) for rank in range(2)]
        assert sum(map(len, both)) == 2 * COUNT
        assert all(part[1::2] == [row + 1 for row in part[::2]] for part in both)  # pairs are whole


def fed(
    form: dict[str, Any], workers: int, first: int, last: int, rank: int = 0, ranks: int = 1
) -> list[Any]:
    feed = Feed(form, course(), rank=rank, ranks=ranks, workers=workers, flag="--data", step=first)
    return [feed.take(step) for step in range(first, last)]


def test_any_number_of_processes_gives_the_same_rows_from_any_step_on(form: dict[str, Any]):
    source = open_source(ExampleFormat(**form))
    one, three = fed(form, 1, 0, 9), fed(form, 3, 0, 9)
    for step, (a, b) in enumerate(zip(one, three, strict=True)):
        wanted = course().rows(step).tolist()
        assert [number for number, _ in a] == [number for number, _ in b] == wanted
        for row, here, there in zip(source.rows(wanted), a, b, strict=True):
            assert row.ids.tolist() == here[1].ids.tolist() == there[1].ids.tolist()
            assert row.mask.tolist() == here[1].mask.tolist()
    later = fed(form, 2, 5, 9, rank=1, ranks=2)  # in the middle of the second pass
    assert [[n for n, _ in batch] for batch in later] == [
        course().of_rank(s, 1, 2) for s in range(5, 9)
    ]


def test_a_feed_refuses_another_step(form: dict[str, Any]):
    feed = Feed(form, course(), rank=0, ranks=1, workers=1, flag="--data", step=2)
    with pytest.raises(ValueError, match="stands at step 2, not 3"):
        feed.take(3)


def test_the_loaders_own_state_is_the_step(form: dict[str, Any], tmp_path: Path):
    """torchdata's state of a loader with processes, put into a new one: it goes on where the old one stood."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def made() -> Feed:
        return Feed(form, course(), rank=0, ranks=1, workers=1, flag="--data", step=0)

    old = made()
    for step in range(4):
        old.take(step)
    state = old.loader.state_dict()
    assert isinstance(old.loader, StatefulDataLoader)
    new = made()
    new.loader.load_state_dict(state)
    assert [n for n, _ in next(iter(new.loader))] == course().rows(4).tolist()
