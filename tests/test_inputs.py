"""What a command names is looked for before anything else begins, and what may be on the hub is let pass."""

from pathlib import Path

import pytest

from fsdprl.errors import UserError
from fsdprl.inputs import check_inputs
from tests import tiny


@pytest.fixture
def config(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    return {"model": str(tiny.checkpoint()), "data": f"{tmp_path}/rows.jsonl#1", "steps": 3}


def test_what_is_there_and_what_may_be_on_the_hub(config):
    check_inputs(config)
    check_inputs({"model": "Qwen/Qwen3-0.6B", "data": "openai/gsm8k:main@train", "eval_data": ""})
    check_inputs({"model": None, "data": 3, "reward_model": ()})  # another recipe's own meaning


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("data", "{0}/row.jsonl", "--data {0}/row.jsonl: no such file; did you mean {0}/rows.jsonl?"),
        ("data", "{0}/row.jsonl#5", "--data {0}/row.jsonl#5: no such file; did you mean"),
        ("eval_data", "nowhere.parquet", "--eval-data nowhere.parquet: no such file"),
        ("eval_data", "a/b/c", "--eval-data a/b/c: no such file"),
        ("model", "{0}/nowhere", "--model {0}/nowhere: no such folder"),
        ("model", "runs/sft/nowhere", "--model runs/sft/nowhere: no such folder"),
        ("teacher", "./nowhere", "--teacher ./nowhere: no such folder"),
        ("critic", "{0}", "--critic {0}: {0}/config.json is missing"),
        ("reference_model", "{0}/rows.jsonl", "--reference-model {0}/rows.jsonl: no such folder"),
        ("reward_model", ("{model}", "{0}/gone"), "--reward-model {0}/gone: no such folder"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(config, tmp_path, field, value, said):
    many = value if isinstance(value, tuple) else (value,)
    paths = tuple(path.format(tmp_path, model=config["model"]) for path in many)
    with pytest.raises(UserError) as caught:
        check_inputs(config | {field: paths if isinstance(value, tuple) else paths[0]})
    assert str(caught.value).startswith(said.format(tmp_path))


@pytest.mark.parametrize(
    ("given", "wanted"), [("", "/checkpoints/latest"), ("/checkpoints/", "/latest")]
)
def test_a_run_folder_is_no_checkpoint_but_has_one(config, tmp_path: Path, given: str, wanted: str):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").symlink_to(config["model"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"; give {tmp_path}{given.rstrip('/')}{wanted}$"):
        check_inputs(config | {"model": f"{tmp_path}{given}"})
    check_inputs(config | {"model": f"{tmp_path}/checkpoints/latest"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": "b\n', ":3: not valid JSON at column 12"),
        (b'{"prompt": "a"}\r\n{"prompt": "\xff"}\r\n', ":2: not valid UTF-8 at byte 13"),
        (b'\xef\xbb\xbf{"prompt": "a"}\n["b"]\n', ":2: a list, but every line must be an object"),
    ],
)
def test_a_broken_line_is_named(config, tmp_path: Path, text: bytes, said: str):
    (tmp_path / "broken.jsonl").write_bytes(text)
    for field in ("data", "eval_data"):
        with pytest.raises(UserError) as caught:
            check_inputs(config | {field: f"{tmp_path}/broken.jsonl"})
        assert str(caught.value).startswith(f"{tmp_path}/broken.jsonl{said}")
    check_inputs(
        config | {"data": f"{tmp_path}/broken.jsonl#1"}
    )  # what is not used may be anything


@pytest.mark.parametrize("name", ["lr", "critic_lr", "temperature", "weight_decay"])
def test_a_wrong_sign_is_named(config, name: str):
    check_inputs(config | {name: 0.0})
    with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} -0.5: must not be negative$"):
        check_inputs(config | {name: -0.5})


def test_only_the_beginning_is_read(config, tmp_path: Path):
    row = b'{"prompt": "' + b"a" * 1000 + b'"}\n'
    (tmp_path / "long.jsonl").write_bytes(row * 2000 + b"broken\n")
    check_inputs(config | {"data": f"{tmp_path}/long.jsonl"})
