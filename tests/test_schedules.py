"""Learning-rate factors by hand."""

import math

import pytest

from fsdprl.schedules import constant, cosine, linear


def test_constant():
    assert [constant(s, warmup=4) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert constant(0) == 1.0


def test_linear():
    factors = [linear(s, total=6, warmup=2) for s in range(8)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert linear(4, total=6, warmup=2, floor=0.2) == pytest.approx(0.6)
    assert linear(60, total=6, floor=0.2) == pytest.approx(0.2)


def test_cosine():
    factors = [cosine(s, total=6, warmup=2) for s in range(7)]
    quarter = 0.5 * (1 + math.sqrt(0.5))
    assert factors == pytest.approx([0.5, 1.0, 1.0, quarter, 0.5, 1 - quarter, 0.0])
    assert cosine(6, total=6, warmup=2, floor=0.1) == pytest.approx(0.1)


def test_every_step_moves_the_weights():
    for total, warmup in ((1, 0), (3, 3), (10, 0), (10, 9), (2, 5)):
        for schedule in (linear, cosine):
            factors = [schedule(s, total=total, warmup=warmup) for s in range(total)]
            assert all(0 < f <= 1 for f in factors), (schedule, total, warmup, factors)
