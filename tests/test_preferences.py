"""Preference data: what counts as prompt and completion in each form of row, and which rows a batch gets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import fake
import numpy as np
import pytest
import tiny
import torch
from datafiles import given, write_lines

from fsdprl import feeding
from fsdprl.config import Flags
from fsdprl.data.preference_rows import PreferenceFormat, PreferenceRows
from fsdprl.errors import UserError
from fsdprl.preferences import Preferences, preference_sets

MODEL = str(tiny.checkpoint("qwen3"))
ASK = [{"role": "user", "content": "why?"}]
SAY = {
    "yes": [{"role": "assistant", "content": "yes"}],
    "no": [{"role": "assistant", "content": "no"}],
}
SYSTEM = {"role": "system", "content": "be kind"}
HEAD = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"


def form(folder: Path, rows: list[Any], **options: Any) -> PreferenceFormat:
    return PreferenceFormat(
        str(write_lines(folder / "rows.jsonl", rows)), MODEL, **{"max_length": 99} | options
    )


def said(source: PreferenceRows, index: int, answer: int | None = None) -> tuple[str, str]:
    """The text before the learnt tokens and the learnt tokens' own, which end the row."""
    (row,) = source.rows([index], None if answer is None else [answer])
    start = int(np.flatnonzero(row.mask)[0])
    assert row.mask[start:].all()
    decode = source.tokenizer.decode
    return decode(row.ids[:start].tolist()), decode(row.ids[start:].tolist())


FORMS = {
    "texts": {"prompt": "why?", "chosen": "yes", "rejected": "no"},
    "messages": {"prompt": ASK, "chosen": SAY["yes"], "rejected": SAY["no"]},
    "one message": {"prompt": ASK, "chosen": SAY["yes"][0], "rejected": SAY["no"][0]},
    "whole conversations": {"chosen": ASK + SAY["yes"], "rejected": ASK + SAY["no"]},
    "both": {"prompt": "why?", "chosen": ASK + SAY["yes"], "rejected": ASK + SAY["no"]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "why?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "messages field": {"messages": ASK, "chosen": "yes", "rejected": "no"},
}


@pytest.mark.parametrize("kind", FORMS)
def test_every_form_of_a_pair_says_the_same(tmp_path: Path, kind: str):
    source = PreferenceRows(form(tmp_path, [FORMS[kind]]))
    assert source.paired and len(source) == 2
    assert said(source, 0) == (HEAD, "yes<|im_end|>") and said(source, 1) == (HEAD, "no<|im_end|>")
    assert [source.better(0), source.better(1)] == [True, False]
    # A character is a token, and so are <|im_start|> and <|im_end|>.
    tokens, loss_tokens = source.measure([0, 1])
    assert (tokens.tolist(), loss_tokens.tolist()) == ([27, 26], [4, 3])


def test_several_turns_and_systems(tmp_path: Path):
    more = [{"role": "user", "content": "sure?"}]
    words = {"chosen": "yes", "rejected": "no"}
    rows = [
        {name: [SYSTEM, *ASK, *SAY["yes"], *more, *SAY[word]] for name, word in words.items()},
        {"system": "be kind", "conversations": ASK, "chosen": "yes", "rejected": "no"},
        {"prompt": ASK, "chosen": SAY["yes"], "rejected": SAY["no"]},
    ]
    source = PreferenceRows(form(tmp_path, rows, system="be short"))
    head, answer = said(source, 1)
    assert (
        answer == "no<|im_end|>"
        and head.count("yes<|im_end|>") == 1
        and "sure?" in head
        and "be kind" in head
    )
    assert "be kind" in said(source, 2)[0] and "be short" not in said(source, 2)[0]
    assert "be short" in said(source, 4)[0]
    # Two assistant turns in a completion are both learnt, what the user says between them is not.
    two = {"prompt": ASK, "chosen": [*SAY["yes"], *more, *SAY["yes"]], "rejected": "no"}
    (row,) = PreferenceRows(form(tmp_path, [two])).rows([0])
    assert row.mask.sum() == 8 and not row.mask[np.flatnonzero(row.mask)[0] :].all()


def test_raw_texts(tmp_path: Path):
    source = PreferenceRows(form(tmp_path, [FORMS["texts"]], prompt_format="raw"))
    assert said(source, 0) == ("why?", "yes<|im_end|>")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*holds messages"):
        PreferenceRows(form(tmp_path, [FORMS["messages"]], prompt_format="raw")).check(0)


def test_labelled_completions(tmp_path: Path):
    rows = [
        {"prompt": "why?", "completion": "yes", "label": True},
        {
            "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "no"}],
            "label": 0,
        },
        {"prompt": ASK, "completion": SAY["no"], "label": False},
    ]
    source = PreferenceRows(form(tmp_path, rows))
    assert not source.paired and len(source) == 3
    assert [said(source, i) for i in range(3)] == [
        (HEAD, f"{w}<|im_end|>") for w in ("yes", "no", "no")
    ]
    assert [source.better(i) for i in range(3)] == [True, False, False]
    assert said(source, 0, answer=2) == (HEAD, "no<|im_end|>")


def test_an_answer_to_another_prompt_is_cut_and_never_refused(tmp_path: Path):
    rows = [
        {"prompt": "a" * 20, "completion": "b", "label": 1},
        {"prompt": "a", "completion": "b" * 30, "label": 0},
    ]
    source = PreferenceRows(form(tmp_path, rows, max_length=52))
    (row,) = source.rows([0], [1])
    assert len(row.ids) == 52 and 0 < row.mask.sum() < 31
    with pytest.raises(UserError, match=r"rows\.jsonl:1: 41 tokens, more than --max-length 30"):
        PreferenceRows(form(tmp_path, rows, max_length=30)).rows([0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "needs fields 'chosen' and 'rejected', or a completion and 'label'"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "field 'rejected' is an empty string"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "field 'rejected' is null"),
        ({"chosen": "b", "rejected": "c"}, "no field 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "must be a string or a non-empty list|'rejected' is"),
        ({"prompt": "a", "chosen": [], "rejected": "c"}, "field 'chosen' is"),
        ({"chosen": ASK + SAY["yes"], "rejected": SAY["no"]}, "one of 'chosen' and 'rejected' holds its prompt"),
        ({"chosen": ASK + SAY["yes"], "rejected": [SYSTEM, *ASK, *SAY["no"]]}, "must share a prompt"),
        ({"conversations": [{"from": "martian", "value": "a"}], "chosen": "b", "rejected": "c"}, "from 'martian'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "gap": "x"}, "field 'gap' is 'x', but must be a number"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "field 'label' is 'good', not true or false"),
        ({"prompt": "a", "label": 1}, "name the completion with --completion-key"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path: Path, row: dict, message: str):
    good = (
        FORMS["texts"] | {"gap": 1}
        if "label" not in row
        else {"prompt": "a", "completion": "b", "label": 1}
    )
    margin = {"margin_key": "gap"} if "gap" in row else {}
    rows = [row] if message.startswith("needs") else [good, row]
    with pytest.raises(UserError, match=rf"rows\.jsonl:{len(rows)}: .*({message})"):
        Preferences(form(tmp_path, rows, **margin), paired="label" not in row)


# ---- batches -----------------------------------------------------------------------------------


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = fake.install(monkeypatch, 3)
    made.flags = Flags()
    made.verbs |= feeding.VERBS
    return made


def pairs(count: int) -> list[dict]:
    return [
        {"prompt": f"p{i}", "chosen": "c" * (1 + i % 3), "rejected": "r" * (1 + i), "gap": i / 2}
        for i in range(count)
    ]


def test_a_pair_is_two_neighbouring_rows_on_one_rank(tmp_path: Path, controller: Any):
    data = Preferences(form(tmp_path, pairs(8), margin_key="gap"), paired=True, seed=3).measure()
    batch = data.batch(0, 5)
    wanted = data.at(0, 5)
    assert len(data) == 8 and len(batch) == 10
    assert batch["chosen"].tolist() == [True, False] * 5
    assert (
        batch["unit"][::2].tolist() == batch["unit"][1::2].tolist()
        and len(set(batch["unit"].tolist())) == 5
    )
    assert (
        batch.ranks[::2].tolist() == batch.ranks[1::2].tolist()
        and len(set(batch.ranks.tolist())) == 3
    )
    assert batch["margin"].tolist() == [i / 2 for i in wanted.tolist() for _ in range(2)]
    assert batch["loss_tokens"].tolist() == [n for i in wanted.tolist() for n in (2 + i % 3, 2 + i)]
    assert batch["completion"].tolist() == [n for i in wanted.tolist() for n in (2 * i, 2 * i + 1)]


def test_a_pair_with_one_long_completion_goes_as_a_whole(tmp_path: Path, controller: Any):
    rows = form(tmp_path, pairs(8), max_length=28)
    with pytest.raises(UserError, match="2 of 16 rows are longer than --max-length 28"):
        Preferences(rows, paired=True).measure()
    data = Preferences(replace(rows, over_length="drop"), paired=True).measure()
    assert data.all().tolist() == [0, 1, 2, 3, 4, 5]
    single = Preferences(replace(rows, over_length="drop"), paired=False).measure()
    assert len(single) == 14
    train, held_out = data.split(0.3)
    assert len(train) == 4 and sorted([*train.all(), *held_out.all()]) == [0, 1, 2, 3, 4, 5]


def test_labels_and_mismatches(tmp_path: Path, controller: Any):
    rows = [{"prompt": f"p{i}", "completion": "c" * (i + 1), "label": i % 2} for i in range(6)]
    data = Preferences(form(tmp_path, rows), paired=False).measure()
    batch = data.load(np.array([4, 1, 2]))
    assert batch["desirable"].tolist() == [False, True, False]
    mixed = data.mismatched(np.array([4, 1, 2]))
    assert mixed["loss_tokens"].tolist() == [3, 4, 6]  # the next one's completion, and its end


def test_held_out_sets(tmp_path: Path, controller: Any):
    rows = form(tmp_path, pairs(8))
    other = str(write_lines(tmp_path / "other.jsonl", pairs(3)))
    train, held_out = preference_sets(rows, other, 0.5, paired=True, seed=0)
    assert len(train) == 8 and len(held_out) == 3
    assert held_out.load(held_out.all())["completion"].tolist() == [16, 17, 18, 19, 20, 21]
    train, held_out = preference_sets(rows, "", 0.5, paired=True, seed=0)
    assert len(train) == len(held_out) == 4
    assert not torch.isin(
        train.load(train.all())["completion"], held_out.load(held_out.all())["completion"]
    ).any()


def test_real_sharegpt_pairs():
    path = str(given("dpo_zh_sharegpt.json"))
    source = PreferenceRows(PreferenceFormat(path, MODEL, 10_000))
    assert source.paired and len(source) == 600
    for index in range(600):
        source.check(index)
    assert said(source, 3)[1].endswith("<|im_end|>")
