"""A step's numbers, the plan's arithmetic, and files that survive a full disk."""

import errno
import json
import math
from pathlib import Path

import pytest
import torch

from fsdprl.controller import Span
from fsdprl.errors import UserError
from fsdprl.metrics import (
    ALSO,
    StepMetrics,
    averaged,
    counted,
    covered,
    jsonable,
    merge,
    throughput,
    timings,
)
from fsdprl.plan import Plan
from fsdprl.records import JsonLines, Patience, cut_back, read_lines, write_atomic

# ---- metrics


def test_counters_become_metrics_and_a_hit_rate():
    counts = {"wire.sent": 7.0, "rollout/prompt_tokens": 80.0, "rollout/cached_prompt_tokens": 60.0}
    assert counted(counts) == {
        "wire/sent": 7.0, "rollout/prompt_tokens": 80.0, "rollout/cached_prompt_tokens": 60.0,
        "rollout/cache_hit_rate": 0.75,
    }  # fmt: skip
    assert counted({"rollout/prompt_tokens": 0.0}) == {"rollout/prompt_tokens": 0.0}


def test_repeated_names_are_averaged_and_extremes_kept():
    metrics = StepMetrics()
    metrics.add({"actor/loss": 1, "x/max": 2.0, "x/min": 2.0})
    metrics.add({"actor/loss": torch.tensor(4.0), "x/max": 5.0, "x/min": -1.0, "flag": True})
    assert metrics.merged() == {"actor/loss": 2.5, "x/max": 5.0, "x/min": -1.0, "flag": 1.0}
    for how, value in {"max_length": 5.0, "min_length": 2.0, "mean_length": 3.5}.items():
        assert merge(f"completions/{how}", [2.0, 5.0]) == value
    for how, value in {"high_max": 5.0, "low_min": 2.0, "low_mean": 3.5, "maximum": 3.5}.items():
        assert merge(f"clip_ratio/{how}", [2.0, 5.0]) == value


def test_an_update_on_two_ranks_by_hand():
    """Sums are added and divided by what they weigh; of answers' extremes the outer one stays."""
    replies = [
        {"loss": 1.0, "metric/entropy": 3.0, "weight/entropy": 1.0, "min/entropy": 0.5, "max/entropy": 4.0},
        {},
        {"loss": 2.0, "metric/entropy": 1.0, "weight/entropy": 1.0, "min/entropy": 1.0, "max/entropy": 6.0},
    ]  # fmt: skip
    own = {"actor/loss": 3.0, "actor/entropy": 2.0}
    assert averaged(replies, "actor") == own
    twice = {"entropy/mean": 2.0, "entropy/min": 0.5, "entropy/max": 6.0}
    assert averaged(replies, "actor", ALSO) == own | twice


@pytest.mark.parametrize("value", ["text", None, torch.zeros(2), [1.0]])
def test_a_metric_is_one_number(value: object):
    with pytest.raises(TypeError, match=r"'loss' must be one number"):
        StepMetrics().add({"loss": value})


def test_nan_is_null_in_json_and_survives_the_mean():
    metrics = StepMetrics()
    metrics.add({"a": math.nan, "b": 1.0})
    metrics.add({"a": 1.0})
    merged = metrics.merged()
    assert math.isnan(merged["a"])
    assert jsonable(merged) == {"a": None, "b": 1.0}


def test_union_of_spans():
    assert covered([]) == 0.0
    assert covered([(0, 2), (1, 3), (5, 6), (5.2, 5.4)]) == pytest.approx(4.0)


def test_timings_by_hand():
    # A step from 10 to 20. rollout runs twice; reference overlaps old_log_p and ends 1 s after it;
    # the save began before the step and counts from its start; 0.5 + 2 s are covered by nothing.
    spans = [
        Span("save", 9.0, 10.5),
        Span("rollout", 11.0, 13.0),
        Span("rollout", 14.0, 15.0),
        Span("rule_reward", 13.0, 14.0),
        Span("old_log_p", 15.0, 16.0),
        Span("reference_model", 15.5, 17.0),
        Span("update", 17.0, 18.0),
        Span("late", 20.0, 21.0),
    ]
    seconds = timings(spans, 10.0, 20.0)
    assert seconds == pytest.approx(
        {
            "timing/all": 10.0,
            "timing/save": 0.5,
            "timing/rollout": 3.0,
            "timing/rule_reward": 1.0,
            "timing/old_log_p": 1.0,
            "timing/reference_model": 1.5,
            "timing/update": 1.0,
            "timing/non_overlap_reference_model": 1.0,
            "timing/non_overlap_rule_reward": 0.0,
            "timing/controller_overhead": 0.25,
        }
    )


def test_what_begins_after_the_old_log_probs_does_not_overlap_them():
    """G.1: from the later of its start and their end; advantages always from their end."""
    spans = [
        Span("old_log_p", 1.0, 3.0),
        Span("reward_model", 0.5, 2.0),
        Span("rule_reward", 4.0, 4.5),
        Span("adv", 5.0, 6.0),
    ]
    seconds = timings(spans, 0.0, 10.0)
    hidden = {
        name: seconds[f"timing/non_overlap_{name}"]
        for name in ("reward_model", "rule_reward", "adv")
    }
    assert hidden == {"reward_model": 0.0, "rule_reward": 0.5, "adv": 3.0}


def test_identity_of_colocated_models():
    """G.1: nothing is counted twice where reference and rules are done before the old log-probs, as recipes do."""
    order = (
        "resharding_to_infer", "rollout", "rule_reward", "rebalance", "resharding_to_train", "reference_model",
        "old_log_p", "critic_model", "adv", "update_critic", "update",
    )  # fmt: skip
    spans = [Span(name, 10.0 + i, 11.0 + i) for i, name in enumerate(order)]
    seconds = timings(spans, 10.0, 22.0)
    parts = [
        seconds[f"timing/{name}"]
        for name in order
        if name not in ("rule_reward", "adv", "rebalance")
    ]
    beside = [seconds[f"timing/non_overlap_{name}"] for name in ("rule_reward", "reference_model")]
    assert beside == [0.0, 0.0] and seconds["timing/non_overlap_adv"] == 2.0
    assert seconds["timing/all"] == 12.0 >= sum(parts) + max(beside) == 8.0


def test_throughput_of_the_guide():
    # 800 + 200 tokens, 128 x 8 samples, 32 devices, 400 s: 80 tokens per second and device.
    seconds = {"timing/all": 400.0, "timing/update": 100.0, "timing/rollout": 200.0}
    counts = {"tokens": 1000.0 * 128 * 8}
    assert throughput(seconds, counts, 32) == {
        "e2e_tps": 80.0,
        "update_tps": 320.0,
        "vllm_tps": 160.0,
    }
    assert throughput({"timing/all": 1.0}, {}, 2) == {}


# ---- the plan


def test_plan_from_epochs_and_from_steps():
    plan = Plan(rows=100, prompts_per_step=8, group_size=4, minibatches=2, epochs=2)
    assert (plan.steps, plan.samples, plan.optimizer_steps) == (25, 32, 50)
    assert Plan(rows=100, prompts_per_step=8, epochs=1).steps == 12
    long = Plan(rows=100, prompts_per_step=8, steps=50, epochs=1)
    assert (long.steps, long.epochs) == (50, 4.0)


def test_a_recipe_names_its_own_flag():
    with pytest.raises(UserError, match="--batch-size 5: --data has only 4 rows"):
        Plan(rows=4, prompts_per_step=5, steps=1, flag="--batch-size")


def test_plan_in_words():
    text = "\n".join(Plan(1000, 64, 8, 3, steps=10).describe())
    assert "64 prompts x 8 = 512 samples, 3 minibatches of 170 to 171 samples" in text
    assert "10 steps, 5,120 samples, 30 optimizer steps, 0.64 epochs of 1,000 rows" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts_per_step": 0}, "--prompts-per-step 0: must be at least 1"),
        ({"group_size": 0}, "--group-size 0"),
        ({"minibatches": 0}, "--minibatches 0"),
        ({"prompts_per_step": 11}, "--prompts-per-step 11: --data has only 10 rows"),
        ({"minibatches": 9}, "--minibatches 9: a step has only 8 samples"),
        ({"rows": 0}, "--data: no rows"),
        ({"steps": -1}, "must not be negative"),
        ({"epochs": 0.0}, "--steps or --epochs"),
        ({"epochs": 0.1}, "--epochs 0.1: 10 rows make less than one step"),
    ],
)
def test_plans_that_do_not_work_out(changes: dict[str, float], said: str):
    good = {"rows": 10, "prompts_per_step": 4, "group_size": 2, "minibatches": 2, "epochs": 1.0}
    Plan(**good)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError) as caught:
        Plan(**(good | changes))  # pyright: ignore[reportArgumentType]
    assert said in str(caught.value)


# ---- records


def lines(tmp_path: Path, warnings: list[str]) -> JsonLines:
    return JsonLines(tmp_path / "m.jsonl", warnings.append)


def break_writes(monkeypatch: pytest.MonkeyPatch, log: JsonLines, half: bytes = b"") -> None:
    """Every write fails as on a full disk, after `half` a line has reached the file."""

    def full(sync: bool) -> None:
        with log.path.open("ab") as file:
            file.write(half)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log, "_write", full)


def test_what_a_full_disk_refused_goes_out_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    warnings: list[str] = []
    log = lines(tmp_path, warnings)
    assert log.append({"step": 0})
    with monkeypatch.context() as patched:
        break_writes(patched, log, half=b'{"step"')
        assert not log.append({"step": 1})
        assert not log.append({"step": 2})
    assert log.append({"step": 3}, sync=True)
    assert [record["step"] for record in read_lines(log.path)] == [0, 1, 2, 3]
    assert len(warnings) == 2
    assert "No space left on device" in warnings[0]


def test_the_third_failure_in_a_row_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = lines(tmp_path, [])
    break_writes(monkeypatch, log)
    log.append({"step": 0})
    log.append({"step": 1})
    with pytest.raises(UserError, match=r"m.jsonl: No space left.*3 times.*same command again"):
        log.append({"step": 2})


def test_patience_counts_failures_in_a_row_only():
    warnings: list[str] = []
    patience = Patience("saving", warnings.append)

    def fail() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for _ in range(3):
        assert not patience.attempt(fail)
        assert not patience.attempt(fail)
        assert patience.attempt(lambda: None)
    with pytest.raises(ZeroDivisionError):
        patience.attempt(lambda: 1 / 0)


def test_cut_back_to_a_step_and_torn_lines(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    whole = [json.dumps({"step": step, "a": step / 7}) + "\n" for step in (0, 1, 1, 2, 3)]
    path.write_text("".join(whole) + '{"step": 4, "a"')
    cut_back(path, 9)
    assert path.read_text() == "".join(whole)
    cut_back(path, 2)
    assert path.read_text() == "".join(whole[:3])
    cut_back(path, 0)
    assert path.read_text() == ""
    path.write_text(whole[0] + whole[1].rstrip())  # whole but for its end: more may be missing
    cut_back(path, 9)
    assert path.read_text() == whole[0]


def test_a_replaced_file_is_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "status.json"
    write_atomic(path, "old")

    def refuse(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]
