"""Reading datasets: every kind of file, and bad rows reported with file, line and field."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from datafiles import given, write_lines

from fsdprl.data import order
from fsdprl.data.rows import field, fingerprint, open_rows
from fsdprl.errors import UserError

ROWS = [{"prompt": f"p{i}", "answer": i} for i in range(5)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` keeps its copies in the test's folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def read(path: object) -> list:
    rows = open_rows(str(path))
    return [rows[index] for index in range(len(rows))]


def test_json_lines_keep_their_numbers(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xc3\xa9", "b": NaN}\n{"a": 2}')
    rows = open_rows(str(path))
    assert len(rows) == 3 and [rows[0], rows[2]] == [{"a": 1}, {"a": 2}]
    assert rows[1]["a"] == "é" and np.isnan(rows[1]["b"])
    assert [rows.where(i) for i in range(3)] == [f"{path}:1", f"{path}:4", f"{path}:5"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"', r":3: not valid JSON at column 15: Expecting ',' delimiter"),
        (b'{"prompt": "x"} {}', r":3: not valid JSON at column 17: Extra data"),
        (b"prompt", r":3: not valid JSON at column 1: Expecting value"),
        (b'{"prompt": "\xff\xfe"}', r":3: not valid UTF-8 at byte 13 of the line \(b'\\xff"),
        (b'{"prompt": "\\ud800"}', r":3: half of a surrogate pair"),
        (b'["x"]', r":3: a list, but every line must be an object"),
        (b"null", r":3: a null, but every line must be an object"),
        (b"[" * 100_000, r":3: "),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n' + line + b'\n{"prompt": "c"}\n')
    rows = open_rows(str(path))
    assert rows[1] == {"prompt": "b"} and rows[3] == {"prompt": "c"}
    with pytest.raises(UserError, match=message):
        rows[2]


def test_json_list_and_lines_in_a_json_file(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text('\n[\n {"a":\n  1},\n\n {"a": 2}, {"a": 3}\n]\n')
    rows = open_rows(str(path))
    assert read(path) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [rows.where(i) for i in range(3)] == [f"{path}:{n}" for n in (3, 6, 6)]
    write_lines(path, ROWS)
    assert read(path) == ROWS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"a": 1},\n{"a": }\n]', r"rows\.json:3: not valid JSON at column 7"),
        ('[\n{"a": 1}\n{"a": 2}\n]', r"rows\.json:3: not valid JSON: expected ',' or '\]'"),
        ('[\n{"a": 1},\n7]', r"rows\.json:3: a int in a list of rows"),
        ('[{"a": 1},', r"rows\.json:1: not valid JSON"),
        ('{\n"data": [{"a": 1}]\n}', r"rows\.json: neither a list of rows nor one row a line"),
        ("[]", r"--data .*rows\.json: no rows"),
        ("", r"--data .*rows\.json: the file is empty"),
        (" \n \n", r"--data .*rows\.json: no rows"),
    ],
)
def test_a_broken_json_file_is_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        open_rows(str(path))


def test_csv_cells_are_strings(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text('\ufeffprompt,answer\n"a, ""b""\nc",0.50\n\nNA,\n', encoding="utf-8")
    (tmp_path / "t.tsv").write_text("prompt\tanswer\nx,y\t1e5\n")
    assert read(path) == [
        {"prompt": 'a, "b"\nc', "answer": "0.50"},
        {"prompt": "NA", "answer": ""},
    ]
    assert [open_rows(str(path)).where(i) for i in range(2)] == [f"{path}:2", f"{path}:5"]
    assert read(tmp_path / "t.tsv") == [{"prompt": "x,y", "answer": "1e5"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a,b\n1,2\n1,2,3\n", r":3: 3 cells, but the header has 2 columns"),
        (b'a,b\n1,2\n"1\n2', r":3: not valid CSV: unexpected end of data"),
        (b"a,b\n1,2\n\xff,3\n", r":3: not valid UTF-8"),
        (b"a,a\n1,2\n", r":1: the header has an empty or repeated column name"),
        (b"a,b\n", "no rows"),
    ],
)
def test_a_broken_csv_line_is_named(tmp_path: Path, text: bytes, message: str):
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(UserError, match=rf"t\.csv{message}|--data .*t\.csv: {message}"):
        open_rows(str(tmp_path / "t.csv"))


def test_tables(tmp_path: Path, cache: None):
    import datasets

    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(str(tmp_path / "t.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=made).save_to_disk(str(tmp_path / "splits"))
    for name in ("t.parquet", "saved", "splits", "saved/data-00000-of-00001.arrow"):
        assert read(tmp_path / name) == ROWS, name
    assert open_rows(str(tmp_path / "t.parquet")).where(2).endswith("t.parquet row 3")
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(UserError, match=r"--data .*bad\.parquet: ") as caught:
        open_rows(str(tmp_path / "bad.parquet"))
    assert "\n" not in str(caught.value)


def test_a_folder_is_its_most_frequent_kind(tmp_path: Path):
    write_lines(tmp_path / "b.jsonl", ROWS[2:])
    write_lines(tmp_path / "a.jsonl", ROWS[:2])
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "one.json").write_text("[]")
    rows = open_rows(str(tmp_path))
    assert read(tmp_path) == ROWS
    assert rows.where(1).endswith("a.jsonl:2") and rows.where(4).endswith("b.jsonl:3")
    with pytest.raises(IndexError):
        rows[5]


def test_nothing_to_read_is_named(tmp_path: Path):
    write_lines(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.xyz").write_text("x")
    for path, message in {
        "trian.jsonl": r"--data .*trian\.jsonl: no such file; did you mean .*train\.jsonl\?",
        "empty": r"--data .*empty: no \.json, .* file in this folder",
        "a.xyz": r"a\.xyz: unknown kind of file; known are \.json, \.jsonl",
    }.items():
        with pytest.raises(UserError, match=message):
            open_rows(str(tmp_path / path))


def test_a_hub_name_that_cannot_be_reached(cache: None, monkeypatch: pytest.MonkeyPatch):
    import datasets

    asked = []

    def load(name, config, *, split):
        asked.append((name, config, split))
        raise ConnectionError("Couldn't reach the hub\nand much more")

    monkeypatch.setattr(datasets, "load_dataset", load)
    message = r"--eval-data openai/gsm8k:main@test: neither .* reached: Couldn't reach the hub$"
    with pytest.raises(UserError, match=message):
        open_rows("openai/gsm8k:main@test", flag="--eval-data")
    assert asked == [("openai/gsm8k", "main", "test")]


def test_fields():
    row = {"question": "q", "reward_model": {"ground_truth": "7"}, "a.b": 1, "none": None}
    assert field(row, "question", "f:1", "--prompt-key") == "q"
    assert field(row, "reward_model.ground_truth", "f:1", "--answer-key") == "7"
    assert field(row, "a.b", "f:1", "--answer-key") == 1
    for key, message in {
        "questoin": r"f:1: no field 'questoin'; the row has question, reward_model, a\.b, none; "
        r"did you mean --prompt-key question\?",
        "zzz": r"no field 'zzz'; .*name one with --prompt-key",
        "reward_model.gold": "no field 'reward_model.gold'",
        "none": r"f:1: field 'none' is null",
    }.items():
        with pytest.raises(UserError, match=message):
            field(row, key, "f:1", "--prompt-key")


def test_fingerprint_sees_every_change(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    seen = set()
    for content in (b"a" * 3000, b"a" * 2999 + b"b", b"a" * 2999, b""):
        path.write_bytes(content)
        seen.add(fingerprint(str(path)))
    assert len(seen) == 4 and fingerprint("owner/name") == "owner/name"
    assert fingerprint(str(tmp_path)) != fingerprint(str(path))


FIXED = [[0, 1, 4, 2, 3, 6, 7, 5], [2, 1, 7, 4, 6, 0, 3, 5], [3, 1, 6, 2, 4, 7, 0, 5]]


def test_permutations_are_fixed_for_good():
    """A resumed run must find the order it began with: these values may never change."""
    assert order.permutation(8, 0, 0).tolist() == FIXED[0]
    assert order.permutation(8, 0, 1).tolist() == FIXED[1]
    assert order.permutation(8, 1, 0).tolist() == FIXED[2]


def test_window_visits_every_row_once_a_pass():
    whole = order.window(10, 3, 0, 30)
    assert sorted(whole[:10]) == sorted(whole[10:20]) == list(range(10))
    assert list(whole[:10]) != list(whole[10:20]) != list(whole[20:])
    for cursor, size in [(0, 4), (7, 6), (9, 1), (10, 10), (5, 25), (3, 0)]:
        assert order.window(10, 3, cursor, size).tolist() == whole[cursor : cursor + size].tolist()
    with pytest.raises(ValueError, match="window"):
        order.window(0, 3, 0, 1)


def test_orders_are_uniform():
    """Each row lands on each place about equally often, over seeds and over passes."""
    for draws in (
        [order.permutation(5, seed, 0) for seed in range(4000)],
        [order.permutation(5, 0, epoch) for epoch in range(4000)],
    ):
        counts = Counter((place, row) for draw in draws for place, row in enumerate(draw.tolist()))
        assert len(counts) == 25
        assert all(abs(count - 800) < 5 * 800**0.5 for count in counts.values())
        assert len({tuple(draw.tolist()) for draw in draws}) == 120


def test_split():
    rows = np.arange(100, 200)
    train, held = order.split(rows, 0.1, 7)
    assert len(held) == 10 and sorted([*train, *held]) == list(range(100, 200))
    assert list(held) == sorted(held) and list(train) == sorted(train)
    assert order.split(rows, 0.1, 7)[1].tolist() == held.tolist()
    assert order.split(rows, 0.1, 8)[1].tolist() != held.tolist()
    assert len(order.split(rows, 0.001, 7)[1]) == 1
    assert [len(part) for part in order.split(rows, 0.0, 7)] == [100, 0]
    for share in (1.0, -1.0, 0.999):
        with pytest.raises(ValueError, match=r"share|leaves none"):
            order.split(rows, share, 7)


def test_real_files_load():
    assert len(open_rows(str(given("gsm8k_train.jsonl")))) == 7473
    assert set(read(given("dpo_zh_sharegpt.json"))[0]) == {"conversations", "chosen", "rejected"}
    assert len(read(given("deepmath_sample.jsonl"))) == 4994
