"""Values that are not finite: which rows are blamed, and how many updates may be left out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdprl import controller as controller_module
from fsdprl.controller import Timeline
from fsdprl.endings import describe
from fsdprl.errors import NonFiniteError
from fsdprl.learn import nonfinite_rows
from fsdprl.losses import RowLoss
from fsdprl.policy import Policy

NAN, INF = float("nan"), float("inf")


def test_the_rows_of_a_token_loss():
    segment, weight = torch.tensor([0, 0, 1, 2]), torch.ones(4)
    loss = torch.tensor([1.0, 2.0, NAN, INF])
    assert nonfinite_rows((loss, {}), weight, segment, {}, [17, 21, 5]) == [21, 5]
    weight[0] = NAN  # a weight counts as well
    assert nonfinite_rows((loss, {}), weight, segment, {}, [17, 21, 5]) == [17, 21, 5]


def test_the_rows_of_a_row_loss():
    samples = {"weight": torch.ones(3, dtype=torch.float64)}
    loss = RowLoss(torch.tensor([1.0, -INF]))  # the last row has no loss token
    assert nonfinite_rows(loss, torch.ones(3), torch.tensor([0, 1, 1]), samples, [4, 9, 2]) == [9]


class Ranks:
    """A controller whose ranks answer an update as told."""

    def __init__(self, may_skip: int, **reply: Any) -> None:
        self.step, self.skipped, self.may_skip = 4, 0, may_skip
        self.timeline = Timeline()
        self.phases = SimpleNamespace(train=lambda *_, **__: None)
        self.reply, self.called = reply, []

    def call(self, verb: str, payload: Any, **_: Any) -> Any:
        self.called.append(verb)
        return SimpleNamespace(wait=lambda: [self.reply])


def update(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, nonfinite: tuple[int, ...] = ()) -> Any:
    monkeypatch.setattr(controller_module, "_current", ranks)
    policy: Any = Policy.__new__(Policy)
    policy.name, policy.learnt = "policy", [torch.tensor([12, 3]), torch.tensor([7])]
    policy.nonfinite = list(nonfinite)
    return policy.optim_step(lr=0.5)


def test_the_first_one_stops_the_run(monkeypatch: pytest.MonkeyPatch):
    ranks = Ranks(0, fault="the gradient norm is nan")
    told = (
        r"step 4, update of policy, rows 3, 7, 12: the gradient norm is nan; --run.skip-nonfinite"
    )
    with pytest.raises(NonFiniteError, match=told) as raised:
        update(ranks, monkeypatch)
    code, text, cause = describe(raised.value, Path("grpo.py"))
    assert (code, cause["kind"], cause["phase"]) == (1, "nonfinite", "update")
    assert text.startswith("fsdprl: step 4")


def test_a_bounded_number_is_left_out_counted_and_said_once(monkeypatch, capsys):
    ranks = Ranks(2, fault="the gradient norm is nan")
    for _ in range(2):
        assert update(ranks, monkeypatch) == {"actor/lr": 0.5}
    assert capsys.readouterr().err.count("left out, further ones are counted") == 1
    assert ranks.timeline.drain()[1] == {"actor/skipped_updates": 2.0}
    with pytest.raises(NonFiniteError, match=r"one more than --run.skip-nonfinite 2 allows"):
        update(ranks, monkeypatch)


def test_a_loss_that_is_not_finite_never_reaches_the_optimizer(monkeypatch):
    ranks = Ranks(1, grad_norm=1.0)
    assert update(ranks, monkeypatch, nonfinite=(7,)) == {"actor/lr": 0.5}
    assert ranks.called == ["model.drop_gradient"]
    assert update(ranks, monkeypatch) == {"actor/grad_norm": 1.0, "actor/lr": 0.5}
