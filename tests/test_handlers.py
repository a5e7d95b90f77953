"""Rows as other tools write them, unmodified: what is asked, what is the answer, what is learnt."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from datafiles import given, write_lines

from fsdprl.data.handlers import HANDLERS, Handled, suited
from fsdprl.data.mixture import Mixture, read_as
from fsdprl.data.rows import fingerprint, open_rows
from fsdprl.errors import UserError
from fsdprl.prompts import Prompts

DAPO_PROMPT = "Solve ... The last line of your response should be of the form Answer: $Answer ...\n\nWhat is 2+2?"
ASKED = [{"role": "user", "content": "What is 2+2?"}]

PROMPT_ROWS = {
    "trl": ({"prompt": ASKED, "solution": "$4$", "task": "math"}, ASKED, "$4$"),
    "trl standard": ({"prompt": "What is 2+2?", "ground_truth": 4}, "What is 2+2?", 4),
    "verl": (
        {
            "data_source": "math_dapo",
            "prompt": [{"content": DAPO_PROMPT, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
        [{"content": DAPO_PROMPT, "role": "user"}],
        "34",
    ),
    "open-instruct": ({"messages": ASKED, "ground_truth": ["4"], "dataset": ["gsm8k"]}, ASKED, "4"),
    "open-instruct sft": (
        {"id": "a", "messages": [*ASKED, {"role": "assistant", "content": "4"}], "source": "x"}, ASKED, "4",
    ),
    "nemo-rl": ({"input": "What is 2+2?", "output": "4"}, "What is 2+2?", "4"),
    "nemo-rl math": ({"problem": "What is 2+2?", "expected_answer": "4"}, "What is 2+2?", "4"),
    "deepscaler": ({"problem": "What is 2+2?", "answer": "4", "solution": "It is 4."}, "What is 2+2?", "4"),
    "gsm8k": ({"question": "What is 2+2?", "answer": "<<2+2=4>>4\n#### 4"}, "What is 2+2?", "<<2+2=4>>4\n#### 4"),
    "deepmath": (
        {"question": "What is 2+2?", "final_answer": "4", "difficulty": 1.0, "topic": "a", "r1_solution_1": "..."},
        "What is 2+2?",
        "4",
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "What is 2+2?"}, {"from": "gpt", "value": "4"}]}, ASKED, "4",
    ),
    "alpaca": ({"instruction": "Add.", "input": "2+2", "output": "4"}, "Add.\n2+2", "4"),
    "swift": ({"query": "What is 2+2?", "response": "4"}, "What is 2+2?", "4"),
}  # fmt: skip


@pytest.mark.parametrize("form", PROMPT_ROWS)
def test_prompts_of_other_tools(form: str, tmp_path: Path):
    row, prompt, answer = PROMPT_ROWS[form]
    rows = read_as(open_rows(write_lines(tmp_path / "rows.jsonl", [row, row])), "prompt")
    assert rows[1]["prompt"] == prompt and rows[1]["answer"] == answer
    others = set(row) - {"prompt", "answer"}
    assert {key: rows[1][key] for key in others} == {key: row[key] for key in others}


def test_rows_that_say_it_already_stay_as_they_are(tmp_path: Path):
    for purpose, row in [
        ("prompt", {"prompt": "a", "answer": "b", "solution": "c"}),
        ("prompt", {"prompt": "a"}),
        ("example", {"messages": ASKED}),
        ("example", {"prompt": "a", "completion": "b", "instruction": "c", "output": "d"}),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ("preference", {"conversations": [], "chosen": {}, "rejected": {}}),
        ("preference", {"prompt": "a", "completion": "b", "label": True}),
        ("prompt", {"nothing": 1}),
    ]:
        rows = open_rows(write_lines(tmp_path / "rows.jsonl", [row]))
        assert read_as(rows, purpose) is rows, (purpose, row)


TURNS = [*ASKED, {"role": "assistant", "content": "4"}]
EXAMPLE_ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"instruction": "Add.", "input": "2+2", "output": "4"},
        {"prompt": "Add.\n2+2", "completion": "4"},
    ),
    (
        {"instruction": "And?", "output": "5", "system": "Be brief.", "history": [["Hi", "Ho"]]},
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Ho"},
                {"role": "user", "content": "And?"},
            ],
            "completion": "5",
        },
    ),
    ({"messages": json.dumps(TURNS)}, {"messages": TURNS}),
    (
        {
            "conversations": [
                {"from": "human", "value": "What is 2+2?"},
                {"from": "gpt", "value": "4"},
            ],
            "system": "S",
        },
        {"messages": [{"role": "system", "content": "S"}, *TURNS]},
    ),
    ({"question": "a", "answer": "b"}, {"prompt": "a", "completion": "b"}),
    ({"query": "a", "response": "b"}, {"prompt": "a", "completion": "b"}),
]


@pytest.mark.parametrize(("row", "made"), EXAMPLE_ROWS)
def test_examples_of_other_tools(row, made, tmp_path: Path):
    rows = read_as(open_rows(write_lines(tmp_path / "rows.jsonl", [row])), "example")
    assert rows[0] == row | made


PREFERENCE_ROWS = [
    ({"instruction": "Add.", "input": "2+2", "chosen": "4", "rejected": "5"},
     {"prompt": "Add.\n2+2", "chosen": "4", "rejected": "5"}),
    ({"messages": TURNS, "rejected_response": "5"},
     {"prompt": ASKED, "chosen": TURNS[1], "rejected": "5"}),
    ({"question": "2+2?", "chosen": "4", "rejected": "5"}, {"prompt": "2+2?"}),
    ({"query": "2+2?", "response": "4", "rejected_response": "5"},
     {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
    ({"question": "2+2?", "response": "5", "label": "false"}, {"prompt": "2+2?", "completion": "5", "label": False}),
]  # fmt: skip


@pytest.mark.parametrize(("row", "made"), PREFERENCE_ROWS)
def test_preferences_of_other_tools(row, made, tmp_path: Path):
    rows = read_as(open_rows(write_lines(tmp_path / "rows.jsonl", [row])), "preference")
    assert rows[0] == row | made


def test_a_row_that_does_not_fit_is_named(tmp_path: Path):
    path = write_lines(
        tmp_path / "rows.jsonl",
        [{"instruction": "a", "output": "b"}, {"instruction": "", "output": "c"}],
    )
    rows = read_as(open_rows(path), "example")
    with pytest.raises(
        UserError, match=r"rows\.jsonl:2: no row for the handler alpaca: instruction is empty"
    ):
        rows[1]
    strange = write_lines(
        tmp_path / "s.jsonl", [{"conversations": [{"from": "robot", "value": "x"}]}]
    )
    with pytest.raises(UserError, match="a message from 'robot'; known are human"):
        read_as(open_rows(strange), "example")[0]


def test_handlers_by_name_with_keys(tmp_path: Path):
    rows = open_rows(
        write_lines(tmp_path / "rows.jsonl", [{"frage": "2+2?", "loesung": {"kurz": "4"}}])
    )
    made = Handled(rows, "math", "prompt", {"prompt": "frage", "answer": "loesung.kurz"})
    assert made[0]["prompt"] == "2+2?" and made[0]["answer"] == "4"
    with pytest.raises(UserError, match="there is no column 'antwort'"):
        Handled(rows, "math", "prompt", {"answer": "antwort"})[0]
    with pytest.raises(UserError, match="no handler 'maths'; known are alpaca"):
        Handled(rows, "maths", "prompt")
    assert set(HANDLERS) >= {
        "alpaca",
        "math",
        "pairwise",
        "sharegpt",
        "messages",
        "prompt-completion",
        "unpaired",
    }


def test_text_and_arrow_files_and_subsets(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.txt").write_text("\ufeffeins\n\n zwei \n", encoding="utf-8")
    rows = open_rows(str(tmp_path / "a.txt"))
    assert [rows[i]["text"] for i in range(2)] == ["eins", " zwei "] and rows.where(1).endswith(
        "a.txt:3"
    )
    assert read_as(rows, "prompt")[0]["prompt"] == "eins"
    (tmp_path / "b.txt").write_bytes(b"ok\n\xff\n")
    with pytest.raises(UserError, match=r"b\.txt:2: not valid UTF-8"):
        open_rows(str(tmp_path / "b.txt"))
    datasets.Dataset.from_list(
        [{"question": str(i), "answer": "x"} for i in range(9)]
    ).save_to_disk(str(tmp_path / "set"))
    arrow = next((tmp_path / "set").glob("*.arrow"))
    rows = open_rows(f"{arrow}#4")
    taken = [rows[i]["question"] for i in range(4)]
    assert len(set(taken)) == 4 and taken == sorted(taken) and len(rows) == 4
    assert rows.where(0).endswith(f"row {int(taken[0]) + 1}")
    assert [open_rows(f"{arrow}#4")[i]["question"] for i in range(4)] == taken
    with pytest.raises(UserError, match="#10: it has 9 rows"):
        open_rows(f"{arrow}#10")
    assert fingerprint(f"{arrow}#4") != fingerprint(str(arrow))
    copied = tmp_path / "copy.arrow"
    copied.write_bytes(arrow.read_bytes())
    assert fingerprint(str(copied)) == fingerprint(str(arrow))


def mixed(tmp_path: Path, *tables: str) -> str:
    (tmp_path / "mix.toml").write_text("\n".join(f"[[set]]\n{table}" for table in tables))
    return str(tmp_path / "mix.toml")


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    write_lines(tmp_path / "a.jsonl", [{"question": f"a{i}", "answer": i} for i in range(30)])
    write_lines(tmp_path / "b.jsonl", [{"prompt": ASKED, "solution": str(i)} for i in range(10)])
    return tmp_path


def test_sets_are_mixed_by_their_shares(sets: Path):
    path = mixed(
        sets,
        'path = "a.jsonl"\nweight = 1',
        'path = "b.jsonl"\nweight = 1\nname = "bee"\nrewards = ["numeric"]',
    )
    rows = read_as(open_rows(path), "prompt")
    all_rows = [rows[i] for i in range(len(rows))]
    first = [row for row in all_rows if row["data_source"] == "a"]
    second = [row for row in all_rows if row["data_source"] == "bee"]
    assert (len(first), len(second)) == (20, 20)
    assert len({row["prompt"] for row in first}) == 20  # read in part, none twice
    assert sorted(row["answer"] for row in second) == sorted(
        [str(i) for i in range(10)] * 2
    )  # twice through
    assert all(row["_rewards"] == ["numeric"] for row in second) and "_rewards" not in first[0]
    assert "b.jsonl:" in rows.where(39)
    again = read_as(open_rows(path), "prompt")
    assert [again[i] for i in range(40)] == all_rows
    plain = open_rows(mixed(sets, 'path = "a.jsonl#5"', 'path = "b.jsonl"'))
    assert isinstance(plain, Mixture) and len(plain) == 15


def test_set_keys_and_handlers(sets: Path):
    path = mixed(
        sets,
        'path = "a.jsonl"\nkeys = {prompt = "answer", answer = "question"}',
        'path = "b.jsonl"\nhandler = "math"',
    )
    rows = read_as(open_rows(path), "prompt")
    assert rows[0]["answer"] == "a0" and rows[30]["answer"] == "0"
    before = fingerprint(path)
    write_lines(sets / "b.jsonl", [{"prompt": "x", "solution": "0"}])
    assert fingerprint(path) != before


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (['path = "a.jsonl"\nwieght = 1'], r"set 1: wieght = 1; known are path"),
        (['name = "x"'], "set 1: no path"),
        (['path = "a.jsonl"\nweight = 1', 'path = "b.jsonl"'], "give every set a positive weight"),
        (['path = "a.jsonl"\nhandler = "x"'], "no handler 'x'"),
        (["path = "], r"mix\.toml: Invalid value"),
        (['path = "nowhere.jsonl"'], r"nowhere\.jsonl: no such file"),
    ],
)
def test_mistakes_in_mixtures(sets: Path, tables: list[str], message: str):
    with pytest.raises(UserError, match=message):
        open_rows(mixed(sets, *tables))
    (sets / "mix.toml").write_text("x = 1")
    with pytest.raises(UserError, match=r"lists data sets, each under \[\[set\]\]"):
        open_rows(str(sets / "mix.toml"))


def test_real_files(tmp_path: Path):
    gsm = read_as(open_rows(f"{given('gsm8k_train.jsonl')}#50"), "prompt")
    assert all(
        "####" in gsm[i]["answer"] and gsm[i]["prompt"] == gsm[i]["question"] for i in range(50)
    )
    deep = read_as(open_rows(str(given("deepmath_sample.jsonl"))), "prompt")
    assert deep[0]["answer"] == "1" and deep[0]["prompt"].startswith("Find the least")
    pairs = open_rows(str(given("dpo_zh_sharegpt.json")))
    assert suited(pairs[0], "preference") == ""  # read natively
    learnt = read_as(open_rows(str(given("deepmath_sample.jsonl"))), "example")
    assert learnt[0]["messages"][0]["role"] == "system"


def test_prompts_read_them_all(tmp_path: Path, sets: Path):
    """As the recipes do, without a flag; and prompts that are too long keep their end if asked to."""
    words = copy.deepcopy(tiny.tokenizer())
    words.chat_template = None
    words.save_pretrained(model := str(tmp_path / "model"))
    path = mixed(sets, 'path = "a.jsonl"\nrewards = ["numeric"]')
    prompts = Prompts(path, tokenizer_path=model, answer_key="answer", max_prompt_length=9)
    prompt = prompts.first(1)[0]
    assert (prompt.text, prompt.answer, prompt.rewards) == ("a0", 0, ["numeric"])
    assert prompt.meta["data_source"] == "a" and "_rewards" not in prompt.meta
    for policy, text in (("truncate", "a1"), ("truncate_left", "10")):
        cut = Prompts(
            path,
            tokenizer_path=model,
            answer_key="answer",
            max_prompt_length=2,
            long_prompts=policy,
        )
        assert cut.first(11)[10].text == text and len(cut.first(11)[10].ids) == 2
        assert cut.counts == {"rows": 30, "cut": 20}
