"""Golden values of built-in rewards: those of the frameworks that they come from, and the stated departures."""

import json
import math
from functools import partial

import pytest

from fsdprl.rewards import (
    answer_line,
    boxed_accuracy,
    cosine,
    multiple_choice,
    repetition,
    soft_overlong,
    steps,
    strict_format,
    tool_call_f1,
)
from fsdprl.rewards.answer_line import normalised
from fsdprl.rewards.tool_calls import calls_in
from fsdprl.sample import Sample


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [(0, 1.0, -0.5), (50, 0.75, -0.25), (100, 0.5, 0.0), (200, 0.5, 0.0), (130, 0.5, 0.0),
     (25, 0.75 + 0.25 * math.sqrt(0.5), -0.25 - 0.25 * math.sqrt(0.5))],
)  # fmt: skip
def test_cosine_is_clamped(length: int, right: float, wrong: float):
    for text, score in (("5", right), ("6", wrong)):
        sample = Sample("", text, "5", length=length, max_new_tokens=100)
        assert cosine(sample, correct="numeric") == pytest.approx(score)
        wide = Sample("", text, "5", length=length)
        assert cosine(wide, correct="numeric", max_length=100) == pytest.approx(score)
    with pytest.raises(ValueError, match="max_length 0 must be positive"):
        cosine(Sample("", "5", "5"))
    with pytest.raises(ValueError, match="correct 'luck'"):
        cosine(Sample("", "5", "5"), max_length=3, correct="luck")


def test_cosine_by_math():
    pytest.importorskip("math_verify", reason="needs the extra fsdprl[math]")
    sample = partial(Sample, "", length=0, max_new_tokens=10)
    assert cosine(sample(r"\boxed{1/2}", "0.5")) == 1.0
    assert cosine(sample(r"\boxed{1/3}", "0.5")) == -0.5
    assert cosine(sample("5", "")) is None


@pytest.mark.parametrize(
    ("text", "score"),
    [("a b c a b c", -0.25), (" ".join("aaaaaaaa"), -5 / 6), ("a b", 0.0), ("", 0.0), ("a B c A b C", -0.25),
     ("没有空格的中文没有空格的中文", 0.0), ("a b c d", 0.0)],
)  # fmt: skip
def test_repetition(text: str, score: float):
    assert repetition(Sample("", text)) == pytest.approx(score)
    assert repetition(Sample("", text), max_penalty=-0.1) == pytest.approx(score / 10)


def test_repetition_of_pairs():
    assert repetition(Sample("", "a b a b"), n_grams=2) == pytest.approx(-1 / 3)
    with pytest.raises(ValueError, match="max_penalty"):
        repetition(Sample("", ""), max_penalty=1.0)


@pytest.mark.parametrize(
    ("length", "score"), [(1536, 0.0), (1800, -264 / 512), (2048, -1.0), (2500, -1.0)]
)
def test_soft_overlong_in_mindspeeds_numbers(length: int, score: float):
    """max_length is the sampler's limit; a factor of 0.1 as in the recipes for mixtures of experts."""
    sample = Sample("", "", length=length, max_new_tokens=2048)
    assert soft_overlong(sample, cache_length=512) == pytest.approx(score)
    assert soft_overlong(sample, cache_length=512, factor=0.1) == pytest.approx(score / 10)


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("so\nAnswer: 34", "34", 1.0),
        ("answer : $34$", "34", 1.0),
        ("Answer: 33\nno,\nAnswer: 34", "34", 1.0),
        ("Answer: 34\nno,\nAnswer: 33", "34", -1.0),
        (r"\boxed{34}", "34", -1.0),
        ("34", "34", -1.0),
        (r"Answer: \boxed{34}", 34, 1.0),
        ("Answer: x = 1,000 dollars", "1000", 1.0),
        (r"Answer: \frac12", r"\frac{1}{2}", 1.0),
        ("Answer: 34" + " " * 300, "34", -1.0),  # beyond the last 300 characters
        (r"Answer: $\sqrt3$", r"\sqrt{3}", 1.0),
        (r"Answer: 90^\circ", "90", 1.0),
        (r"Answer: 5\text{ cm}", "5", 1.0),
        (
            "Answer:\n34",
            "34",
            1.0,
        ),  # as in the original: white space before the answer may be a newline
    ],
)
def test_acc_for_dapo(response: str, gold: str, score: float):
    assert answer_line(Sample("", response, gold)) == score


def test_minervas_normal_form():
    assert normalised("a $2,500$ dollars") == "2500"
    assert normalised(r"S = x,\text{and}y") == "x,y"
    with pytest.raises(ValueError, match="answer-key"):
        answer_line(Sample("", "Answer: 3"))


@pytest.mark.parametrize(
    ("response", "plain", "graded", "structured"),
    [
        (r"\boxed{1/2}", 1.0, 1.0, 0.0),
        (r"\boxed{1/3}", 0.0, -0.5, 0.0),
        (r"\boxed{7} then \boxed{0.5}", 1.0, 1.0, 0.0),
        ("0.5", 0.0, -1.0, 0.0),
        (r"\boxed{0.5", 0.0, -1.0, 0.0),
        (r"<think>t</think><answer>\boxed{0.5}</answer>", 1.0, 1.0, 1.0),
        (r"<think>t</think><answer>\boxed{5}</answer>", 0.0, -0.5, 0.0),
    ],
)
def test_boxed_accuracy(response: str, plain: float, graded: float, structured: float):
    """As MindSpeed RL's acc_for_ppo, acc and base_acc."""
    pytest.importorskip("math_verify", reason="needs the extra fsdprl[math]")
    sample = Sample("", response, r"\frac{1}{2}")
    assert boxed_accuracy(sample) == plain
    assert boxed_accuracy(sample, wrong=-0.5, missing=-1.0) == graded
    assert boxed_accuracy(sample, structured=True) == structured


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a</think> so <answer>b</answer>\n", 1.0),
        ("x<think>a</think><answer>b</answer>", -0.5),
        ("<think>a</think><answer>b</answer><answer>c</answer>", -0.5),
        ("<answer>b</answer><think>a</think>", -0.5),
        ("<think>a</think>b", -0.5),
    ],
)
def test_strict_format(response: str, score: float):
    assert strict_format(Sample("", response)) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [("", 0.0), ("Step 1: a\nStep 2: b\nStep 3: c\nStep 4: d", 1.0), ("1. a\n2. b", 1 / 3), ("x\n- a\n* b", 2 / 3),
     ("First, a. Second, b. Finally, c.", 1.0)],
)  # fmt: skip
def test_steps(response: str, score: float):
    assert steps(Sample("", response)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("The answer is B.", "B", 1.0),
        ("The answer is (b)", "b", 0.0),  # a lone small letter is a word as often as a choice
        (r"so \boxed{C}", "(C)", 1.0),
        (r"so \boxed{\text{C}}", "C", 1.0),
        (r"\boxed{A} no \boxed{D}", "D", 1.0),
        ("<answer>B. Paris</answer>", "B. Paris", 1.0),
        ("<think>Answer: A</think> Option C", "C", 1.0),
        ("I weigh A and B.\nB", "B", 1.0),
        ("A or B", "B", 0.0),
        ("An apple", "A", 0.0),
        ("Answer: **D**", "D", 1.0),
        ("", "A", 0.0),
    ],
)
def test_multiple_choice(response: str, gold: str, score: float):
    assert multiple_choice(Sample("", response, gold)) == score


def test_multiple_choice_needs_a_letter():
    with pytest.raises(ValueError, match="--answer-key"):
        multiple_choice(Sample("", "A", "Paris"))


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (call("add", a=1, b=2), 1.0),
        ("I add. " + call("add", b=2, a=1) + " done", 1.0),
        (call("add", a=1, b=3), 2 / 3),  # name and one of two arguments: 2 * 2 / (3 + 3)
        (call("add", a=1, b=2) * 2, 2 / 3),  # 2 * 3 / (3 + 6)
        (call("sub", a=1, b=2), 0.0),
        ("3", 0.0),
        ("<tool_call>{broken</tool_call>", 0.0),
        ('Action: add\nAction Input: {"a": 1, "b": 2}\nObservation: 3', 1.0),
    ],
)
def test_tool_call_f1(response: str, score: float):
    openai = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    for gold in (
        {"name": "add", "arguments": {"a": 1, "b": 2}},
        openai,
        json.dumps(openai),
        call("add", a=1, b=2),
    ):
        assert tool_call_f1(Sample("", response, gold)) == pytest.approx(score)


def test_tool_calls_that_are_none():
    assert tool_call_f1(Sample("", "no tool needed", [])) == 1.0
    assert tool_call_f1(Sample("", call("add"), [])) == 0.0
    assert tool_call_f1(Sample("", "x", None)) is None
    assert calls_in(call("a", x=[1, {"y": None}])) == [("a", {"x": [1, {"y": None}]})]
    with pytest.raises(ValueError, match="no tool calls"):
        tool_call_f1(Sample("", "x", "Paris"))
