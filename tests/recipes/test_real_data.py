"""dpo.py and sft.py on real data, on two ranks, with a byte-level BPE made of the same texts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from fsdprl.records import read_lines
from scripts.make_tiny_model import CHAT_TEMPLATE, tiny_config
from tests.datafiles import given
from tests.recipes.processes import ROOT, start

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def bpe_model(texts: list[str], out: Path) -> str:
    """A checkpoint of 2 layers whose tokenizer is a byte-level BPE of 1,500 entries learnt from `texts`."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        additional_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    config = tiny_config(tokenizer)
    config.max_position_embeddings = 4096
    Qwen3ForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return str(out)


def trained(name: str, model: str, data: str, out: Path, **flags: Any) -> list[dict[str, Any]]:
    """The metrics of four steps on two ranks."""
    fields = {
        "model": model,
        "data": data,
        "run.out": out,
        "steps": 4,
        "lr": 2e-3,
        "eval-every": 4,
        "warmup-steps": 0,
    }
    typed = [str(ROOT / "recipes" / f"{name}.py")]
    for flag, value in (
        fields | {flag.replace("_", "-"): value for flag, value in flags.items()}
    ).items():
        typed += [f"--{flag}", str(value)]
    end = start(typed, ranks=2).end(250.0)
    assert end.code == 0, end.err[-3000:]
    metrics = read_lines(out / "metrics.jsonl")
    assert all(
        value is not None and math.isfinite(value) for step in metrics for value in step.values()
    )
    assert len(metrics) == 5
    return metrics


def test_dpo_on_sharegpt_pairs(tmp_path: Path):
    """Chinese ShareGPT conversations: the first 40, of which those of more than 1,000 tokens are left out."""
    path = given("dpo_zh_sharegpt.json")
    rows = json.loads(path.read_text(encoding="utf-8"))
    texts = [row[side]["value"] for row in rows for side in ("chosen", "rejected")]
    model = bpe_model(texts, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (
        tokenizer.decode(tokenizer(texts[0])["input_ids"]) == texts[0]
    )  # bytes: nothing is unknown
    flags = {"max_length": 1000, "over_length": "drop", "batch_size": 16, "eval_data": f"{path}#40"}
    metrics = trained("dpo", model, f"{path}#40", tmp_path / "run", **flags, lr=3e-4)
    assert metrics[0]["actor/loss"] == pytest.approx(
        math.log(2), abs=1e-4
    )  # the policy is the reference
    assert metrics[0]["val/margin"] == pytest.approx(0, abs=1e-4)
    assert metrics[-1]["val/loss"] < metrics[0]["val/loss"] - 0.005  # pairs that were trained on
    assert metrics[-1]["val/margin"] > 0.01
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-000004")


def test_sft_on_gsm8k(tmp_path: Path):
    """Questions with reasoned answers: the loss falls from that of a guess."""
    path = given("gsm8k_train.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()[:400]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = bpe_model([json.loads(line)["answer"] for line in lines], tmp_path / "model")
    flags = {
        "prompt_key": "question",
        "completion_key": "answer",
        "prompt_format": "chat",
        "batch_size": 32,
    }
    metrics = trained("sft", model, str(tmp_path / "rows.jsonl"), tmp_path / "run", **flags)
    guess = math.log(1500)
    assert abs(metrics[0]["val/loss"] - guess) < 1.0
    assert metrics[-1]["val/loss"] < metrics[0]["val/loss"] - 0.5
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-000004")
