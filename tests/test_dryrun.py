"""What --dry-run says a model takes."""

import re
from pathlib import Path

import pytest
import tiny
from transformers import Qwen2Config

from fsdprl.config import Flags
from fsdprl.controller import Controller, set_current
from fsdprl.dryrun import engine_estimate, memory_estimate, show
from fsdprl.options import EngineOptions, ShardingOptions
from fsdprl.prompts import prompt_sets
from fsdprl.world import World
from tests.recipes.stage import recipe

GIB = 2**30
OPTIONS = ShardingOptions(tokens_per_microbatch=1024, head_chunk_tokens=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config without weights: 2 layers, hidden 64, vocabulary 5000, tied."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=5000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def gib(lines: list[str]) -> dict[str, float]:
    found = (re.fullmatch(r"(.*?) +([\d.]+) GiB", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


# By hand: attention 64x64 + 2 x 64x32 + 64x64 and biases 64 + 32 + 32; MLP 3 x 64x128; two norms.
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 128 + 3 * 64 * 128 + 2 * 64
OUTSIDE = 5000 * 64 + 64
TOTAL = 2 * LAYER + OUTSIDE


def test_bytes_by_hand(checkpoint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdprl.dryrun.GIB", 1.0)  # whole bytes
    lines = memory_estimate(checkpoint, 4, "bfloat16", OPTIONS)
    assert lines[0] == f"{TOTAL:,} parameters over 4 ranks"
    parts = gib(lines)
    together = parts.pop("a rank, together about")
    assert parts == {
        "float32 weights, shard": TOTAL,
        "gradients, shard": TOTAL,
        "Adam moments, shard": 2 * TOTAL,
        "gathered layers": 2 * (2 * LAYER + OUTSIDE),
        "logits chunk": 256 * 5000 * 4 * 2,
        "activations of 1,024 tokens": 1024 * 2 * 34 * 64,
    }
    assert together == sum(parts.values())
    engine = gib(
        engine_estimate(checkpoint, "bfloat16", EngineOptions(bucket_mb=16), "transformers")
    )
    assert engine == {"weight bucket": 16e6, "replica of the model": 2 * TOTAL}
    told = engine_estimate(
        checkpoint, "bfloat16", EngineOptions(gpu_memory_utilization=0.3), "vllm"
    )
    assert told == ["vllm: 30% of the device (--engine.gpu-memory-utilization)"]


def test_what_is_not_trained_has_no_gradients(checkpoint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdprl.dryrun.GIB", 1.0)
    halves = ShardingOptions(replicate=2)
    parts = gib(memory_estimate(checkpoint, 4, "bfloat16", halves, trained=False))
    assert parts["bfloat16 weights, shard"] == 2 * TOTAL / 2
    assert not any("grad" in name or "Adam" in name or "activations" in name for name in parts)


def test_sections_in_order():
    said: list[str] = []
    config = {"lr": 1.0, "run": {"track": ("wandb", "trackio"), "profile": ""}}
    show(said.append, config, ["a step: 1"], [("prompts", ["<user>1+1="]), ("memory", "one\ntwo")])
    assert said == [
        "config:\n  --lr 1.0\n  --run.track wandb trackio\n  --run.profile ''",
        "arithmetic:\n  a step: 1",
        "prompts:\n  <user>1+1=",
        "memory:\n  one\n  two",
        "dry run: nothing was trained or written",
    ]


def test_two_prompts_as_the_model_reads_them(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}+1=?"}}\n' for i in range(9)))
    controller = Controller(World(), flags=Flags(dry_run=True))
    set_current(controller)
    try:
        fields = {
            "data": str(data),
            "eval_share": 0.2,
            "model": str(tiny.checkpoint()),
            "answer_key": "",
        }
        train, _ = prompt_sets(recipe("grpo").Config(**fields))
    finally:
        set_current(None)
    first = train.at(0, 2)
    assert [title.split(" (")[0] for title, _ in controller.report] == [
        f"prompt of row {prompt.index}" for prompt in first
    ]
    assert "\n".join(controller.report[1][1]) == first[1].text.rstrip("\n")
    assert f"{first[1].index}+1=?" in first[1].text


def test_a_model_of_many_gibibytes_is_estimated_without_making_it(tmp_path: Path):
    Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    lines = memory_estimate(str(tmp_path), 8, "bfloat16", ShardingOptions())
    assert lines[0] == "7,615,616,512 parameters over 8 ranks"  # Qwen2.5-7B (7.62 billion)
    assert gib(lines)["Adam moments, shard"] == pytest.approx(7.6156e9 * 8 / 8 / GIB, abs=0.01)
