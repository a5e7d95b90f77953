"""recipes/YOUR_OWN.md: its code runs, its names exist."""

import asyncio
import re
from functools import partial
from pathlib import Path

import pytest
from datafiles import write_lines

from fsdprl.conversation import Conversation
from fsdprl.data.mixture import read_as
from fsdprl.data.rows import open_rows
from fsdprl.functions import function_ref, import_named
from fsdprl.grading import Grader
from fsdprl.options import RewardOptions
from fsdprl.rewards import BUILT_IN
from fsdprl.rewards.names import named
from fsdprl.sample import Sample
from fsdprl.tools import call_tools, schemas

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


def talk(said: str, turns_left: int = 3) -> Conversation:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    return Conversation("?", messages, answer=7, turn=1, turns_left=turns_left, tokens_left=99)


def test_tools(files: Path):
    (schema,) = schemas([f"{files}/my_tools.py:convert"])
    assert set(schema["function"]["parameters"]["properties"]) == {"amount", "rate"}
    (call,) = re.findall(r"`(<tool_call>.*?</tool_call>)`", PAGE.read_text())
    heard = call_tools(talk(call), tools=[f"{files}/my_tools.py:convert"])
    assert heard == [{"role": "tool", "name": "convert", "content": "3.0"}]


def test_environments(files: Path):
    module = import_named(f"{files}/my_env.py")
    assert (module.hint(talk("it is 7")), module.hint(talk("8", turns_left=0))) == (1.0, 0.0)
    assert module.hint(talk("8"))["content"] == "Not yet: try again."
    guessing, conversation = partial(module.Guessing, most=2)(), talk("7")
    assert asyncio.run(guessing(conversation))["content"] == "1 guesses left"
    assert asyncio.run(guessing(conversation)) == 1.0 and conversation.counts == {"guesses": 2}
    assert function_ref(module.hint).qualname == "hint"


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
