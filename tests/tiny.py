"""Tiny random Hugging Face checkpoints and a character tokenizer, for tests that need a model.

checkpoint(kind) -> folder with config, safetensors and tokenizer, made once per process and
removed at its end; a test hands the path to the ranks it starts.
"""

import atexit
import functools
import shutil
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

KINDS = ("qwen2_tied", "qwen2", "qwen3", "llama", "qwen3_moe")

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ends with <|im_end|>, pads with <|endoftext|>; ChatML template."""
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def config(kind: str, **overrides: Any) -> PreTrainedConfig:
    """A two-layer configuration of one architecture; overrides replace its fields."""
    words = tokenizer()
    common: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    classes: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
        "qwen2_tied": (Qwen2Config, {"tie_word_embeddings": True}),
        "qwen2": (Qwen2Config, {}),
        "qwen3": (Qwen3Config, {"head_dim": 16}),
        "llama": (LlamaConfig, {}),
        "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 8, **experts}),
    }
    make, own = classes[kind]
    return make(**{**common, **own, **overrides})


@functools.cache
def _folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="fsdprl-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def _checkpoint(
    kind: str, head: str, dtype: torch.dtype, seed: int, shard: str, overrides: tuple[Any, ...]
) -> Path:
    out = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_folder()))
    auto = AutoModelForCausalLM
    settings = dict(overrides)
    if head == "reward":
        auto = AutoModelForSequenceClassification
        settings = {"num_labels": 1, **settings}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config(kind, **settings), dtype=dtype)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "norm" in name:  # their initial 0 and 1 would hide bugs
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(out, max_shard_size=shard)
    tokenizer().save_pretrained(out)
    return out


def checkpoint(
    kind: str = "qwen3",
    *,
    head: str = "policy",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard: str = "5GB",
    **overrides: Any,
) -> Path:
    """Folder of a random checkpoint: weights, config, generation config, tokenizer, template.

    kind: one of KINDS. head: "policy" (AutoModelForCausalLM) or "reward" (one-label sequence
    classifier). shard: largest file, for several files with an index. overrides: config fields.
    """
    return _checkpoint(kind, head, dtype, seed, shard, tuple(sorted(overrides.items())))
