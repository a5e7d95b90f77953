"""The addition task: workings by hand, the split, and a reward that only exact answers get."""

import json
import subprocess
import sys

import pytest

from fsdprl.sample import Sample
from fsdprl.tasks.addition import Problem, demonstrations, problems, reward, write_dataset


@pytest.mark.parametrize(
    ("first", "second", "keep", "working"),
    [
        (49, 97, None, "16,14#146"),  # 9+7=16; 4+9+1=14
        (49, 97, [False, False], "16,13#36"),  # 4+9=13, and the front 1 is gone
        (49, 97, [True, False], "16,14#46"),
        (49, 97, [False, True], "16,13#136"),
        (12, 13, None, "5,2#25"),
        (12, 13, [], "5,2#25"),  # no carry: nothing to draw
        (5, 95, None, "10,10#100"),
        (5, 95, [False, True], "10,9#90"),
        (0, 0, None, "0,0#0"),
    ],
)
def test_working(first, second, keep, working):
    assert Problem(first, second).working(keep) == working


def test_three_digits():
    problem = Problem(7, 995, digits=3)
    assert problem.prompt == "007+995="
    assert problem.working() == "12,10,10#1002"
    assert problem.answer == "1002"
    assert problem.carries() == 3


def test_gold_working_ends_in_the_answer_for_every_two_digit_problem():
    every = problems(2, 10_000, seed=3)
    assert len({(p.first, p.second) for p in every}) == 10_000
    assert all(p.working().partition("#")[2] == p.answer for p in every)
    # No carry: two digits of each place sum to 9 or less in 55 of 100 ways.
    assert sum(p.carries() == 0 for p in every) == 55 * 55


def test_demonstrations_drop_the_share_of_carries_asked_for():
    chosen = [Problem(49, 97), Problem(12, 13)]
    drawn = list(demonstrations(chosen, drop=0.8, count=4000, seed=0))
    assert drawn == list(demonstrations(chosen, drop=0.8, count=4000, seed=0))
    assert drawn != list(demonstrations(chosen, drop=0.8, count=4000, seed=1))
    carrying = [completion for prompt, completion in drawn if prompt == "49+97="]
    assert len(carrying) == 2000
    both = sum(completion == "16,13#36" for completion in carrying) / 2000
    assert abs(both - 0.64) < 0.05  # five standard errors
    assert all(
        c == Problem(49, 97).working()
        for _, c in demonstrations([Problem(49, 97)], drop=0.0, count=9, seed=0)
    )


@pytest.mark.parametrize(
    ("response", "answer", "truncated", "expected"),
    [
        ("16,14#146", "146", False, 1.0),
        ("16,14#146", 146, False, 1.0),
        ("#146", "146", False, 1.0),
        ("16,14#146", "146", True, 0.0),
        ("16,13#136", "146", False, 0.0),
        ("16,14#1460", "146", False, 0.0),
        ("16,14#146#146", "146", False, 0.0),
        ("146", "146", False, 0.0),
        ("", "146", False, 0.0),
    ],
)
def test_reward(response, answer, truncated, expected):
    sample = Sample(prompt="49+97=", response=response, answer=answer, truncated=truncated)
    assert reward(sample) == expected


def test_files(tmp_path):
    paths = write_dataset(tmp_path, demonstration_count=100, seed=1)
    rows = {name: [json.loads(line) for line in path.open()] for name, path in paths.items()}
    assert {name: len(found) for name, found in rows.items()} == {
        "sft": 100,
        "train": 9000,
        "heldout": 1000,
    }
    asked = {name: {row["prompt"][0]["content"] for row in found} for name, found in rows.items()}
    assert asked["sft"] <= asked["train"]
    assert not asked["train"] & asked["heldout"]
    row = rows["train"][0]
    first, second = row["prompt"][0]["content"].rstrip("=").split("+")
    assert row["answer"] == str(int(first) + int(second))
    assert rows["sft"][0]["completion"][0]["role"] == "assistant"


def test_command_line_needs_no_torch(tmp_path):
    code = (
        "import sys, runpy; sys.argv = ['addition', '--out', sys.argv[1]];"
        "runpy.run_module('fsdprl.tasks.addition', run_name='__main__');"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "heldout.jsonl").read_text().count("\n") == 1000
