"""What users get wrong: each function makes it in a folder and returns the flags that point to it."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.faults import trial


def rows(folder: Path, lines: list[Any]) -> dict[str, Any]:
    """A data set of these lines: text as it is, anything else as JSON."""
    path = folder / "rows.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return {"data": path}


def good(count: int) -> list[Any]:
    return [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(count)]


def misspelt_flag(folder: Path) -> dict[str, Any]:
    return {"lerning-rate": 1e-5}


def misspelt_key(folder: Path) -> dict[str, Any]:
    path = folder / "config.toml"
    path.write_text("lr = 1e-5\ngrop_size = 4\n")
    return {"config": path}


def wrong_type(folder: Path) -> dict[str, Any]:
    return {"lr": "fast"}


def out_of_range(folder: Path) -> dict[str, Any]:
    return {"run.keep": -1}


def impossible_pair(folder: Path) -> dict[str, Any]:
    return {"run.forget": "optimizer"}


def gated_model(folder: Path) -> dict[str, Any]:
    return {"model": "nobody/nothing"}


def no_model(folder: Path) -> dict[str, Any]:
    return {"model": folder / "nowhere"}


def copied_model(folder: Path) -> Path:
    return Path(shutil.copytree(trial.files()["model"], folder / "model"))


def pickled_model(folder: Path) -> dict[str, Any]:
    model = copied_model(folder)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return {"model": model}


def own_code(folder: Path) -> dict[str, Any]:
    model = copied_model(folder)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (model / "config.json").write_text(json.dumps(config))
    return {"model": model}


def mute_model(folder: Path) -> dict[str, Any]:
    """Whatever token it draws first ends the answer."""
    model = copied_model(folder)
    config = json.loads((model / "generation_config.json").read_text())
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    config["eos_token_id"] = [*range(size)]
    (model / "generation_config.json").write_text(json.dumps(config))
    return {"model": model}


def no_template(folder: Path) -> dict[str, Any]:
    model = copied_model(folder)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "1 + 1 ="}]
    return {"model": model} | rows(folder, [{"prompt": messages, "answer": "2"}] * 8)


def broken_json(folder: Path) -> dict[str, Any]:
    return rows(folder, [*good(2), b'{"prompt": "3 +', *good(8)])


def bad_utf8(folder: Path) -> dict[str, Any]:
    return rows(folder, [*good(1), b'{"prompt": "\xff\xfe", "answer": "1"}', *good(8)])


def missing_field(folder: Path) -> dict[str, Any]:
    return rows(folder, [*good(1), {"answer": "1"}, *good(8)])


def null_field(folder: Path) -> dict[str, Any]:
    return rows(folder, [*good(1), {"prompt": None, "answer": "1"}, *good(8)])


def mistyped_field(folder: Path) -> dict[str, Any]:
    return rows(folder, [*good(1), {"prompt": 7, "answer": "1"}, *good(8)])


def no_rows(folder: Path) -> dict[str, Any]:
    return rows(folder, [])


def long_row() -> dict[str, str]:
    return {"prompt": "1 + " * 400, "answer": "1"}


def all_long(folder: Path) -> dict[str, Any]:
    return rows(folder, [long_row()] * 8) | {"long-prompts": "drop"}


def some_long(folder: Path) -> dict[str, Any]:
    return rows(folder, [long_row(), *good(20)])


def one_long(folder: Path) -> dict[str, Any]:
    return rows(folder, [*good(239), long_row()])


def other_run(folder: Path) -> dict[str, Any]:
    """The output folder holds a run that differs in one option."""
    out = shutil.copytree(trial.undisturbed(1), folder / "other")
    return {"run.out": out, "lr": 2e-6}
