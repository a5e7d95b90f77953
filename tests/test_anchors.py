"""Advantages of turns: worked values, on conversations spread over ranks."""

import pytest
import torch

from fsdprl.anchors import anchored_advantages, turn_values
from fsdprl.batch import Batch, Lease
from fsdprl.controller import current
from fsdprl.store import Row
from tests import fake

SAID, HEARD = 30, 40
TALKS = [[2, "a", 1], [1, "a", 2], [2, "b", 1, "a", 1], [3], [1, "a", 2], [2]]
"""Lengths of the model's turns and, between them, what the environment says. Four of one group, two of another."""
GROUP = torch.tensor([8, 8, 8, 8, 9, 9])
REWARD = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
WORDS = {"a": [HEARD, HEARD + 1], "b": [HEARD + 2]}


def conversation(turns: list) -> Row:
    ids, mask = [5, 6], [False, False]
    for turn in turns:
        part = [SAID] * turn if isinstance(turn, int) else WORDS[turn]
        ids, mask = ids + part, mask + [isinstance(turn, int)] * len(part)
    info = {"prompt": "p", "prompt_length": 2}
    return Row(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask), info)


def batch_of(monkeypatch: pytest.MonkeyPatch, ranks: int) -> Batch:
    workers = fake.install(monkeypatch, ranks).workers
    where = torch.arange(len(TALKS)) % ranks
    lease = Lease(where)
    for i, talk in enumerate(TALKS):
        workers[int(where[i])].store.put(lease.start + i, conversation(talk))
    return Batch.of(lease, {"group": GROUP, "reward": REWARD})


def advantages(batch: Batch) -> list[list[float]]:
    """Of each conversation's loss tokens."""
    rows = {i: row for worker in current().workers for i, row in worker.store.rows.items()}  # type: ignore[attr-defined]
    return [rows[int(i)].columns["advantage"].tolist() for i in batch.row_ids]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_by_hand(monkeypatch: pytest.MonkeyPatch, ranks: int):
    """gamma 1/2, centred only. Group 8: mean reward 1/2. First turns return 1/2, 0, 1/4, 0: mean 3/16. Second turns
    after a: 1 and 0 of the first two, and the third's last turn 1: mean 2/3. After b: alone. Group 9: its own."""
    batch = batch_of(monkeypatch, ranks)
    found = anchored_advantages(batch, gamma=0.5, weight=2.0, scale=False)
    first = [2 * (x - 3 / 16) for x in (1 / 2, 0, 1 / 4, 0)]
    after = [2 * (x - 2 / 3) for x in (1, 0, 1)]
    expected = [
        [0.5 + first[0]] * 2 + [0.5 + after[0]],
        [-0.5 + first[1]] + [-0.5 + after[1]] * 2,
        [0.5 + first[2]] * 2 + [0.5] + [0.5 + after[2]],
        [-0.5 + first[3]] * 3,
        [0.5 + 2 * 0.25] + [0.5] * 2,
        [-0.5 - 2 * 0.25] * 2,
    ]
    assert advantages(batch) == [pytest.approx(values) for values in expected]
    assert found == {"turns/shared": pytest.approx(9 / 11)}
    assert batch.token_columns >= {"advantage"}


def test_scaled_by_the_deviations_of_both_kinds_of_groups():
    """Returns of a shared anchor are 1 and 0: their unbiased deviation is 1 / sqrt(2), as is the rewards'."""
    anchors = torch.tensor([[1, 0], [1, 0], [1, 7]])
    value, shared = turn_values(
        REWARD[:2],
        GROUP[:2],
        torch.tensor([0, 1, 1]),
        torch.tensor([0, 0, 0]),
        anchors,
        0.9,
        1.0,
        True,
    )
    one = 0.5 / (0.5**0.5 + 1e-4)
    assert value.tolist() == pytest.approx([2 * one, -2 * one, -one])
    assert shared.tolist() == [True, True, False]


def test_no_rows_and_answers_without_a_token(monkeypatch: pytest.MonkeyPatch):
    batch = batch_of(monkeypatch, 2)
    assert anchored_advantages(batch[[]]) == {}
    worker = current().workers[0]  # type: ignore[attr-defined]
    worker.store.put(int(batch.row_ids[0]), conversation([]))
    anchored_advantages(batch)
    assert advantages(batch)[0] == [] and len(advantages(batch)[2]) == 4
