"""The scripts people run: they parse, the small model is a real one, the benchmark does equal work."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdprl.tasks.addition import write_dataset

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def script(name: str, *words: object, code: int = 0) -> str:
    """Output of a Python script that must end with `code`."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_tiny_model(folder: Path, seed: int) -> Path:
    """make_tiny_model.py in this process: importing transformers takes most of its time."""
    spec = importlib.util.spec_from_file_location("tiny_model", SCRIPTS / "make_tiny_model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_tiny_model(folder, seed)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3)


@pytest.mark.parametrize("name", ["setup", "quickstart", "test"])
def test_shell_scripts_parse_and_stop_at_the_first_error(name):
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True, timeout=20)
    assert "set -euo pipefail" in (SCRIPTS / name).read_text()


def test_tiny_model_is_a_small_qwen3(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    # 60 x 96 embeddings; a layer: q 12288, k and v 6144 each, o 12288, ffn 3 x 27648,
    # norms 2 x 96 and 2 x 32; a last norm
    layer = 2 * 12288 + 2 * 6144 + 3 * 27648 + 2 * 96 + 2 * 32
    assert sum(p.numel() for p in model.parameters()) == 60 * 96 + 2 * layer + 96
    assert model.config.model_type == "qwen3"
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert abs(float(weight.detach().std()) - 0.05) < 0.001


def test_tiny_tokenizer_reads_one_token_a_character(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "49+97="}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n49+97=<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == 14
    assert tokenizer.unk_token_id not in ids
    answer = tokenizer("16,14#146").input_ids
    assert len(answer) == 9
    ended = [*answer, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ended, skip_special_tokens=True) == "16,14#146"


def test_tiny_model_repeats(tiny, tmp_path):
    same = write_tiny_model(tmp_path / "same", seed=3)
    other = write_tiny_model(tmp_path / "other", seed=4)
    first, second, third = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()["model.embed_tokens.weight"]
        for folder in (tiny, same, other)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_compare_checkpoints_shows_carrying_problems(tiny, tmp_path):
    data = write_dataset(tmp_path, count=200, demonstration_count=1)
    shown = script("compare_checkpoints.py", tiny, tiny, data["heldout"], "--count", 20)
    assert "right on 20 held-out problems: 0.0 % before, 0.0 % after" in shown


def test_benchmark_of_the_update_does_equal_work():
    shown = script("bench_update.py", "--smoke", "--repeats", 1)
    assert "ratio to the better plain loop" in shown
    assert "time a token 1.00" in shown


def test_benchmark_of_a_pull_times_three_ways():
    shown = script("bench_sync.py", "--smoke", "--repeats", 1)
    for way in ("pull", "naive", "memcpy"):
        assert f"\n  {way} " in shown
    assert "smoke float32 into transformers" in shown


def test_benchmark_of_the_controllers_share():
    shown = script("bench_overhead.py", "--size", "smoke", "--steps", 3)
    assert re.search(r"median \d+\.\d\d%, worst \d+\.\d\d% \(wanted: below 2%\)", shown)


def test_benchmark_of_a_step_says_what_it_needs(tmp_path):
    missing = tmp_path / "nowhere"
    shown = script("bench_step.py", "--model", missing, code=2)
    assert f"{missing}" in shown
    assert "run scripts/quickstart first" in shown
