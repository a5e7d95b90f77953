"""The built-in engine: transformers' modelling code over a cache and a batching loop of our own.

It runs wherever PyTorch does, starts in a second, and is the default on CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

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
        self._check_ready()
        if not requests:
            return []
        limits = answer_limits(requests, sampling, self.max_model_len)
        longest = max(len(r.ids) + limit for r, limit in zip(requests, limits, strict=True))
        decoding = self._decoding(sampling, progress, len(requests), max(limits), longest)
        for lane, (request, limit) in enumerate(zip(requests, limits, strict=True)):
            decoding.add(lane, request, limit)
        found: dict[int, Completion] = {}
        while decoding.busy:
            found |= decoding.step()
        completions = [found[lane] for lane in range(len(requests))]
        prompt_tokens = sum(len(request.ids) for request in requests)
        self.count(prompt_tokens, prompt_tokens - decoding.computed_tokens, completions)
        return completions

    def session(
        self, lanes: int, sampling: Sampling, progress: Callable[[], None]
    ) -> "BuiltInSession":
        """See `Engine.session`."""
        self._check_ready()
        width = min(sampling.max_new_tokens, self.max_model_len - 1)
        decoding = self._decoding(sampling, progress, max(lanes, 1), width, self.max_model_len)
        return BuiltInSession(self, decoding)

    def _check_ready(self) -> None:
        if self.asleep:
            raise EngineError(
                f"the engine sleeps ({', '.join(sorted(self.asleep))}): wake it first"
            )
        if self.unready:
            raise EngineError(f"the engine cannot generate: {self.unready}")

    def _decoding(
        self, sampling: Sampling, progress: Callable[[], None], lanes: int, width: int, longest: int
    ) -> Decoding:
        return Decoding(
            self.replica,
            sampling,
            StopRule(self.stop_ids, sampling.stop, self.tokenizer, self.device),
            lanes=lanes,
            width=width,
            columns=max(1, longest - 1),
            slots=self._slots(longest),
            progress=progress,
        )

    def count(self, prompt_tokens: int, cached: int, completions: Sequence[Completion]) -> None:
        """Add to what `stats` tells."""
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["cached_prompt_tokens"] += cached
        self._counts["generated_tokens"] += sum(len(c.ids) for c in completions)

    def _slots(self, longest: int) -> int:
        """Sequences of up to `longest` tokens that decode together: as asked, or as many as memory holds."""
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


class BuiltInSession:
    """See `Session`. A turn's prompt is computed as a whole: its earlier turns' keys were given up with its slot."""

    def __init__(self, engine: TransformersEngine, decoding: Decoding) -> None:
        self.engine, self.decoding, self.over = engine, decoding, False
        self.computed = 0

    @property
    def busy(self) -> bool:
        """See `Session.busy`."""
        return self.decoding.busy

    def add(self, lane: int, request: Request, limit: int) -> None:
        """See `Session.add`."""
        wanted = replace(self.decoding.sampling, max_new_tokens=limit)
        (limit,) = answer_limits([request], wanted, self.engine.max_model_len)
        self.decoding.add(lane, request, limit)
        self.engine.count(len(request.ids), len(request.ids), [])

    def step(self, waiting: bool) -> list[tuple[int, Completion]]:
        """See `Session.step`."""
        self.over = not (self.busy or waiting)
        if not self.busy:
            return []
        ended = self.decoding.step()
        computed, self.computed = (
            self.decoding.computed_tokens - self.computed,
            self.decoding.computed_tokens,
        )
        self.engine.count(0, -computed, [completion for _, completion in ended])
        return ended
