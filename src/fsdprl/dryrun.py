"""--dry-run: what would run, without running it; and what a model will take of a rank's memory."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsdprl.checkpoint_files import NO_CODE
from fsdprl.config import flatten, spelled
from fsdprl.options import EngineOptions, ShardingOptions

GIB = 2.0**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def show(
    say: Callable[[str], None],
    config: Mapping[str, Any],
    arithmetic: Iterable[str],
    report: Iterable[tuple[str, str | Iterable[str]]],
) -> None:
    """Print the resolved config, the arithmetic, and the sections that prompts and models added."""
    sections: list[tuple[str, str | Iterable[str]]] = [
        (
            "config",
            [f"{spelled(name)} {words(value)}" for name, value in flatten(dict(config)).items()],
        ),
        ("arithmetic", arithmetic),
        *report,
    ]
    for title, body in sections:
        lines = body.splitlines() if isinstance(body, str) else body
        say("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
    say("dry run: nothing was trained or written")


def words(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, list | tuple):
        return " ".join(map(words, value))
    return shlex.quote(str(value))


def memory_estimate(
    path: str,
    world: int,
    dtype: str,
    options: ShardingOptions,
    *,
    trained: bool = True,
) -> list[str]:
    """Lines with the bytes that a model takes on each of `world` ranks, from its config.json alone.

    path: a Hugging Face checkpoint or config. dtype: of the computation. trained: with float32
    masters, gradients and two Adam moments, sharded over world / replicate ranks; otherwise the
    weights alone. Beside them come one gathered layer and the next, the chunk of logits and its
    gradient, and activations by the usual rule of thumb. An estimate: allocator slack and kernels'
    workspaces come on top.
    """
    config, total, layer, outside = parameter_counts(path)
    shards = max(1, world // options.replicate)
    width = BYTES[dtype]
    text = config.get_text_config()
    hidden, depth, vocabulary = text.hidden_size, text.num_hidden_layers, text.vocab_size
    tokens = options.tokens_per_microbatch
    parts: dict[str, float] = {}
    if trained:
        parts["float32 weights, shard"] = 4 * total / shards
        parts["gradients, shard"] = 4 * total / shards
        parts["Adam moments, shard"] = 8 * total / shards
    else:
        parts[f"{dtype} weights, shard"] = width * total / shards
    parts["gathered layers"] = width * (2 * layer + outside)
    parts["logits chunk"] = options.head_chunk_tokens * vocabulary * 4 * (2 if trained else 1)
    if trained:
        # Saved for backward: inputs only, or about 34 bytes per token and hidden unit in 16 bits.
        saved = width * hidden if options.activation_checkpointing else 17 * width * hidden
        parts[f"activations of {tokens:,} tokens"] = float(tokens * depth * saved)
    lines = [f"{total:,} parameters over {shards} rank{'s' if shards > 1 else ''}"]
    lines += [f"{name:<36} {size / GIB:8.3f} GiB" for name, size in parts.items()]
    return [*lines, f"{'a rank, together about':<36} {sum(parts.values()) / GIB:8.3f} GiB"]


def engine_estimate(path: str, dtype: str, engine: EngineOptions, kind: str) -> list[str]:
    """Lines with the bytes that the sampling engine takes on a rank beside its key-value cache."""
    if kind == "vllm":
        share = 0.5 if engine.gpu_memory_utilization is None else engine.gpu_memory_utilization
        return [f"vllm: {share:.0%} of the device (--engine.gpu-memory-utilization)"]
    _, total, _, _ = parameter_counts(path)
    parts = {"replica of the model": BYTES[dtype] * total, "weight bucket": engine.bucket_mb * 1e6}
    return [f"{name:<36} {size / GIB:8.3f} GiB" for name, size in parts.items()]


def parameter_counts(path: str) -> tuple[Any, int, int, int]:
    """(config, all parameters, those of the largest layer, those outside layers), from shapes alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, **NO_CODE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **NO_CODE)
    sizes: dict[str, int] = {}
    total = 0
    for name, parameter in model.named_parameters():  # a tied weight is named once
        total += parameter.numel()
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = ".".join(parts[: number + 1]) if number is not None else ""
        sizes[key] = sizes.get(key, 0) + parameter.numel()
    outside = sizes.pop("", 0)
    return config, total, max(sizes.values(), default=0), outside
