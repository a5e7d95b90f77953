"""Who listens is told what a rank is about to do, and nothing happens to who does not."""

import pytest

from fsdprl import moments


def test_listeners_are_told_in_turn(monkeypatch: pytest.MonkeyPatch):
    met: list[tuple] = []
    listeners = [lambda m: met.append(("first", m)), lambda m: met.append(("second", m))]
    monkeypatch.setattr(moments, "listeners", listeners)
    moments.reached("model.save", rank=1, step=7, payload={"out": "x"})
    (first, moment), (second, same) = met
    assert (first, second) == ("first", "second") and same == moment
    assert (moment.name, moment.rank, moment.step) == ("model.save", 1, 7)
    assert moment.facts == {"payload": {"out": "x"}}


def test_nobody_listens_unless_told():
    assert moments.listeners == []
