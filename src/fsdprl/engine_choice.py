"""Which engine runs, and which of its options it can honour: decided before any rank moves. No torch."""

import json
from typing import Any, Literal

from fsdprl.errors import UserError
from fsdprl.options import EngineOptions

Kind = Literal["transformers", "vllm"]

NAMED = (
    "max_num_seqs",
    "max_model_len",
    "dtype",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "enable_prefix_caching",
)
"""vLLM arguments that have an option of their own."""

OURS = (
    "model",
    "tokenizer",
    "seed",
    "load_format",
    "logprobs_mode",
    "distributed_executor_backend",
    "pipeline_parallel_size",
    "data_parallel_size",
    "trust_remote_code",
)
"""vLLM arguments that weights, log-probs or ranks depend on; nobody else sets them."""


def choose_engine(options: EngineOptions, device_type: str, ranks: int) -> Kind:
    """The engine that `options.kind` means on this device.

    Raises UserError naming the option that it cannot honour, and what to do.
    """
    kind = options.kind
    if kind == "auto":
        kind = "transformers" if device_type == "cpu" else "vllm"
    if kind == "transformers":
        _refuse_vllm_options(options, device_type)
    tensor_parallel = options.tensor_parallel_size
    if tensor_parallel < 1 or ranks % tensor_parallel:
        raise UserError(
            f"--engine.tensor-parallel-size {tensor_parallel} does not divide the {ranks} "
            f"ranks into groups: choose a divisor of {ranks}"
        )
    share = options.gpu_memory_utilization
    if share is not None and not 0.0 < share <= 1.0:
        raise UserError(
            f"--engine.gpu-memory-utilization {share} is out of range: above 0, at most 1"
        )
    for name in ("max_num_seqs", "kv_cache_memory_bytes", "max_model_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(
                f"--engine.{name.replace('_', '-')} {value} is out of range: at least 1"
            )
    if not options.bucket_mb > 0:
        raise UserError(f"--engine.bucket-mb {options.bucket_mb} is out of range: above 0")
    extra_arguments(options)
    return kind


def _refuse_vllm_options(options: EngineOptions, device_type: str) -> None:
    given = {
        "tensor-parallel-size": options.tensor_parallel_size != 1,
        "enforce-eager": options.enforce_eager is not None,
        "enable-prefix-caching": options.enable_prefix_caching is not None,
        "extra": bool(options.extra),
    }
    for name, is_given in given.items():
        if is_given:
            raise UserError(
                f"--engine.{name} is vLLM's: the built-in engine has no such thing. Leave it out, or "
                f"choose --engine.kind vllm"
            )
    if options.gpu_memory_utilization is not None and device_type == "cpu":
        raise UserError(
            "--engine.gpu-memory-utilization means nothing to the built-in engine on CPU: bound its "
            "cache with --engine.kv-cache-memory-bytes"
        )


def extra_arguments(options: EngineOptions) -> dict[str, Any]:
    """`--engine.extra NAME=VALUE ...` as vLLM arguments; values are JSON, or else plain strings.

    Raises UserError for an entry without `=`, one given twice, and one with a flag of its own.
    """
    found: dict[str, Any] = {}
    for entry in options.extra:
        name, equals, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UserError(f"--engine.extra {entry!r}: write NAME=VALUE, as in block_size=16")
        if name in NAMED:
            raise UserError(f"--engine.extra {entry!r}: use --engine.{name.replace('_', '-')}")
        if name in OURS:
            raise UserError(f"--engine.extra {entry!r}: fsdprl sets {name} itself")
        if name in found:
            raise UserError(f"--engine.extra names {name} twice")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found
