"""How ranks share the cores of a machine."""

import os

import pytest
import torch

from fsdprl import device


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that torch is told, on four cores of which it uses four."""
    told: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    return told


@pytest.mark.parametrize(
    ("variable", "ranks", "told"),
    [
        (None, 1, []),  # already: MKL keeps its choice of fewer for small matrices
        (None, 2, [2]),
        (None, 8, [1]),
        ("1", 2, [2]),  # torchrun's, not the user's
        ("1", 1, []),
        ("3", 2, []),
    ],
)
def test_threads(
    variable: str | None,
    ranks: int,
    told: list[int],
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    device.set_threads(ranks)
    assert asked == told
