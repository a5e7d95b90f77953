"""The built-in engine: transformers' modelling code over a cache and a batching loop of our own.

It runs wherever PyTorch does, starts in a second, and is the default on CPU.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from fsdprl.device import total_memory_bytes
from fsdprl.engines import Completion, EngineError, Request, Sampling, answer_limits
from fsdprl.engines.batching import Decoding
from fsdprl.engines.replica import Replica
from fsdprl.engines.stopping import StopRule, end_tokens, load_tokenizer
from fsdprl.errors import UserError
from fsdprl.options import EngineOptions
from fsdprl.stream import Bucket

CPU_CACHE_BYTES = 4 << 30
"""Most bytes of keys and values on CPU; fewer sequences are decoded together beyond it."""
MEMORY_UTILIZATION = 0.5
"""Share of an accelerator's memory for weights and cache, where the options do not say."""

TAGS = ("weights", "kv_cache")


class TransformersEngine:
    """See `Engine`. One replica per rank; nothing is shared between ranks."""

    def __init__(
        self,
        path: str,
        options: EngineOptions,
        *,
        device: torch.device,
        dtype: str,
        max_model_len: int,
    ) -> None:
        """Raises UserError for an architecture that it cannot serve."""
        self.version = -1
        self.device, self.max_model_len, self.options = device, max_model_len, options
        self.replica = Replica(
            path, dtype=getattr(torch, dtype), device=device, max_model_len=max_model_len
        )
        self.divisible = frozenset(item.name for item in self.replica.items)
        self.tokenizer = load_tokenizer(path)
        self.stop_ids = end_tokens(path, self.replica.hf.config, self.tokenizer)
        self.unready = "no weights have been pulled yet"
        self.asleep: set[str] = set()
        self.parked = False
        self._counts = self._zero_counts()

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Callable[[], None]
    ) -> list[Completion]:
        """See `Engine.generate`."""
        if self.asleep:
            raise EngineError(
                f"the engine sleeps ({', '.join(sorted(self.asleep))}): wake it first"
            )
        if self.unready:
            raise EngineError(f"the engine cannot generate: {self.unready}")
        if not requests:
            return []
        limits = answer_limits(requests, sampling, self.max_model_len)
        decoding = Decoding(
            self.replica,
            requests,
            limits,
            sampling,
            StopRule(self.stop_ids, sampling.stop, self.tokenizer, self.device),
            slots=self._slots(requests, limits),
            progress=progress,
        )
        completions = decoding.run()
        prompt_tokens = sum(len(request.ids) for request in requests)
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["cached_prompt_tokens"] += prompt_tokens - decoding.unique_tokens
        self._counts["generated_tokens"] += sum(len(c.ids) for c in completions)
        return completions

    def _slots(self, requests: Sequence[Request], limits: Sequence[int]) -> int:
        """Sequences that decode together: as asked, or as many as memory holds."""
        longest = max(len(r.ids) + limit for r, limit in zip(requests, limits, strict=True))
        fits = self._cache_bytes() // (self.replica.cache.bytes_per_token * longest)
        return max(1, min(self.options.max_num_seqs, fits))

    def _cache_bytes(self) -> int:
        """Most bytes of keys and values."""
        if self.options.kv_cache_memory_bytes is not None:
            return self.options.kv_cache_memory_bytes
        if self.device.type == "cpu":
            return CPU_CACHE_BYTES
        share = self.options.gpu_memory_utilization or MEMORY_UTILIZATION
        return int(total_memory_bytes() * share) - self.replica.weight_bytes

    def update_weights(self, buckets: Iterator[Bucket], version: int) -> dict[str, int]:
        """See `Engine.update_weights`."""
        if "weights" in self.asleep:
            raise EngineError('the engine\'s weights sleep: wake(["weights"]) before an update')
        self.unready = f"the update to version {version} did not complete"
        checksums = self.replica.load(buckets)
        self.replica.self_check()
        self.unready, self.version = "", version
        return checksums

    def sleep(self, level: int) -> None:
        """See `Engine.sleep`. On CPU, level 1 leaves the weights where they are: in host memory."""
        if level not in (0, 1, 2):
            raise UserError(f"sleep level {level}: 0, 1 or 2")
        if level == 0:
            return
        self.replica.cache.drop()
        if level == 1 and "weights" not in self.asleep:
            self.replica.move(torch.device("cpu"))
            self.parked = True
        elif level == 2:
            self.replica.drop()
            self.parked = False
            self.unready = "sleep level 2 dropped its weights: pull them again"
        self.asleep = set(TAGS)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """See `Engine.wake`."""
        for tag in TAGS if tags is None else tags:
            if tag not in TAGS:
                raise UserError(f"wake tag {tag!r}: one of {', '.join(TAGS)}")
            if tag == "weights" and tag in self.asleep:
                if self.parked:
                    self.replica.move(self.device)
                else:
                    self.replica.allocate()
            self.asleep.discard(tag)

    def stats(self) -> dict[str, float]:
        """See `Engine.stats`. A prompt's second and later samples count as cached."""
        counts, self._counts = self._counts, self._zero_counts()
        prompts = counts["prompt_tokens"]
        return counts | {
            "cache_hit_rate": counts["cached_prompt_tokens"] / prompts if prompts else 0.0
        }

    @staticmethod
    def _zero_counts() -> dict[str, float]:
        names = ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "preemptions")
        return dict.fromkeys(names, 0.0)
