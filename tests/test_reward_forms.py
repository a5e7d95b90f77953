"""Rewards in the forms of other frameworks, unmodified: TRL's, ms-swift's, verl's, and plain ones."""

import time
from pathlib import Path

import faulty_rewards
import pytest
import torch
from fake import install

from fsdprl import grading
from fsdprl.errors import UnscoredError, UserError
from fsdprl.functions import function_ref
from fsdprl.grades import grade
from fsdprl.grading import Grader, RewardError
from fsdprl.options import RewardOptions
from fsdprl.rewards.names import named, short_names
from fsdprl.sample import Sample
from fsdprl.scoring import Rewards, completions

HERE = Path(__file__).parent / "third_party"
CHAT = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def grader():
    with Grader(RewardOptions(workers=2, timeout_s=20.0)) as made:
        yield made


def scores(grader: Grader, name: str, samples: list[Sample]) -> list[float | None]:
    return grader.grade(function_ref(named(f"{HERE}/{name}")), samples).scores


def said(*texts: str, **fields) -> list[Sample]:
    return [
        Sample(
            "2 + 2?",
            text,
            "4",
            length=len(text.split()),
            ids=list(range(len(text.split()))),
            **fields,
        )
        for text in texts
    ]


def test_trl_functions(grader):
    chat = {"messages": CHAT, "meta": {"solution": "4", "task": "math"}, "step": 7}
    right = "<think>easy</think><answer>4</answer>"
    samples = said(right, "it is 5", **chat)
    assert scores(grader, "trl_rewards.py:format_reward", samples) == [1.0, 0.0]
    assert scores(grader, "trl_rewards.py:correctness_reward", samples) == [2.0, 0.0]
    assert scores(grader, "trl_rewards.py:token_length_reward", samples) == [-1.0, -3.0]
    assert scores(grader, "trl_rewards.py:slow_judge", samples) == [7.0, 7.0]
    code = said("x", meta={"task": "code"})
    assert scores(grader, "trl_rewards.py:only_math", [*samples, *code]) == [1.0, 1.0, None]


def test_what_trl_functions_log(grader):
    samples = said("it is 5", "four", messages=CHAT)
    found = grader.grade(function_ref(named(f"{HERE}/trl_rewards.py:logging_reward")), samples)
    assert found.extras == {0: {"words": 3}, 1: {"words": 1}} and found.scores == [1.0, 1.0]
    calls = [3.0, 1.0] if len(found.metrics) == 2 else [2.0]  # one or two processes had them
    assert sorted(found.metrics) == sorted(("words/mean", value) for value in calls)
    with (
        pytest.raises(RewardError, match=r"log_extra\('words'\) needs 3 values"),
        Grader(RewardOptions()) as alone,
    ):
        scores(alone, "trl_rewards.py:logs_too_few", said("a", "b", "c", messages=CHAT))


def test_ms_swift_classes_with_their_imports(grader):
    samples = said("<answer> 4 </answer>", "<answer>5</answer> or so it seems", messages=CHAT)
    assert scores(grader, "swift_plugin.py:MathORM", samples) == [1.0, 0.0]
    assert scores(grader, "swift_plugin.py:external_length", samples) == [0.0, -1.0]
    assert scores(grader, "swift_plugin.py:LengthORM(soft_max=2)", samples) == [-1.0, -3.0]


def test_verl_functions(grader):
    meta = {"data_source": "openai/gsm8k", "extra_info": {"split": "train"}}
    samples = said("so #### 4", "so #### 5", meta=meta)
    assert scores(grader, "verl_reward.py:compute_score", samples) == [1.5, 0.5]
    assert scores(grader, "verl_reward.py:score_plainly", samples) == [1.0, 0.0]
    with pytest.raises(RewardError, match="NotImplementedError: other"):
        scores(grader, "verl_reward.py:compute_score", said("x", meta={"data_source": "other"}))


def test_plain_functions_take_columns_and_import_what_stands_beside_them(grader):
    samples = said("4", "a b c", meta={"level": 2})
    assert scores(grader, "plain_reward.py:long_enough", samples) == [0.0, 1.0]
    assert scores(grader, "plain_reward.py:by_level", samples) == [2.0, 0.0]
    with pytest.raises(RewardError, match="dataset column 'level'; the rows have difficulty"):
        scores(grader, "plain_reward.py:by_level", said("4", meta={"difficulty": 1}))


@pytest.mark.parametrize("size", [3, 50])
def test_rewards_over_whole_groups(grader, size: int, monkeypatch):
    """Groups stay whole whatever the chunks, and whatever the order of rows."""
    monkeypatch.setattr(grading, "CHUNK", 7)
    rows = [(place, group) for place in range(3) for group in range(size)]  # members apart
    samples = [said("a " * (1 + place + group % 5), group=group)[0] for place, group in rows]
    expected = [1.0 if place == 0 else 0.0 for place, _ in rows]
    assert scores(grader, "plain_reward.py:shortest_of_group", samples) == expected
    means = scores(grader, "plain_reward.py:group_mean", samples)
    assert means == [2.0 * (2 + group % 5) for _, group in rows]


def test_a_hanging_group_costs_its_own_samples():
    samples = [
        Sample("", "1", meta={"do": "sleep" if g == 1 else ""}, group=g)
        for g in range(4)
        for _ in "ab"
    ]
    with Grader(RewardOptions(timeout_s=0.5)) as made:
        graded = made.grade(function_ref(faulty_rewards.whole_group), samples)
    assert graded.scores == [2.0, 2.0, None, None, 2.0, 2.0, 2.0, 2.0]
    assert [failure.index for failure in graded.failures] == [2, 3]


def test_async_samples_run_together(grader):
    samples = [Sample("", str(i)) for i in range(40)]
    began = time.monotonic()
    assert grader.grade(function_ref(faulty_rewards.waits), samples).scores == list(
        map(float, range(40))
    )
    assert time.monotonic() - began < 6.0  # one after the other would take 12 s


def test_no_verdict_is_a_failure_and_no_zero():
    samples = [Sample("", str(i)) for i in range(40)]
    with Grader(RewardOptions()) as made:
        for fn in (faulty_rewards.no_verdict, faulty_rewards.no_verdict_async):
            graded = made.grade(function_ref(fn), samples)
            assert graded.scores == [None if i == 3 else 1.0 for i in range(40)]
            assert [(f.index, f.cause) for f in graded.failures] == [(3, "the judge is down")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acuracy", "--rewards acuracy: no such reward; did you mean accuracy?"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("nowhere/rewards.py:f", "no such file: nowhere/rewards.py"),
        (f"{HERE}/plain_reward.py:by_levle", "has no function by_levle; did you mean by_level"),
        ("soft_overlong", r"needs a value: write 'soft_overlong\(cache_length=...\)'"),
        ("cosine(max_len=3)", "cosine has no setting 'max_len'; known are min_len_wrong"),
        ("cosine(max_length=__import__('os'))", "settings are written as"),
        ("cosine(3)", "settings are written as"),
    ],
)
def test_mistakes_in_names(text: str, message: str):
    with pytest.raises(UserError, match=message):
        named(text)


def test_names_and_settings():
    fn = named("soft_overlong(cache_length=2, max_length=4)")
    assert fn(Sample("", "", length=3)) == -0.5
    assert named("fsdprl.rewards.numeric:numeric_match")(Sample("", "5", "5")) == 1.0
    assert short_names(["accuracy", "a/b.py:fn", "m:fn", "cosine(x=1)", "cosine(x=2)"]) == [
        "accuracy", "fn", "fn_2", "cosine", "cosine_2",
    ]  # fmt: skip


# ---- composed, on the controller ---------------------------------------------------------------


@pytest.fixture
def batch(monkeypatch):
    fake = install(monkeypatch, 2)
    made = fake.batch([2] * 8, [3] * 8, [0] * 4 + [1] * 4)
    made["group"] = torch.arange(8) // 4
    for worker in fake.workers:
        worker.state["tokenizer"] = _Words()
    for number, (_, row) in enumerate(
        sorted(r for w in fake.workers for r in w.store.rows.items())
    ):
        row.info |= {"answer": str(number), "max_new_tokens": 3}
    return fake, made


class _Words:
    def batch_decode(self, ids, skip_special_tokens):
        return ["x" * len(one) for one in ids]


def test_logged_numbers_and_columns_reach_metrics_and_completions(batch, tmp_path):
    fake, made = batch
    for worker in fake.workers:
        for row in worker.store.rows.values():
            row.info["messages"] = CHAT
    rewards = Rewards([f"{HERE}/trl_rewards.py:logging_reward"])
    made["reward"] = rewards(made)
    assert rewards.metrics(made)["words/mean"] == 1.0
    made.write_completions(tmp_path, 0)
    lines = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == 8 and all('"words":1' in line for line in lines)


def test_masked_rows_have_no_advantage(batch):
    fake, made = batch
    rewards = Rewards(
        [f"{__name__}:odd", f"{__name__}:sometimes_down"],
        [1.0, 2.0],
        RewardOptions(max_failed_share=0.3),
    )
    total = rewards(made)
    # odd: 0 1 0 1 0 1 0 1; the second one is 1, and fails on rows 2 and 5
    assert total.tolist() == pytest.approx([2, 3, 8 / 3, 3, 2, 7 / 3, 2, 3])
    assert made["masked"].tolist() == [False, False, True, False, False, True, False, False]
    assert fake.timeline.drain()[1]["reward/masked"] == 2
    assert rewards.metrics(made) == pytest.approx(
        {
            "odd_rewards/mean": 0.5,
            "rewards/odd/mean": 0.5,
            "rewards/odd/std": (2 / 7) ** 0.5,
            "sometimes_down_rewards/mean": 1.0,
            "rewards/sometimes_down/mean": 1.0,
            "rewards/sometimes_down/std": 0.0,
        }
    )


def test_none_everywhere_ends_the_run_and_rows_name_their_rewards(batch):
    fake, made = batch
    alone = (
        rf"--rewards {__name__}:never: returned None for 8 of 8 rows, .* \(is there a return\?\)"
    )
    with pytest.raises(UserError, match=alone):
        Rewards([f"{__name__}:never"])(made)
    with pytest.raises(UserError, match="--reward-weights: 2 given, 1 wanted: one each for never"):
        Rewards([f"{__name__}:never"], [1.0, 2.0])
    for worker in fake.workers:
        for row in worker.store.rows.values():
            row.info["rewards"] = ["odd"] if int(row.info["answer"]) < 4 else ["never", "odd"]
    graded = grade(made, never_on_small, RewardOptions(), name="never")
    assert graded.scores.isnan().tolist() == [True] * 4 + [False] * 4
    with pytest.raises(UserError, match="the same one twice"):
        Rewards(["numeric", "numeric"])


def test_groups_must_be_on_one_rank(batch):
    _, made = batch
    made["group"] = made.row_ids % 2
    with pytest.raises(UserError, match="answers on one rank"):
        grade(made, faulty_rewards.whole_group, RewardOptions())


def odd(sample: Sample) -> float:
    return float(int(sample.answer) % 2)


def never(sample: Sample) -> None:
    return None


def never_on_small(sample: Sample) -> float:
    assert int(sample.answer) >= 4, "its rows do not name this reward"
    return 1.0


def sometimes_down(sample: Sample) -> float:
    if sample.answer in ("2", "5"):
        raise UnscoredError("down")
    return 1.0


def test_completions_by_hand():
    """Cut off are those that hit the limit; the others ended by themselves, and not the other way round."""
    length = torch.tensor([4, 8, 2, 8])
    made = completions(length, torch.tensor([False, True, False, True]))
    assert made == {
        "completions/clipped_ratio": 0.5,
        "completions/mean_length": 5.5,
        "completions/min_length": 2.0,
        "completions/max_length": 8.0,
        "completions/mean_terminated_length": 3.0,
        "completions/min_terminated_length": 2.0,
        "completions/max_terminated_length": 4.0,
    }
    assert completions(length[1::2], torch.tensor([True, True])) == {
        "completions/clipped_ratio": 1.0,
        "completions/mean_length": 8.0,
        "completions/min_length": 8.0,
        "completions/max_length": 8.0,
    }
