"""The real vLLM inside the rank's process, beside the trainer's process group.

The engine starts with random weights and gets real ones only from the weight stream. With tensor
parallelism, consecutive ranks share one engine: they gather their requests, run all of them in
lockstep, and each keeps its own answers.
"""

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdprl.checkpoint_files import NO_CODE
from fsdprl.engine_choice import extra_arguments
from fsdprl.engines import Completion, EngineError, Request, Sampling, answer_limits
from fsdprl.engines.arrivals import Arrivals, Expected
from fsdprl.engines.vllm_session import VllmSession, gather_requests
from fsdprl.engines.vllm_versions import (
    Reload,
    caller_unchanged,
    embedding_rows,
    import_vllm,
    keep,
    launcher_environment,
    private_shared_memory,
    refuse_head_size,
)
from fsdprl.errors import UserError
from fsdprl.hf_layout import hf_items
from fsdprl.models import empty_model
from fsdprl.options import EngineOptions
from fsdprl.shards import model_shards
from fsdprl.stream import Bucket
from fsdprl.suggest import closest_choice
from fsdprl.world import World

MEMORY_UTILIZATION = 0.5
"""vLLM's own 0.9 would leave the trainer, which lives on the same device, nothing."""
CPU_CACHE_BYTES = 1 << 30
CPU_STEP_TOKENS = 4096  # as vLLM itself takes there
TAGS = ("weights", "kv_cache")


class VllmEngine:
    """See `Engine`."""

    def __init__(
        self,
        path: str,
        options: EngineOptions,
        *,
        world: World,
        device: torch.device,
        dtype: str,
        max_model_len: int,
        seed: int,
    ) -> None:
        """Build the engine. Collective over all ranks; raises UserError for options vLLM lacks."""
        self.version, self.device, self.max_model_len = -1, device, max_model_len
        self.unready = "no weights have been pulled yet"
        self.asleep: set[str] = set()
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._preempted = 0.0
        self._progress: Callable[[], None] = _nothing
        self.expected = expected_weights(path, getattr(torch, dtype))
        vllm = import_vllm()
        self._vllm = vllm
        arguments = {
            "model": path,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed % 2**31,
            **engine_arguments(options, device, max_model_len),
        }
        refuse_unknown(arguments, vllm)
        if device.type == "cpu":
            refuse_head_size(head_size(path))
        with (
            launcher_environment(world.rank, world.local_rank, world.size),
            private_shared_memory(device),
            caller_unchanged(device),
        ):
            self.llm = vllm.LLM(**arguments)
        keep(self.llm)
        self.runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        self.rows = embedding_rows(self.runner.get_model())
        self.divisible = frozenset(self.rows) & self.expected.keys()
        self._tick_every_step()
        self.group = _tensor_group() if options.tensor_parallel_size > 1 else None

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Callable[[], None]
    ) -> list[Completion]:
        """See `Engine.generate`. With tensor parallelism, collective over the engine's ranks."""
        self._check_ready()
        answer_limits(requests, sampling, self.max_model_len)
        first, everyones = self._gathered(requests)
        if not everyones:
            return []
        prompts = [{"prompt_token_ids": list(request.ids)} for request in everyones]
        parameters = [self.parameters(request, sampling) for request in everyones]
        with self.running(progress):
            outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        mine = outputs[first : first + len(requests)]
        completions = [self.completion(i, output) for i, output in enumerate(mine)]
        self.count(mine, completions)
        return completions

    def session(self, lanes: int, sampling: Sampling, progress: Callable[[], None]) -> VllmSession:
        """See `Engine.session`. With tensor parallelism, collective over the engine's ranks."""
        self._check_ready()
        return VllmSession(self, sampling, progress)

    def _check_ready(self) -> None:
        if self.asleep:
            raise EngineError(
                f"the engine sleeps ({', '.join(sorted(self.asleep))}): wake it first"
            )
        if self.unready:
            raise EngineError(f"the engine cannot generate: {self.unready}")

    def count(self, outputs: Sequence[Any], completions: Sequence[Completion]) -> None:
        """Add this rank's answers to what `stats` tells."""
        self._counts["prompt_tokens"] += sum(len(o.prompt_token_ids) for o in outputs)
        self._counts["cached_prompt_tokens"] += sum(o.num_cached_tokens or 0 for o in outputs)
        self._counts["generated_tokens"] += sum(len(c.ids) for c in completions)

    @contextlib.contextmanager
    def running(self, progress: Callable[[], None]) -> Iterator[None]:
        """Steps of vLLM tell `progress`, and change nothing else of this process."""
        self._progress = progress
        try:
            with caller_unchanged(self.device):
                yield
        finally:
            self._progress = _nothing

    def update_weights(self, buckets: Iterator[Bucket], version: int) -> dict[str, int]:
        """See `Engine.update_weights`. The prefix cache, which is of the old weights, is dropped."""
        if "weights" in self.asleep:
            raise EngineError('the engine\'s weights sleep: wake(["weights"]) before an update')
        self.unready = f"the update to version {version} did not complete"
        arrivals = Arrivals(self.expected)

        def summed() -> Iterator[Bucket]:
            for bucket in arrivals.of(buckets):
                arrivals.take_all(bucket)
                yield bucket
                del bucket  # gone before the next one is made

        Reload(self.runner, self.rows, self.device.type == "cpu").run(summed())
        self._forget_prefixes()
        self.unready, self.version = "", version
        return arrivals.checksums

    def sleep(self, level: int) -> None:
        """See `Engine.sleep`. vLLM gives nothing back on CPU; the order of calls is kept all the same."""
        if level not in (0, 1, 2):
            raise UserError(f"sleep level {level}: 0, 1 or 2")
        if level == 0:
            return
        if self.device.type != "cpu":
            self.llm.sleep(level=level)
        if level == 2:
            self.unready = "sleep level 2 dropped its weights: pull them again"
        self.asleep = set(TAGS)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """See `Engine.wake`."""
        wanted = [tag for tag in (TAGS if tags is None else tags) if tag in self.asleep]
        unknown = [tag for tag in tags or () if tag not in TAGS]
        if unknown:
            raise UserError(f"wake tag {unknown[0]!r}: one of {', '.join(TAGS)}")
        if not wanted:
            return
        if self.device.type != "cpu":
            self.llm.wake_up(tags=wanted)
        self.asleep -= set(wanted)
        if "kv_cache" in wanted:
            self._forget_prefixes()

    def stats(self) -> dict[str, float]:
        """See `Engine.stats`. Preemptions are counted once per engine, on its first rank."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        total = sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")
        if self.group is None or dist.get_rank(self.group) == 0:
            counts["preemptions"] = total - self._preempted
        self._preempted = total
        prompts = counts["prompt_tokens"]
        return counts | {
            "cache_hit_rate": counts["cached_prompt_tokens"] / prompts if prompts else 0.0
        }

    def _forget_prefixes(self) -> None:
        if self.llm.reset_prefix_cache() is False:
            raise EngineError("vLLM kept its prefix cache: requests are still running")

    def _tick_every_step(self) -> None:
        """`LLM.generate` tells nobody that it moves: hook the step that it repeats."""
        engine = self.llm.llm_engine
        step = engine.step

        def ticking() -> Any:
            self._progress()
            return step()

        engine.step = ticking

    def parameters(self, request: Request, sampling: Sampling) -> Any:
        """vLLM's own parameters of a request."""
        return self._vllm.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop=list(sampling.stop),
            seed=request.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
        )

    def completion(self, ordinal: int, output: Any) -> Completion:
        """An answer as vLLM gives it, checked. Raises EngineError on non-finite log-probs."""
        answer = output.outputs[0]
        ids, logp = list(answer.token_ids), list(answer.logprobs.logprobs)
        bad = next((i for i, value in enumerate(logp) if not math.isfinite(value)), None)
        if bad is not None:
            raise EngineError(
                f"non-finite logits at request {ordinal} (prompt of {len(output.prompt_token_ids)} "
                f"tokens), answer token {bad}: weights or activations overflow"
            )
        if answer.finish_reason not in ("stop", "length") or len(ids) != len(logp):
            raise EngineError(f"vLLM ended request {ordinal} with {answer.finish_reason!r}")
        return Completion(
            torch.tensor(ids, dtype=torch.int32),
            torch.tensor(logp, dtype=torch.float32),
            answer.finish_reason,
        )

    def _gathered(self, requests: Sequence[Request]) -> tuple[int, list[Request]]:
        """Requests of all ranks of this engine in rank order, and the ordinal of this rank's first."""
        if self.group is None:
            return 0, list(requests)
        parts = gather_requests(requests, self.group)
        rank = dist.get_rank(self.group)
        return sum(map(len, parts[:rank])), [request for part in parts for request in part]


COUNTS = ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "preemptions")


def _nothing() -> None:
    """The progress of an engine that nobody waits for."""


def _tensor_group() -> Any:
    """The CPU process group of the ranks that share this engine."""
    return importlib.import_module("vllm.distributed.parallel_state").get_tp_group().cpu_group


def expected_weights(path: str, dtype: torch.dtype) -> dict[str, Expected]:
    """Every tensor of the checkpoint `path` as the weight stream names it, without its data."""
    model = empty_model(path, dtype=dtype, device=torch.device("cpu"))
    own = {name: shard.local.dtype for name, shard in model_shards(model).items()}
    return {item.name: Expected(item.shape, own[item.param]) for item in hf_items(model)}


def head_size(path: str) -> int:
    """Size of the model's attention heads."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(path, **NO_CODE).get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def engine_arguments(
    options: EngineOptions, device: torch.device, max_model_len: int
) -> dict[str, Any]:
    """The options as vLLM's own arguments."""
    on_cpu = device.type == "cpu"
    cache = options.kv_cache_memory_bytes
    if cache is None and on_cpu and options.gpu_memory_utilization is None:
        cache = CPU_CACHE_BYTES
    given = {
        "kv_cache_memory_bytes": cache,
        "enable_prefix_caching": options.enable_prefix_caching,
    }
    return {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_utilization or MEMORY_UTILIZATION,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,  # counts preemptions
        "enable_sleep_mode": not on_cpu and options.sleep_level > 0,  # an allocator of its own
        **(whole_prompts(max_model_len) if on_cpu else {}),
        **{name: value for name, value in given.items() if value is not None},
        **extra_arguments(options),
    }


def whole_prompts(max_model_len: int) -> dict[str, Any]:
    """Arguments under which no prompt is cut in two. vLLM takes back what a request with a seed drew
    behind half a prompt, and torch's generators on CPU cannot go back."""
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, max_model_len),
    }


def refuse_unknown(arguments: dict[str, Any], vllm: Any) -> None:
    """Raise UserError for an argument that this vLLM does not have."""
    known = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    for name in arguments:
        if name not in known:
            close = closest_choice(name, known)
            raise UserError(
                f"--engine.extra {name}: vLLM {vllm.__version__} has no such argument"
                + (f"; did you mean {close}?" if close else "")
            )
