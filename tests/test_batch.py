"""Batch on the controller: columns, selection, placement, reductions, freeing, over 1 to 4 pretended ranks."""

import gc
from functools import partial

import pytest
import torch

from fsdprl.batch import Batch, Lease
from fsdprl.errors import UserError
from tests import fake

PROMPT = [3, 3, 5, 5, 2, 2, 7, 7]
RESPONSE = [4, 9, 1, 30, 2, 2, 12, 0]


@pytest.fixture(params=[1, 2, 4])
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    controller = fake.install(monkeypatch, request.param)
    return controller, controller.batch(PROMPT, RESPONSE, [i % request.param for i in range(8)])


def doubled(logp_sampler, bonus, segment, *, factor: float):
    return factor * logp_sampler + bonus + 0 * segment


def two_columns(ids, logp_sampler):
    return {"copy": logp_sampler, "token": ids.float()}


def test_columns_selection_and_concat(setup):
    _, batch = setup
    batch["reward"] = torch.arange(8)
    assert (
        batch["reward"].tolist() == list(range(8))
        and batch["unit"].tolist() == batch.row_ids.tolist()
    )
    odd = batch[batch["reward"] % 2 == 1]
    assert odd["reward"].tolist() == [1, 3, 5, 7] and odd[torch.tensor([2, 0])][
        "reward"
    ].tolist() == [5, 1]
    assert odd[1:3]["length"].tolist() == [30, 2]
    both = Batch.concat([odd, batch[batch["reward"] == 0]])
    assert both["reward"].tolist() == [1, 3, 5, 7, 0]
    assert both.ranks.tolist() == [batch.ranks[i].item() for i in (1, 3, 5, 7, 0)]
    with pytest.raises(UserError, match=r"no sample column 'advantage'; it has .*reward"):
        batch["advantage"]
    with pytest.raises(UserError, match=r"shape \(3,\); this batch has 8 rows"):
        batch["x"] = torch.zeros(3)
    with pytest.raises(UserError, match="a mask over this batch"):
        batch[torch.ones(3, dtype=torch.bool)]


def test_concat_keeps_the_order_of_columns(setup):
    """As files show it: a set's order would be another one in every process."""
    _, batch = setup
    for name in ("z", "reward", "a", "m_rewards", "b", "q"):
        batch[name] = 0.0
    assert list(Batch.concat([batch, batch]).columns) == list(batch.columns)


def test_apply_reduce_and_row_sum_match_one_table(setup):
    controller, batch = setup
    batch["bonus"] = torch.arange(8.0)
    batch.apply(partial(doubled, factor=2.0), out="x")
    rows = [
        controller.workers[r].store.rows[i]
        for r, i in zip(batch.ranks.tolist(), batch.row_ids.tolist(), strict=True)
    ]
    expected = [
        2.0 * row.columns["logp_sampler"].double() + bonus for bonus, row in enumerate(rows)
    ]
    assert torch.allclose(batch.row_sum("x"), torch.stack([e.sum() for e in expected]), atol=1e-5)
    everything = torch.cat(expected)
    total = batch.reduce("x")
    assert total.count == sum(RESPONSE) == total.weight
    assert total.mean == pytest.approx(float(everything.mean())) and total.var == pytest.approx(
        float(everything.var()), rel=1e-5
    )
    assert total.min == pytest.approx(float(everything.min())) and total.max == pytest.approx(
        float(everything.max())
    )
    batch["keep"] = torch.tensor([0.0, 2.0, 0, 0, 0, 0, 0, 0])
    some = batch.reduce("x", weight="keep")
    assert some.count == 9 and some.mean == pytest.approx(float(expected[1].mean()), rel=1e-5)


def test_apply_takes_ids_and_several_outputs_and_names_missing_columns(setup):
    controller, batch = setup
    batch.apply(two_columns, out=["copy", "token"])
    row = controller.workers[int(batch.ranks[3])].store.rows[int(batch.row_ids[3])]
    assert torch.equal(row.columns["token"], row.ids[5:].float())
    assert batch.token_columns == {"logp_sampler", "copy", "token"}
    with pytest.raises(UserError, match="asks for column 'bonus'"):
        batch.apply(partial(doubled, factor=1.0), out="x")
    with pytest.raises(UserError, match="no token column 'nope'"):
        batch.reduce("nope")


def test_rebalance_moves_placement_and_not_order(setup):
    controller, batch = setup
    batch["unit"] = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    before = {int(i): batch.row_sum("logp_sampler")[k].item() for k, i in enumerate(batch.row_ids)}
    ids = batch.row_ids.tolist()
    parent = batch[torch.arange(8)]
    batch.rebalance(2, seed=5)
    assert batch.row_ids.tolist() == ids
    for rank, worker in enumerate(controller.workers):
        assert sorted(worker.store.rows) == sorted(batch.row_ids[batch.ranks == rank].tolist())
    ranks = batch.ranks
    assert torch.equal(ranks[0::2], ranks[1::2])  # units stay together
    assert parent.ranks.tolist() == ranks.tolist()  # every batch that shares the rows sees the move
    after = batch.row_sum("logp_sampler")
    assert [before[int(i)] for i in batch.row_ids] == after.tolist()
    for minibatch in batch.minibatches(2, seed=5):
        assert len(minibatch) == 4
        if controller.world_size == 2:
            assert sorted(minibatch.ranks.tolist()) == [0, 0, 1, 1]  # every cell is even


def test_minibatches_cover_all_rows_once_in_whole_units(setup):
    _, batch = setup
    batch["unit"] = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    parts = list(batch.minibatches(3, seed=1))
    assert sorted(i for part in parts for i in part.row_ids.tolist()) == batch.row_ids.tolist()
    units = [set(part["unit"].tolist()) for part in parts]
    assert sum(map(len, units)) == 4
    assert list(batch[torch.zeros(8, dtype=torch.bool)].minibatches(3)) == []


def test_microbatches_respect_budget_and_are_as_many_on_every_rank(setup):
    controller, batch = setup
    batch["unit"] = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    positions = batch.by_rank()
    plans = batch.microbatches(positions, 20)
    counts = {int(plan["microbatches"]) for plan in plans}
    assert len(counts) == 1 and len(plans) == controller.world_size
    most = 0
    for where, plan in zip(positions, plans, strict=True):
        number = plan["microbatch"]
        assert number.shape == where.shape
        most = max(most, int(number.max()) + 1)
        for k in range(int(plan["microbatches"])):
            rows = where[number == k]
            units = set(batch["unit"][rows].tolist())
            assert int(batch["tokens"][rows].sum()) <= 20 or len(units) == 1
            for unit in units:  # whole units: none of their rows on this rank runs elsewhere
                assert int((batch["unit"][where] == unit).sum()) == int(
                    (batch["unit"][rows] == unit).sum()
                )
    assert counts == {most}  # no more than the fullest rank needs


def test_summary_uses_metric_names(setup):
    _, batch = setup
    batch["truncated"] = batch["length"] > 5
    summary = batch.summary("length", "truncated")
    assert summary == {
        "response_length/mean": 7.5,
        "response_length/min": 0.0,
        "response_length/max": 30.0,
        "response_length/truncated": 0.375,
    }


def test_lease_gone_means_rows_gone(monkeypatch: pytest.MonkeyPatch):
    controller = fake.install(monkeypatch, 2)
    batch = controller.batch([2, 2], [3, 3], [0, 1])
    other = controller.batch([2], [3], [1])
    part = batch[:1]
    del batch
    gc.collect()
    Lease.flush()
    assert [len(w.store) for w in controller.workers] == [1, 2]
    del part
    gc.collect()
    Lease.flush()
    assert [len(w.store) for w in controller.workers] == [0, 1] and len(other) == 1


def test_a_part_holds_only_the_rows_that_it_names(monkeypatch: pytest.MonkeyPatch):
    controller = fake.install(monkeypatch, 1)
    goes_on = controller.batch([2], [3], [0])
    for _ in range(5):  # a row that stays, step after step, beside others that do not
        new = controller.batch([2, 2], [3, 3], [0, 0])
        goes_on = Batch.concat([goes_on, new])[:1]
        del new
    Lease.flush()
    assert len(goes_on.leases) == 1 and list(controller.workers[0].store.rows) == [
        int(goes_on.row_ids[0])
    ]
