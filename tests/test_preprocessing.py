"""Data sets into parquet: what is kept, what is dropped and why, and the same file for any number of workers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from datafiles import given, write_lines

from fsdprl.data.preprocessing import Preprocess, preprocess
from fsdprl.data.rows import open_rows
from fsdprl.data.templates import R1, asked
from fsdprl.errors import UserError
from fsdprl.prompts import Prompts

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "preprocess_data"


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("words")
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def read(path: Path) -> list[dict]:
    rows = open_rows(str(path))
    return [rows[i] for i in range(len(rows))]


def test_lengths_and_reasons(tmp_path: Path, words: str):
    """One character is one token, and the template adds 19 to a single user's message."""
    texts = ["x" * 10, "x" * 11, "x" * 12, "", "   ", None]
    path = write_lines(
        tmp_path / "rows.jsonl", [{"question": t, "answer": str(i)} for i, t in enumerate(texts)]
    )
    out = tmp_path / "deep" / "out.parquet"
    manifest = preprocess(Preprocess(path, str(out), tokenizer=words, max_length=19 + 11))
    rows = read(out)
    assert [row["prompt"] for row in rows] == texts[:2]  # as long as the limit stays, one more goes
    assert [row["tokens"] for row in rows] == [
        manifest["tokens"]["max"] - 1,
        manifest["tokens"]["max"],
    ]
    assert manifest["dropped"] == {"too_long": 1, "unusable": 2, "empty": 1}
    assert manifest["dropped_places"]["too_long"] == [f"{path}:3"]
    assert (manifest["rows_read"], manifest["rows_written"]) == (6, 2)
    assert json.loads(Path(f"{out}.json").read_text()) == manifest


def test_pairs_count_both_sides(tmp_path: Path, words: str):
    pairs = [{"instruction": "q", "chosen": "a", "rejected": "b" * n} for n in (1, 50, 200)]
    path = write_lines(tmp_path / "rows.jsonl", pairs)
    options = Preprocess(
        path, str(tmp_path / "out.parquet"), tokenizer=words, purpose="preference", max_length=100
    )
    assert preprocess(options)["dropped"] == {"too_long": 1}
    assert [row["rejected"] for row in read(tmp_path / "out.parquet")] == ["b", "b" * 50]


def test_templates(tmp_path: Path, words: str):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert asked("Q", "native") == "Q" and asked(chat, "native") == chat
    assert asked(chat, "empty") == "S\nQ" and asked("Q", "r1") == f"Q\n{R1}"
    assert (
        asked(chat, "r1") == [chat[0], {"role": "user", "content": f"Q\n{R1}"}]
        and chat[1]["content"] == "Q"
    )
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": chat, "answer": 1}])
    jinja = tmp_path / "mine.jinja"
    jinja.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    sizes = {}
    for template in ("native", "empty", str(jinja)):
        out = tmp_path / "out.parquet"
        sizes[template] = preprocess(
            Preprocess(path, str(out), tokenizer=words, template=template)
        )["tokens"]["max"]
    assert sizes["empty"] == 3 and sizes[str(jinja)] == 2 and sizes["native"] > 20
    with pytest.raises(UserError, match="--template r2: neither one of native, empty, r1"):
        preprocess(Preprocess(path, "x", template="r2"))


def test_columns_of_several_types_and_recipes_read_the_file(tmp_path: Path, words: str):
    rows = [
        {"frage": "a", "gold": 1, "more": {"x": 1}},
        {"frage": "b", "gold": "zwei", "more": None},
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    options = Preprocess(
        path, str(tmp_path / "out.parquet"), handler="math", keys=("prompt=frage", "answer=gold")
    )
    assert preprocess(options)["columns"] == ["frage", "gold", "more", "prompt", "answer"]
    prompts = Prompts(options.output, tokenizer_path=words, answer_key="answer")
    assert [prompt.answer for prompt in prompts.first(2)] == ["1", "zwei"]
    assert prompts.first(1)[0].messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"handler": "maths"}, "--handler maths: known are auto, alpaca"),
        ({"max_length": 5}, "give a --tokenizer"),
        ({"keys": ("prompt",), "handler": "math"}, "--keys prompt: write name=column"),
        ({"keys": ("prompt=q",)}, "--keys needs a --handler"),
        ({"handler": "alpaca"}, "no row is left: {'unusable': 1}"),
    ],
)
def test_mistakes(tmp_path: Path, options: dict, message: str):
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "a"}])
    with pytest.raises(UserError, match=message):
        preprocess(Preprocess(path, str(tmp_path / "o.parquet"), **options))


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("gsm8k_train.jsonl", 400),
        pytest.param("deepmath_sample.jsonl", 600, marks=pytest.mark.slow),
    ],
)
def test_workers_write_the_same_file_as_the_command_does(
    tmp_path: Path, words: str, name: str, longest: int
):
    source = f"{given(name)}#1200"
    manifest = preprocess(
        Preprocess(source, str(tmp_path / "one.parquet"), tokenizer=words, max_length=longest)
    )
    command = [sys.executable, str(SCRIPT), "--input", source, "--output", str(tmp_path / "two.parquet"), "--tokenizer",
               words, "--max-length", str(longest), "--workers", "2", "--log-interval", "500"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "two.parquet.json").read_text()) == manifest
    assert 0 < manifest["dropped"]["too_long"] < 400 and "512 of 1200 rows" in done.stderr
    assert "rows/s" in done.stdout
    first = manifest["dropped_places"]["too_long"][0]
    count = manifest["dropped"]["too_long"]
    assert f"dropped as too_long: {count}, the first at {first} (more in " in done.stdout
    wrong = subprocess.run(
        [*command[:2], "--input", "no.jsonl", "--output", "x"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        wrong.returncode == 1
        and "no.jsonl: no such file" in wrong.stderr
        and len(wrong.stderr.splitlines()) == 1
    )
