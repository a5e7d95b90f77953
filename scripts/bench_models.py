"""Random models of known sizes, for the benchmarks."""

from dataclasses import dataclass
from pathlib import Path

import torch
from make_tiny_model import tiny_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config


@dataclass(frozen=True)
class Shape:
    """A random Qwen2 with heads of 64, of about the size its name says."""

    name: str
    hidden: int
    layers: int
    ffn: int
    vocabulary: int = 32_000
    tied: bool = False
    context: int = 512
    """Most positions."""

    def write(self, folder: Path) -> None:
        """A float32 checkpoint of random weights with a tokenizer of no use."""
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 64,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            dtype="float32",
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)


SMOKE = Shape("smoke", hidden=64, layers=2, ffn=128, vocabulary=512)
