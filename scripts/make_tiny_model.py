#!/usr/bin/env python3
"""Write a small untrained Qwen3 checkpoint with a character-level tokenizer and a chat template.

    python scripts/make_tiny_model.py runs/tiny

246 thousand parameters: 2 layers, hidden 96, 4 heads of 32 over 2 key-value heads, tied embeddings. It
is a real checkpoint in every other way: transformers and vLLM load it like any Qwen3.
"""

import argparse
import re
import string
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"]
ROLES = ["system", "user", "assistant"]  # one token each, so that the chat template stays short
CHARACTERS = string.digits + string.ascii_lowercase + "\n +-*/=#,.:;()?!'"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character (and per role name), lower case only; `<|im_end|>` ends a turn and a sample.

    words: further texts that are one token each.
    """
    entries = [*SPECIAL, *ROLES, *CHARACTERS, *words]
    vocabulary = {token: index for index, token in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*ROLES, *map(re.escape, words), r"[\s\S]"])), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The smallest Qwen3 that learns two- and three-digit addition with carries."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM has kernels for on CPU
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def write_tiny_model(out: Path, seed: int = 0, words: Sequence[str] = ()) -> None:
    """Weights drawn from `seed`, config, tokenizer (see `tiny_tokenizer`), chat template and generation config."""
    tokenizer = tiny_tokenizer(words)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_config(tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Write the checkpoint from the command line."""
    parser = argparse.ArgumentParser(description="Write a small untrained Qwen3 checkpoint.")
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_tiny_model(args.out, args.seed)
    print(args.out)


if __name__ == "__main__":
    main()
