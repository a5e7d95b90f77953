"""Which engine runs, and every `--engine.*` option: honoured or refused by name."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from fsdprl.engine_choice import NAMED, choose_engine, extra_arguments
from fsdprl.engines.vllm import engine_arguments, refuse_unknown
from fsdprl.errors import UserError
from fsdprl.options import EngineOptions


def test_auto_means_vllm_on_accelerators_only():
    assert choose_engine(EngineOptions(), "cpu", 1) == "transformers"
    assert choose_engine(EngineOptions(), "cuda", 1) == "vllm"
    assert choose_engine(EngineOptions(), "npu", 1) == "vllm"
    assert choose_engine(EngineOptions(kind="transformers"), "cuda", 1) == "transformers"
    assert choose_engine(EngineOptions(kind="vllm"), "cpu", 1) == "vllm"


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("tensor-parallel-size", {"tensor_parallel_size": 2}),
        ("enforce-eager", {"enforce_eager": False}),
        ("enable-prefix-caching", {"enable_prefix_caching": True}),
        ("extra", {"extra": ("block_size=16",)}),
        ("gpu-memory-utilization", {"gpu_memory_utilization": 0.3}),
    ],
)
def test_the_built_in_engine_refuses_what_is_vllms(flag, given):
    with pytest.raises(UserError, match=f"--engine.{flag}"):
        choose_engine(EngineOptions(**given), "cpu", 2)
    assert choose_engine(EngineOptions(kind="vllm", **given), "cpu", 2) == "vllm"


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("tensor-parallel-size", {"tensor_parallel_size": 3}),
        ("tensor-parallel-size", {"tensor_parallel_size": 0}),
        ("gpu-memory-utilization", {"gpu_memory_utilization": 1.2}),
        ("gpu-memory-utilization", {"gpu_memory_utilization": 0.0}),
        ("max-num-seqs", {"max_num_seqs": 0}),
        ("max-model-len", {"max_model_len": 0}),
        ("kv-cache-memory-bytes", {"kv_cache_memory_bytes": 0}),
        ("bucket-mb", {"bucket_mb": 0.0}),
    ],
)
def test_options_out_of_range_are_named(flag, given):
    with pytest.raises(UserError, match=f"--engine.{flag}"):
        choose_engine(EngineOptions(kind="vllm", **given), "cuda", 4)


def test_extra_is_a_table_of_json_values():
    options = EngineOptions(
        extra=(
            "block-size=16",
            "cpu_offload_gb=1.5",
            "a=true",
            'b={"c": [1]}',
            "d=plain text",
            "e=x=y",
        )
    )
    assert extra_arguments(options) == {
        "block_size": 16,
        "cpu_offload_gb": 1.5,
        "a": True,
        "b": {"c": [1]},
        "d": "plain text",
        "e": "x=y",
    }


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (("block_size",), "NAME=VALUE"),
        (("=3",), "NAME=VALUE"),
        (("a=1", "a=2"), "twice"),
        (("max-num-seqs=3",), "--engine.max-num-seqs"),
        (("seed=3",), "fsdprl sets seed"),
        (("logprobs_mode=raw_logprobs",), "fsdprl sets logprobs_mode"),
    ],
)
def test_extra_that_cannot_be_is_refused(extra, text):
    with pytest.raises(UserError, match=text):
        choose_engine(EngineOptions(kind="vllm", extra=extra), "cuda", 1)


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_every_option_reaches_vllm_under_its_own_name():
    given = {
        "max_num_seqs": 7,
        "kv_cache_memory_bytes": 1234,
        "gpu_memory_utilization": 0.25,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    arguments = engine_arguments(EngineOptions(**given, extra=("block_size=16",)), CUDA, 64)
    assert {name: arguments[name] for name in given} == given
    assert arguments["block_size"] == 16
    # the rest is decided where the engine is built
    ours = {"kind", "bucket_mb", "extra", "dtype", "max_model_len", "sleep_level"}
    assert set(given) | ours == {field.name for field in fields(EngineOptions)}
    assert set(given) | {"dtype", "max_model_len"} == set(NAMED)


def test_vllms_defaults_where_the_options_say_nothing():
    on_cuda = engine_arguments(EngineOptions(), CUDA, 64)
    assert on_cuda["gpu_memory_utilization"] == 0.5
    assert on_cuda["enforce_eager"] is False and on_cuda["enable_sleep_mode"] is False
    assert engine_arguments(EngineOptions(sleep_level=1), CUDA, 64)["enable_sleep_mode"] is True
    assert "kv_cache_memory_bytes" not in on_cuda and "enable_prefix_caching" not in on_cuda
    on_cpu = engine_arguments(EngineOptions(), CPU, 5000)
    assert on_cpu["kv_cache_memory_bytes"] == 1 << 30  # else half of the host's memory
    assert on_cpu["enforce_eager"] is True and on_cpu["enable_sleep_mode"] is False
    # half a prompt would need a generator on CPU to go back, which none can
    assert on_cpu["enable_chunked_prefill"] is False and on_cpu["max_num_batched_tokens"] == 5000
    assert "enable_chunked_prefill" not in on_cuda
    shared = engine_arguments(EngineOptions(gpu_memory_utilization=0.1), CPU, 64)
    assert "kv_cache_memory_bytes" not in shared and shared["gpu_memory_utilization"] == 0.1


def test_arguments_that_this_vllm_lacks_are_refused_with_the_nearest():
    from dataclasses import make_dataclass

    fake = SimpleNamespace(
        EngineArgs=make_dataclass("EngineArgs", ["block_size", "seed"]), __version__="0.32.0"
    )
    refuse_unknown({"block_size": 16}, fake)
    with pytest.raises(UserError, match=r"0\.32\.0 has no such argument; did you mean block_size"):
        refuse_unknown({"blok_size": 16}, fake)
