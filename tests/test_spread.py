"""Quantiles over ranks against torch's over one table, and the mask that is made of one."""

import math

import pytest
import torch

import fsdprl as rl
from fsdprl.controller import current
from fsdprl.errors import UserError
from fsdprl.rows import sortable
from tests import fake

LENGTHS = [4, 9, 1, 30, 2, 2, 12, 0]


def batch_of(monkeypatch: pytest.MonkeyPatch, ranks: int, kind: str):
    """Rows of tokens on some ranks, and all values of their column "entropy" in one table."""
    controller = fake.install(monkeypatch, ranks)
    batch = controller.batch([2] * len(LENGTHS), LENGTHS, [i % ranks for i in range(len(LENGTHS))])
    table = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(3))
    if kind == "ties":
        table = (table * 2).round()  # zeros of both signs among them
    if kind == "far apart":
        table = table.sign() * (table * 30).exp()
    parts = dict(zip(batch.row_ids.tolist(), table.split(LENGTHS), strict=True))
    for worker in controller.workers:
        for row, stored in worker.store.rows.items():
            stored.columns["entropy"] = parts[row].clone()
    batch.token_columns.add("entropy")
    return batch, table


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "ties", "far apart"])
def test_any_share_is_that_of_one_table(monkeypatch: pytest.MonkeyPatch, ranks: int, kind: str):
    batch, table = batch_of(monkeypatch, ranks, kind)
    ordered = table.sort().values
    for share in (0.0, 0.1, 0.25, 0.5, 0.8, 0.999, 1.0):
        place = math.ceil(round(share * (len(table) - 1), 6))
        assert rl.quantile(batch, "entropy", share) == float(ordered[place]), share
    between = float(table.quantile(0.8))  # as TRL takes it: what reaches it is the same
    assert torch.equal(table >= rl.quantile(batch, "entropy", 0.8), table >= between)


def test_bits_are_in_the_order_of_the_values():
    values = torch.tensor([-math.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.5, math.inf])
    keys = sortable(values).tolist()
    assert keys == sorted(keys) and len(set(keys)) == len(keys)


def test_no_token_has_no_quantile(monkeypatch: pytest.MonkeyPatch):
    batch, _ = batch_of(monkeypatch, 2, "plain")
    assert math.isnan(rl.quantile(batch[7:], "entropy", 0.5))
    with pytest.raises(UserError, match=r"must be from 0 to 1"):
        rl.quantile(batch, "entropy", 80)
    with pytest.raises(UserError, match="nope"):
        rl.quantile(batch, "nope", 0.5)


def test_forking_tokens_keep_their_advantage():
    base, entropy = torch.tensor([1.0, -1.0, 2.0, 2.0]), torch.tensor([0.1, 0.7, 0.5, 0.2])
    assert rl.advantages.forking(base, entropy, threshold=0.5).tolist() == [0.0, -1.0, 2.0, 0.0]


def scaled(entropy: torch.Tensor) -> torch.Tensor:
    return 3 * entropy + 7


@pytest.mark.parametrize("ranks", [1, 3])
def test_whitened_over_all_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int):
    batch, table = batch_of(monkeypatch, ranks, "plain")
    batch.apply(scaled, out="advantage")
    rl.whiten(batch)
    wanted = dict(
        zip(
            batch.row_ids.tolist(),
            ((table - table.mean()) / table.std()).split(LENGTHS),
            strict=True,
        )
    )
    for worker in current().workers:
        for row, stored in worker.store.rows.items():
            torch.testing.assert_close(
                stored.columns["advantage"], wanted[row], rtol=1e-5, atol=1e-5
            )
