"""What a recipe logs of the gap between trainer and engine, and the token weights it gets against it."""

import math

import pytest
import torch
from torch import Tensor

from fsdprl.batch import Batch
from fsdprl.controller import current
from fsdprl.correcting import FUNCTIONS, USES, correct, mismatch
from fsdprl.errors import UserError
from fsdprl.options import CorrectionOptions
from fsdprl.sampler import warn_of_filters
from tests import fake

RHO = (3.0, 1.0, 0.1, 2.0, 2.0)
"""Of the five loss tokens: three of row 0 on rank 0, two of row 1 on rank 1."""


def drifted(logp_sampler: Tensor, row: Tensor) -> Tensor:
    """Log-probs of a trainer that differs from the engine by RHO. Each rank has one row."""
    rho = RHO[3:] if bool(row[0]) else RHO[:3]
    return logp_sampler + torch.tensor(rho).log()


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    batch = fake.install(monkeypatch, 2).batch([2, 3], [3, 2], [0, 1])
    batch["row"] = torch.tensor([0, 1])
    batch.apply(drifted, out="logp_old")
    return batch


def weights(batch: Batch) -> list[float]:
    found = []
    for worker in current().workers:  # type: ignore[attr-defined]
        for row in worker.store.rows.values():
            found += row.columns["is_weight"].tolist()
    return found


def test_metrics_by_hand(batch: Batch):
    logs = [math.log(rho) for rho in RHO]
    assert mismatch(batch) == pytest.approx(
        {
            "rollout/kl": -sum(logs) / 5,
            "rollout/max_abs_logp_diff": -math.log(0.1),
            "rollout/ess": 8.1**2 / (5 * (9 + 1 + 0.01 + 4 + 4)),
        },
        rel=1e-5,
    )


def test_names_of_ms_swift_by_hand(batch: Batch):
    """Row 0 has gaps ln 3, 0 and ln 0.1, row 1 has ln 2 twice; capped at 2.5, so that one weight of five is cut."""
    theirs = torch.stack([-batch.row_sum("logp_sampler") / torch.tensor([3, 2])])[0].tolist()
    gaps = [-math.log(0.3) / 3, -math.log(2)]
    ours = [log + gap for log, gap in zip(theirs, gaps, strict=True)]
    metrics = correct(batch, CorrectionOptions(kind="tis", cap=2.5))
    kl = -sum(math.log(rho) for rho in RHO) / 5
    expected = {
        "kl": kl,
        "k3_kl": 8.1 / 5 - 1 + kl,
        "chi2_token": 18.01 / 5 - 1,
        "chi2_seq": (0.3 ** (2 / 3) + 4) / 2 - 1,
        "ess": 8.1**2 / (5 * 18.01),
        "is_weight_mean": 7.6 / 5,
        "clipped_frac": 1 / 5,
        "training_log_ppl": sum(ours) / 2,
        "training_ppl": (math.exp(ours[0]) + math.exp(ours[1])) / 2,
        "rollout_log_ppl": sum(theirs) / 2,
        "rollout_ppl": (math.exp(theirs[0]) + math.exp(theirs[1])) / 2,
        "log_ppl_diff": sum(gaps) / 2,
        "log_ppl_abs_diff": (gaps[0] - gaps[1]) / 2,
        "log_ppl_diff_max": gaps[0],
        "log_ppl_diff_min": gaps[1],
        "ppl_ratio": (math.exp(gaps[0]) + 0.5) / 2,
    }
    got = {
        n.partition("/")[2]: v for n, v in metrics.items() if n.startswith("rollout_correction/")
    }
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "bounds", "share"),
    [
        ("tis", {}, 3 / 5),  # the default cap: 3 is cut, and 2 is at it
        ("icepop", {"low": 0.5, "high": 2.5}, 2 / 5),
        ("sequence_tis", {"cap": 3.0}, 2 / 5),  # 0.3 and 4
        ("geometric_mask", {"low": 0.5, "high": 1.0}, 2 / 5),
        ("geometric_mask_tis", {"low": 0.5, "high": 1.0, "cap": 2.5}, 3 / 5),
    ],
)
def test_share_that_a_correction_bounds(batch: Batch, kind, bounds, share):
    metrics = correct(batch, CorrectionOptions(kind=kind, **bounds))
    assert metrics["rollout_correction/clipped_frac"] == pytest.approx(share)


def test_without_a_correction_every_token_weighs_one(batch: Batch):
    assert correct(batch, CorrectionOptions()) == mismatch(batch)
    assert weights(batch) == [1.0] * 5


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        ("tis", {}, [2, 1, 0.1, 2, 2]),
        ("tis", {"cap": 1.5}, [1.5, 1, 0.1, 1.5, 1.5]),
        ("icepop", {}, [3, 1, 0, 2, 2]),
        ("icepop", {"low": 0.05, "high": 1.0}, [0, 1, 0.1, 0, 0]),
        ("sequence_tis", {}, [0.3, 0.3, 0.3, 2, 2]),
        ("sequence_mask", {}, [0.3, 0.3, 0.3, 0, 0]),
        ("geometric_mask", {"low": 0.5, "high": 1.0}, [1, 1, 1, 0, 0]),  # 0.3 ** (1 / 3) = 0.67
        ("geometric_mask_tis", {"low": 0.5, "high": 1.0, "cap": 2.5}, [2.5, 1, 0.1, 0, 0]),
    ],
)
def test_kinds(batch: Batch, kind, bounds, expected):
    metrics = correct(batch, CorrectionOptions(kind=kind, **bounds))
    assert weights(batch) == pytest.approx(expected, rel=1e-5)
    assert metrics["rollout/is_weight"] == pytest.approx(sum(expected) / 5, rel=1e-5)
    assert metrics["rollout/masked"] == pytest.approx(expected.count(0) / 5)


def test_every_kind_is_one_of_the_options():
    kinds = set(CorrectionOptions.__dataclass_fields__["kind"].type.__args__)  # type: ignore[union-attr]
    assert set(USES) == kinds == set(FUNCTIONS) | {"none"}


def test_bounds_that_a_kind_lacks_are_refused(batch: Batch):
    with pytest.raises(UserError, match=r"--correction.low does nothing.*tis, which has.*cap"):
        correct(batch, CorrectionOptions(kind="tis", low=0.5))
    with pytest.raises(UserError, match=r"--correction.cap does nothing.*none: choose a kind"):
        correct(batch, CorrectionOptions(cap=2.0))


def test_no_rows_give_no_metrics(batch: Batch):
    assert correct(batch[[]], CorrectionOptions(kind="tis")) == {}


def test_filters_are_told_of(capsys: pytest.CaptureFixture[str]):
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 0.7}
    warn_of_filters(off)
    assert capsys.readouterr().err == ""
    warn_of_filters(off | {"top_p": 0.9, "top_k": 50})
    told = capsys.readouterr().err
    assert "top_p 0.9, top_k 50: answers are drawn from a part" in told and "min_p" not in told
