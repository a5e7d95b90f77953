"""Dynamic sampling: which prompts are asked, what is kept, and that a resumed run goes on with the same rows."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import fake
import pytest
import torch

from fsdprl import row_files, rows
from fsdprl.batch import Batch, Lease
from fsdprl.errors import UserError
from fsdprl.resampling import GroupPool

G = 2


class Prompts:
    """Ten prompts, taken in order."""

    def __len__(self) -> int:
        return 10

    def take(self, cursor: int, count: int) -> list[Any]:
        return [SimpleNamespace(index=(cursor + i) % 10) for i in range(count)]


def pool(per_round: int = 3, splits: int = 1) -> GroupPool:
    prompts: Any = Prompts()
    return GroupPool(prompts, group_size=G, per_round=per_round, splits=splits)


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake.install(monkeypatch, 2)


def sample(controller: Any, prompts: list[Any]) -> Batch:
    """Two answers a prompt, of as many tokens as the prompt's number and one."""
    lengths = [p.index + 1 for p in prompts for _ in range(G)]
    ranks = [i // G % controller.world_size for i in range(len(lengths))]
    batch = controller.batch([4] * len(lengths), lengths, ranks)
    batch["prompt"] = torch.tensor([p.index for p in prompts]).repeat_interleave(G)
    batch["reward"] = torch.arange(len(batch)) / 3
    return batch


def even(batch: Batch) -> Batch:
    return batch[batch["prompt"] % 2 == 0]


def test_rounds_go_on_until_there_are_enough_groups(controller: Any):
    p, asked = pool(), []
    for prompts in p.rounds(4):
        asked.append([prompt.index for prompt in prompts])
        p.add(even(sample(controller, prompts)))
    assert asked == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] and p.cursor == 9 and len(p) == 5
    fresh = p.fresh()
    assert fresh["prompt"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    fresh.token_columns.add("logp_old")  # what policy.logprobs does
    batch = p.take(4)
    assert (
        batch["prompt"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6] and "logp_old" in batch.token_columns
    )
    expected = {
        "train/filtered_share": 1 - 5 / 9,
        "train/num_gen_batches": 3.0,
        "train/carried_groups": 1.0,
    }
    assert p.metrics() == pytest.approx(expected)
    # The next step begins with what was carried over, and samples on from the cursor.
    for prompts in p.rounds(2):
        assert [prompt.index for prompt in prompts] == [9, 0, 1]
        p.add(even(sample(controller, prompts)))
    assert p.fresh()["prompt"].tolist() == [0, 0] and p.take(2)["prompt"].tolist() == [8, 8, 0, 0]
    assert len(p) == 0 and p.metrics()["train/carried_groups"] == 0


def test_enough_groups_at_hand_need_no_round(controller: Any):
    p = pool(5)
    for prompts in p.rounds(1):
        p.add(sample(controller, prompts))
    assert len(p.take(1)) == G and len(p) == 4
    assert list(p.rounds(4)) == [] and p.metrics()["train/num_gen_batches"] == 0
    assert len(p.fresh()) == 0 and len(p.take(4)) == 8


def test_endings(controller: Any):
    p = pool()
    for prompts in p.rounds(4, most=2):
        p.add(even(sample(controller, prompts))[:G])
    assert len(p) == 2 and p.cursor == 6
    with pytest.raises(UserError, match=r"--max-rounds: only 2 of 4 groups .*--when-short train"):
        p.take(4)
    assert len(p.take(4, short="train")) == 2 * G
    assert len(pool().take(4, short="train")) == 0
    endless = pool()
    with pytest.raises(UserError, match="not one of 12 prompts, a whole pass over --data"):
        for _ in endless.rounds(1):
            pass
    lucky = pool()  # one group in every pass: rare, but it goes on
    for number, prompts in enumerate(lucky.rounds(3)):
        assert number < 15
        if number % 4 == 3:
            lucky.add(sample(controller, prompts[:1]))
    assert len(lucky) == 3


def test_settings_that_make_no_sense():
    prompts: Any = Prompts()
    with pytest.raises(UserError, match="--group-size 1"):
        GroupPool(prompts, group_size=1, per_round=3)
    with pytest.raises(UserError, match="--rollout-splits 0"):
        GroupPool(prompts, group_size=2, per_round=3, splits=0)
    for per_round in (-1, 11):
        with pytest.raises(UserError, match=f"--prompts-per-round {per_round}"):
            GroupPool(prompts, group_size=2, per_round=per_round)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resumed_pool_has_the_same_rows(
    tmp_path, monkeypatch: pytest.MonkeyPatch, controller: Any, ranks: int
):
    controller.verbs = {**rows.VERBS, **row_files.VERBS}
    p = pool(5)
    for prompts in p.rounds(1):
        p.add(sample(controller, prompts))
    fresh = p.fresh()
    fresh.apply(doubled, out="logp_old")
    fresh["unit"] = 7 + fresh.row_ids[::G].repeat_interleave(G)  # units of two rows
    p.take(2)
    assert p.carried is not None and len(p.carried) == 6
    p.save(tmp_path)
    expected = dump(p.carried, controller)

    later = fake.install(monkeypatch, ranks)
    later.verbs = {**rows.VERBS, **row_files.VERBS}
    Lease(torch.zeros(7, dtype=torch.int64))  # ids of the new process stand elsewhere
    resumed = pool(5)
    resumed.load(tmp_path)
    assert resumed.cursor == p.cursor == 5 and resumed.carried is not None
    assert dump(resumed.carried, later) == expected
    assert resumed.carried.token_columns == {"logp_sampler", "logp_old"}
    units = resumed.carried["unit"].tolist()
    assert units == [resumed.carried.row_ids[i // G * G].item() for i in range(6)]
    assert {int(rank) for rank in resumed.carried.ranks} <= set(range(ranks))
    assert [len(worker.store.rows) for worker in later.workers] == [
        int((resumed.carried.ranks == rank).sum()) for rank in range(ranks)
    ]
    # Nothing carried: only the cursor is saved.
    resumed.take(3)
    (tmp_path / "later").mkdir()
    resumed.save(tmp_path / "later")
    last = pool(5)
    last.load(tmp_path / "later")
    assert (
        last.cursor == 5 and last.carried is None and len(list((tmp_path / "later").iterdir())) == 1
    )


def test_a_step_that_took_nothing_keeps_its_groups(
    tmp_path, monkeypatch: pytest.MonkeyPatch, controller: Any
):
    """A recipe may leave a step out for want of groups; what it has is still new, and without `logp_old`."""
    controller.verbs = {**rows.VERBS, **row_files.VERBS}
    p = pool(5)
    for prompts in p.rounds(1):
        p.add(sample(controller, prompts))
    p.fresh().apply(doubled, out="logp_old")
    p.take(2)
    for prompts in p.rounds(6):
        p.add(sample(controller, prompts))
    assert p.carried is not None
    p.save(tmp_path)
    expected = dump(p.carried, controller), dump(p.fresh(), controller)

    later = fake.install(monkeypatch, 2)
    later.verbs = {**rows.VERBS, **row_files.VERBS}
    resumed = pool(5)
    resumed.load(tmp_path)
    assert resumed.carried is not None and (resumed.cursor, len(resumed)) == (10, 8)
    assert (dump(resumed.carried, later), dump(resumed.fresh(), later)) == expected
    assert resumed.fresh().token_columns == {"logp_sampler"}


def test_a_full_disk_is_told_and_the_pool_saved_later(tmp_path, controller: Any):
    """A verb that raises would end the job."""
    controller.verbs = {**rows.VERBS, **row_files.VERBS}
    p = pool(5)
    for prompts in p.rounds(1):
        p.add(sample(controller, prompts))
    p.take(2)
    (tmp_path / "rank-00001.rows").mkdir()  # no file can be written here
    with pytest.raises(OSError, match=r"\(rank 1\)"):
        p.save(tmp_path)
    (tmp_path / "rank-00001.rows").rmdir()
    p.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


# ---- partial rollouts


class Slices:
    """A sampler whose answers to prompt i take i % 4 slices and one; the second of a group takes one only."""

    def __init__(self, controller: Any) -> None:
        self.controller, self.asked, self.step = controller, [], 0

    def slice(self, prompts: list[Any], begun: Batch | None = None, *, n: int, splits: int) -> Any:
        assert n == G and splits == 4
        self.asked.append([p.index for p in prompts])
        parts = []
        if begun is not None:
            begun["slices"] += begun["unfinished"]
            parts.append(begun)
        if prompts:
            new = sample(self.controller, prompts)
            new["slices"] = torch.ones(len(new), dtype=torch.int64)
            new["begun"] = torch.full_like(new["slices"], self.step)
            parts.append(new)
        batch = Batch.concat(parts)
        takes = torch.where(torch.arange(len(batch)) % G == 0, batch["prompt"] % 4 + 1, 1)
        batch["unfinished"] = batch["slices"] < takes
        return batch


def step(p: GroupPool, sampler: Any, want: int, most: int = 0) -> list[list[int]]:
    """A step without a filter: the prompts of the groups that each round completed."""
    found = []
    for prompts in p.rounds(want, most):
        batch = p.generate(sampler, prompts)
        assert not batch["unfinished"].any()
        found.append(batch["prompt"][::G].tolist())
        p.add(batch)
    return found


def test_what_is_unfinished_goes_on_first_and_new_prompts_fill_up(controller: Any):
    p, sampler = pool(4, splits=4), Slices(controller)
    assert step(p, sampler, 3) == [[0], [1, 4]]  # four are under way in each round
    assert sampler.asked == [[0, 1, 2, 3], [4]] and p.cursor == 5
    assert p.take(3)["slices"].tolist() == [1, 1, 2, 1, 1, 1]
    expected = {
        "train/filtered_share": 0.0, "train/num_gen_batches": 2.0, "train/carried_groups": 0.0,
        "partial/continued": 3.0, "partial/waiting": 2.0, "partial/age": 7 / 6,
    }  # fmt: skip
    assert p.metrics() == pytest.approx(expected)
    assert step(p, sampler, 3) == [[2], [3, 5]]
    assert sampler.asked[2:] == [[5, 6], [7]] and p.waiting is not None
    assert p.waiting["prompt"].tolist() == [6, 6, 7, 7] and len(p.take(3)) == 3 * G
    assert step(p, sampler, 3) == [[6, 8], [9, 0]]
    p.take(2)
    assert len(p) == 2
    # Enough groups are at hand: what waits goes on all the same, and nothing new is begun.
    assert step(p, sampler, 1) == [[7, 1]] and sampler.asked[-1] == []
    assert p.metrics()["partial/waiting"] == 0 and len(p) == 4
    assert step(p, sampler, 4) == []


def test_what_waits_comes_to_its_end_before_a_step_is_short(controller: Any):
    p, sampler = pool(3, splits=4), Slices(controller)
    assert step(p, sampler, 9, most=2) == [[0], [1], [2, 4], [], [3, 5]]
    assert sampler.asked == [[0, 1, 2], [3], [4], [5], []] and p.open_groups == 0
    with pytest.raises(UserError, match="--max-rounds: only 6 of 9 groups"):
        p.take(9)
    endless = pool(10, splits=4)  # all prompts are under way at once, and none of them teaches
    with pytest.raises(UserError, match=r"not one of 1[0-9] prompts, a whole pass over --data"):
        for prompts in endless.rounds(1):
            endless.generate(sampler, prompts)  # type: ignore[arg-type]
    assert endless.turns >= 2 and endless.complete >= 10


def test_no_answer_spans_more_steps_than_slices(controller: Any):
    p, sampler = pool(5, splits=4), Slices(controller)
    spans, takes = [], [1, 1, 7, 1, 1, 1, 2, 3, 1, 1, 1, 1]
    for number, want in enumerate(takes):
        sampler.step = number
        for prompts in p.rounds(want):
            batch = p.generate(sampler, prompts)  # type: ignore[arg-type]
            assert p.open_groups <= 5
            spans += (number - batch["begun"]).tolist()
            p.add(batch)
        p.take(want)
    assert max(spans) == 3 and p.cursor > 20


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resumed_pool_has_the_same_rows_waiting(
    tmp_path, monkeypatch: pytest.MonkeyPatch, controller: Any, ranks: int
):
    controller.verbs = {**rows.VERBS, **row_files.VERBS}
    p = pool(4, splits=4)
    step(p, Slices(controller), 2)
    p.take(1)
    assert p.waiting is not None and p.carried is not None
    p.save(tmp_path)
    expected = [dump(p.carried, controller), dump(p.waiting, controller)]
    later = fake.install(monkeypatch, ranks)
    later.verbs = {**rows.VERBS, **row_files.VERBS}
    Lease(torch.zeros(7, dtype=torch.int64))  # ids of the new process stand elsewhere
    resumed = pool(4, splits=4)
    resumed.load(tmp_path)
    assert resumed.carried is not None and resumed.waiting is not None
    assert [dump(resumed.carried, later), dump(resumed.waiting, later)] == expected
    assert resumed.waiting["unfinished"].dtype == torch.bool and resumed.cursor == p.cursor
    goes_on = [step(each, Slices(c), 3) for each, c in ((p, controller), (resumed, later))]
    assert goes_on[0] == goes_on[1]


def doubled(logp_sampler):
    return 2 * logp_sampler


def dump(batch: Batch, controller: Any) -> list[Any]:
    """Everything a batch is, rows with their tokens and columns, without row ids."""
    found = []
    stores = [controller.workers[rank].store for rank in batch.ranks.tolist()]
    for i, (row_id, store) in enumerate(zip(batch.row_ids.tolist(), stores, strict=True)):
        row = store.rows[row_id]
        sample = {name: v[i].item() for name, v in sorted(batch.columns.items()) if name != "unit"}
        tokens = {name: values.tolist() for name, values in sorted(row.columns.items())}
        found.append((sample, row.ids.tolist(), row.mask.tolist(), row.info, tokens))
    assert all(a <= b for a, b in pairwise(batch.row_ids.tolist()))
    return found
