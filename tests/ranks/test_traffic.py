"""Signature test: what travels between controller and ranks does not depend on the length of answers."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.warm import WarmJob

pytestmark = pytest.mark.ranks


def step(folder: Path, max_new_tokens: int) -> dict[str, float]:
    data = folder / "prompts.jsonl"
    rows = [{"prompt": "p" * (1 + i % 5), "answer": "1"} for i in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        Path(__file__).with_name("traffic.py"),
        "--model",
        tiny.checkpoint("qwen2_tied"),
        "--data",
        data,
        "--out",
        folder,
    ]
    end = WarmJob([*map(str, words), "--max-new-tokens", str(max_new_tokens)], ranks=2).end(
        timeout_s=150
    )
    assert end.code == 0, end.err
    return json.loads((folder / f"{max_new_tokens:03d}.json").read_text())


def test_control_bytes_are_the_same_at_8_and_256_new_tokens(tmp_path: Path):
    short, long = step(tmp_path, 8), step(tmp_path, 256)
    assert long["answer_tokens"] > 5 * short["answer_tokens"]  # the answers are longer indeed
    assert short["wire.sent"] == long["wire.sent"]
    assert short["wire.received"] == long["wire.received"]
    assert short["wire.sent"] + short["wire.received"] < 1000 * short["rows"]
    assert short["wire.peek"] < long["wire.peek"]  # text for the eye is metered apart
