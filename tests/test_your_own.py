"""recipes/YOUR_OWN.md: its code runs, its names exist."""

import re
from pathlib import Path

import pytest
from datafiles import write_lines

from fsdprl.data.mixture import read_as
from fsdprl.data.rows import open_rows
from fsdprl.functions import function_ref
from fsdprl.grading import Grader
from fsdprl.options import RewardOptions
from fsdprl.rewards import BUILT_IN
from fsdprl.rewards.names import named
from fsdprl.sample import Sample

PAGE = Path(__file__).resolve().parents[1] / "recipes" / "YOUR_OWN.md"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The blocks of the page, each in the file that its first line names."""
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_rewards(files: Path):
    samples = [
        Sample("q", text, 4, length=length, meta={"level": 2}, group=0)
        for text, length in (("is 4", 3), ("is 5", 2), ("is 4", 60))
    ]
    expected = {
        "short_and_right(most=50)": [1.0, 0.0, 0.0],
        "short_and_right": [1.0, 0.0, 1.0],
        "by_level": [2.0, 0.0, 2.0],
        "shortest_of_group": [0.0, 1.0, 0.0],
        "slow": [1.0, 1.0, 1.0],
        "trl_style": [1.0, 1.0, 1.0],
    }
    with Grader(RewardOptions()) as grader:
        for name, scores in expected.items():
            fn = named(f"{files}/my_rewards.py:{name}")
            assert grader.grade(function_ref(fn), samples).scores == scores, name


def test_mixture(files: Path):
    write_lines(files / "math.jsonl", [{"problem": f"p{i}", "answer": i} for i in range(8)])
    write_lines(files / "fragen.jsonl", [{"frage": f"f{i}", "loesung": str(i)} for i in range(8)])
    rows = read_as(open_rows(str(files / "mix.toml")), "prompt")
    sources = [rows[i]["data_source"] for i in range(len(rows))]
    assert (sources.count("math"), sources.count("fragen")) == (12, 4)
    assert rows[0]["_rewards"] == ["short_and_right"] and rows[15]["prompt"].startswith("f")


def test_every_built_in_reward_is_in_the_table():
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(BUILT_IN)
