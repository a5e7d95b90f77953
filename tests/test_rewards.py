"""Built-in rewards: exact values by hand, and the measured quirks that they settle on purpose."""

import json
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from datafiles import given

from fsdprl.errors import UserError
from fsdprl.rewards import BUILT_IN
from fsdprl.rewards.answer_text import last_boxed, stated_answer
from fsdprl.rewards.lengths import soft_overlong
from fsdprl.rewards.math import math_accuracy
from fsdprl.rewards.names import named
from fsdprl.rewards.numeric import final_number, gold_number, last_number, numeric_match
from fsdprl.rewards.text import contains_answer, exact_match, think_answer_format
from fsdprl.sample import Sample


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234", 1234),
        ("$1,234.50", Fraction(2469, 2)),
        ("-$5", -5),
        ("about 5% of 80.", 80),
        ("3/4", Fraction(3, 4)),
        ("-3/4 cup", Fraction(-3, 4)),
        ("10 / 4", Fraction(5, 2)),
        ("7 - 5", 5),
        ("on 2024-01-05", 5),
        ("x=-7", -7),
        ("1e3", 1000),
        ("1.5e-2", Fraction(3, 200)),
        (".5", Fraction(1, 2)),
        ("version v2 only", None),
        ("1/0", None),
        ("nothing", None),
        ("9" * 5000, None),
        ("4.0", 4),
    ],
)
def test_last_number(text: str, number: Fraction | None):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("first 3, then 4\n#### 12 apples 5", 5),
        ("#### 1 and then #### 2", 2),
        (r"so 7, \boxed{\text{8}} done in 9 steps", 8),
        ("<think>12</think> it is 13", 13),
        ("<answer>72</answer> (or 73)", 72),
        ("####", None),
        ("", None),
    ],
)
def test_final_number(response: str, number: int | None):
    assert final_number(response) == number


def test_numeric_match():
    gold = "48/2 = <<48/2=24>>24\n#### 1,072"
    assert numeric_match(Sample("", "The total is $1072.00.", gold)) == 1.0
    assert numeric_match(Sample("", "The total is 1072.01", gold)) == 0.0
    assert numeric_match(Sample("", "no idea", gold)) == 0.0
    assert numeric_match(Sample("", "0.1", 0.1)) == 1.0  # as written, not as the nearest double
    assert gold_number(3) == 3
    for answer in ("Paris", None, True):
        with pytest.raises(ValueError, match="answer"):
            numeric_match(Sample("", "1", answer))


def test_stated_answer():
    assert stated_answer("it is 5") is None
    assert stated_answer(r"<think>\boxed{1}</think> so 2") is None
    assert stated_answer(r"\boxed{\frac{1}{2}} and \boxed{x^{2}}!") == "x^{2}"
    assert stated_answer("<answer>1</answer><answer> 2 </answer>") == "2"
    assert last_boxed(r"\boxed{1") is None and last_boxed("1") is None


MATH = [
    # response, gold, score: the first block as measured with ms-swift and mended here on purpose
    ("The answer is 72", "72", 1.0),
    ("<answer>72</answer>", "72", 1.0),
    (r"\boxed{3} ... \boxed{72}", "72", 1.0),
    (r"\boxed{72} ... \boxed{3}", "72", 0.0),
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1.0),
    (r"\boxed{0.5}", "1/2", 1.0),
    (r"\boxed{x=5}", "$5$", 1.0),
    ("$72$", "blah blah\n#### 72", 1.0),
    ("so\n#### 1,234", "#### 1234", 1.0),
    (r"<think>\boxed{1}</think> It is 2.", 2, 1.0),
    (r"\boxed{(1, 2)}", "(1,2)", 1.0),
    (r"\boxed{2, 1}", r"\{1, 2\}", 1.0),
    (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
    (r"\boxed{x^2 + 2x + 2}", "(x+1)^2", 0.0),
    (r"\boxed{\infty}", r"\infty", 1.0),
    ("I do not know", "72", 0.0),
    ("", "72", 0.0),
    ("5", "", None),
]


@pytest.mark.parametrize(("response", "gold", "score"), MATH)
def test_math_accuracy(response: str, gold: str, score: float | None):
    pytest.importorskip("math_verify", reason="needs the extra fsdprl[math]")
    assert math_accuracy(Sample("", response, gold)) == score


def test_math_says_how_to_install_it():
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from fsdprl.rewards import math_accuracy\n"
        "from fsdprl.sample import Sample\n"
        "try: math_accuracy(Sample('', '1', '1'))\n"
        "except ValueError as error: print(error)"
    )
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": source},
    )
    assert "pip install 'fsdprl[math]'" in done.stdout, done.stderr


def test_gsm8k_gold_answers_grade_themselves():
    rows = [json.loads(line) for line in given("gsm8k_train.jsonl").open()]
    golds = [gold_number(row["answer"]) for row in rows]
    assert len(golds) == 7473 and golds[0] == 72
    assert all(numeric_match(Sample("", row["answer"], row["answer"])) == 1.0 for row in rows[:500])
    shifted = [
        Sample("", str(gold + 1), row["answer"]) for gold, row in zip(golds, rows, strict=True)
    ]
    assert not any(map(numeric_match, shifted))


def test_exact_match():
    assert exact_match(Sample("", " 146 \n", 146)) == 1.0
    assert exact_match(Sample("", "0146", "146")) == 0.0
    task = partial(exact_match, after="#", finished=True)
    assert task(Sample("", "16,14#146", "146")) == 1.0
    assert task(Sample("", "16,13#36#146", "146")) == 1.0
    assert task(Sample("", "146", "146")) == 0.0
    assert task(Sample("", "16,14#146", "146", truncated=True)) == 0.0
    with pytest.raises(ValueError, match="--answer-key"):
        exact_match(Sample("", "146"))


def test_contains_answer():
    assert contains_answer(Sample("", "It is PARIS, of course", "Paris")) == 1.0
    assert contains_answer(Sample("", "Parisian", "Paris")) == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a\nb</think>\n\n<answer>c\n</answer>\n", 1.0),
        ("so <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> text <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>b</answer>", 0.0),
        ("<answer>b</answer>", 0.0),
    ],
)
def test_think_answer_format(response: str, score: float):
    assert think_answer_format(Sample("", response)) == score


def test_soft_overlong_is_clamped():
    penalty = partial(soft_overlong, max_length=4096, cache_length=819)
    values = [penalty(Sample("", "", length=n)) for n in (10, 3277, 3700, 4096, 5000)]
    assert values == pytest.approx([0.0, 0.0, -423 / 819, -1.0, -1.0])
    with pytest.raises(ValueError, match="cache_length 0"):
        soft_overlong(Sample("", ""), max_length=10, cache_length=0)


def test_rewards_by_name():
    assert named("accuracy") is math_accuracy and set(BUILT_IN) >= {"numeric", "exact", "format"}
    assert named("fsdprl.rewards.lengths:soft_overlong") is soft_overlong
    for name, message in [
        ("acuracy", "--rewards acuracy: no such reward; did you mean accuracy?"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("fsdprl.rewards:nothing", "has no function nothing"),
    ]:
        with pytest.raises(UserError, match=message):
            named(name)
