"""Sampling engines: one small protocol, two implementations.

`transformers` is built in and needs nothing else; `vllm` runs the real vLLM inside the rank's
process. Either holds its own copy of the policy, filled only through `update_weights`, takes
token ids and gives token ids: text is never encoded again on the way to the trainer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from fsdprl.checkpoint_files import find_checkpoint
from fsdprl.engine_choice import choose_engine
from fsdprl.errors import UserError
from fsdprl.options import EngineOptions
from fsdprl.world import World

if TYPE_CHECKING:
    from fsdprl.stream import Bucket

FinishReason = Literal["stop", "length"]
"""stop: an end token or a stop string; length: max_new_tokens or max_model_len was reached."""


class EngineError(RuntimeError):
    """The engine cannot go on: weights that do not fit, a call out of turn, non-finite logits."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; the same for all requests of one call.

    top_p, top_k, min_p and repetition_penalty at 1, -1, 0 and 1 are off. They change what is
    sampled, and with it the log-probs in `Completion.logp`; a trainer that computes plain ones
    no longer agrees.
    """

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Strings that end an answer. It keeps them, and the token that completed them."""

    def __post_init__(self) -> None:
        """Raises UserError naming the option that is out of range."""
        checks = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": 0.0 <= self.temperature < float("inf"),
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k >= 1 or self.top_k in (-1, 0),
            "min_p": 0.0 <= self.min_p <= 1.0,
            "repetition_penalty": self.repetition_penalty > 0.0,
            "stop": all(self.stop) and not isinstance(self.stop, str),
        }
        for name, good in checks.items():
            if not good:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)!r} is out of range: {RANGES[name]}"
                )
        object.__setattr__(self, "stop", tuple(self.stop))


RANGES = {
    "max_new_tokens": "at least 1",
    "temperature": "0 (greedy) or more",
    "top_p": "above 0, at most 1 (1 is off)",
    "top_k": "at least 1, or -1 for off",
    "min_p": "from 0 (off) to 1",
    "repetition_penalty": "above 0 (1 is off)",
    "stop": "a list of strings, none of them empty",
}


@dataclass(frozen=True)
class Request:
    """One answer to sample."""

    ids: Sequence[int]
    """The prompt's tokens, at least one."""
    seed: int
    """The answer's own randomness, 0 <= seed < 2^63: the same seed, prompt and weights give the
    same answer whatever else is in the batch."""


@dataclass
class Completion:
    """One sampled answer."""

    ids: Tensor
    """int32 [n], n >= 1: the answer's tokens, the end token included."""
    logp: Tensor
    """float32 [n]: log-prob of each token in the distribution it was drawn from, that is after
    repetition penalty, temperature and filters, renormalised. Greedy answers (temperature 0)
    carry those of temperature 1."""
    finish: FinishReason


class Session(Protocol):
    """Requests that are added one by one while others are on their way. Where ranks share an engine, all of them
    step until it is over."""

    over: bool
    """Nothing was under way or to come when the last step began."""

    @property
    def busy(self) -> bool:
        """Whether the engine has anything under way."""
        ...

    def add(self, lane: int, request: Request, limit: int) -> None:
        """Begin a request of at most `limit` answer tokens. lane: any number below the session's lanes that no
        other request under way has. Raises UserError for a prompt that leaves no room below max_model_len."""
        ...

    def step(self, waiting: bool) -> list[tuple[int, Completion]]:
        """A token for every request under way; lanes and answers of those that have ended.

        waiting: whether this rank may still add some. Raises EngineError on non-finite logits."""
        ...


class Engine(Protocol):
    """What a rank needs of an engine."""

    version: int
    """Version of the weights it holds; -1 for none."""
    max_model_len: int
    """Most tokens of a prompt with its answer."""
    divisible: frozenset[str]
    """Weights that may come in parts (`stream.Part`) where they are larger than a bucket."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Callable[[], None]
    ) -> list[Completion]:
        """One completion a request, in order. `progress` is called at every decoding step.

        Raises EngineError without good weights, asleep, or on non-finite logits (naming request and
        token), UserError for a prompt that leaves no room below max_model_len.
        """
        ...

    def session(self, lanes: int, sampling: Sampling, progress: Callable[[], None]) -> Session:
        """Begin to take requests one by one, at most `lanes` at a time. Raises as `generate` does; no other
        call until it is over."""
        ...

    def update_weights(self, buckets: "Iterator[Bucket]", version: int) -> dict[str, int]:
        """Take a whole new set of weights; returns `stream.tensor_checksum` of what arrived, by name.

        Raises EngineError naming the parameter that is missing, unexpected, doubled, of the wrong
        shape or type, or not finite; nothing is generated until an update has succeeded.
        """
        ...

    def sleep(self, level: int) -> None:
        """Give memory back: 1 parks weights in host memory and drops the cache, 2 drops both, 0 neither."""
        ...

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again: "weights", "kv_cache", or both (None). After level 2 an update must follow."""
        ...

    def stats(self) -> dict[str, float]:
        """Counts since the last call: prompt_tokens, cached_prompt_tokens, generated_tokens,
        preemptions, and cache_hit_rate (cached over all prompt tokens)."""
        ...


def answer_limits(requests: Sequence[Request], sampling: Sampling, max_model_len: int) -> list[int]:
    """Tokens that each request may draw.

    Raises UserError for a prompt that is empty or leaves no room below max_model_len.
    """
    for ordinal, request in enumerate(requests):
        if not 0 < len(request.ids) < max_model_len:
            raise UserError(
                f"request {ordinal} has a prompt of {len(request.ids)} tokens; the engine takes 1 to "
                f"{max_model_len - 1} (--max-prompt-length plus --max-new-tokens, less one)"
            )
    return [min(sampling.max_new_tokens, max_model_len - len(r.ids)) for r in requests]


def build_engine(
    kind: str,
    path: str,
    options: EngineOptions,
    *,
    world: World,
    device: torch.device,
    dtype: str,
    max_model_len: int,
    seed: int,
) -> Engine:
    """Build the engine of this rank for the checkpoint `path`, without its weights.

    kind: "transformers", "vllm", or "auto" (vllm on an accelerator). dtype, max_model_len: of the
    engine, where the options do not say otherwise. For vLLM this is a collective over all ranks.
    Raises UserError for an architecture or an option that the engine cannot honour.
    """
    chosen = choose_engine(replace(options, kind=kind), device.type, world.size)
    folder = str(find_checkpoint(path).folder)
    dtype = dtype if options.dtype == "auto" else options.dtype
    max_model_len = options.max_model_len or max_model_len
    if chosen == "transformers":
        from fsdprl.engines.transformers import TransformersEngine

        return TransformersEngine(
            folder, options, device=device, dtype=dtype, max_model_len=max_model_len
        )
    from fsdprl.engines.vllm import VllmEngine

    return VllmEngine(
        folder,
        options,
        world=world,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=seed,
    )
