"""Worker verbs over the sampling engine: build, pull weights, generate rows."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdprl import device
from fsdprl.engines import Completion, Request, Sampling, build_engine
from fsdprl.hf_layout import layout_of
from fsdprl.options import EngineOptions
from fsdprl.store import Row
from fsdprl.stream import shard_checksums, weight_stream
from fsdprl.worker import Worker

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def build(
    worker: Worker,
    *,
    kind: str,
    path: str,
    options: dict,
    dtype: str,
    max_model_len: int,
    seed: int,
    chat_template: str,
) -> None:
    """Make the engine and the tokenizer that turns its tokens into text."""
    from fsdprl.data.chat import load_tokenizer  # transformers: seconds to import, needed only here

    worker.state["tokenizer"] = load_tokenizer(path, chat_template=chat_template or None)
    worker.state["engine_options"] = EngineOptions(**options)
    worker.state["engine_dtype"] = DTYPES[dtype]
    device.empty_cache()  # what loading left in torch's cache would count as taken
    worker.engine = build_engine(
        kind,
        path,
        worker.state["engine_options"],
        world=worker.world,
        device=worker.device,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=seed,
    )


def pull(worker: Worker, *, model: str, version: int) -> None:
    """Stream the model's shards into the engine bucket by bucket and compare checksums of what was sent and received.

    Raises ValueError naming the first parameter that is missing, unexpected or different.
    """
    trained = worker.models[model]
    dtype = worker.state["engine_dtype"]
    bucket_bytes = int(worker.state["engine_options"].bucket_mb * 2**20)
    layout = layout_of(trained.network)
    buckets = weight_stream(
        layout,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        group=trained.group,
        divisible=worker.engine.divisible,
    )

    def ticking() -> Any:
        for bucket in buckets:
            worker.progress()
            yield bucket
            del bucket  # gone before the next one is made

    received = worker.engine.update_weights(ticking(), version)
    sent = shard_checksums(layout, dtype=dtype, group=trained.group)
    for name in sorted(sent.keys() | received.keys()):
        if sent.get(name) != received.get(name):
            worker.engine.version = -1
            raise ValueError(
                f"weights of version {version} differ between trainer and engine: {name} "
                f"(sent {sent.get(name)}, received {received.get(name)}); nothing is generated with them"
            )


def sampling_of(worker: Worker, sampling: dict, version: int) -> Sampling:
    """Settings as they travel, for the engine. Raises ValueError where it holds other weights than `version`."""
    if worker.engine.version != version:
        raise ValueError(
            f"the engine holds weights of version {worker.engine.version}, not {version}: pull first"
        )
    most, stop = int(sampling["max_new_tokens"]), tuple(sampling["stop"])
    return Sampling(**(sampling | {"max_new_tokens": most, "stop": stop}))


def generate(
    worker: Worker,
    *,
    first_row: list[int],
    lengths: Tensor,
    ids: Tensor,
    infos: list[dict],
    seeds: Tensor,
    n: int,
    sampling: dict,
    version: int,
) -> dict[str, Any]:
    """Sample n answers to each prompt of this rank and keep them as rows.

    lengths, ids: the prompts' tokens back to back. first_row: row id of each prompt's first answer.
    seeds: [prompts * n].
    Returns sample columns [prompts * n] and the engine's statistics.
    """
    wanted = sampling_of(worker, sampling, version)
    prompts = list(ids.split(lengths.tolist())) if len(lengths) else []
    tokens = [prompt.tolist() for prompt in prompts]
    requests = [Request(tokens[i // n], int(seed)) for i, seed in enumerate(seeds.tolist())]
    completions = worker.engine.generate(requests, wanted, worker.progress)
    asked, said = lengths.tolist(), [len(completion.ids) for completion in completions]
    for i, (completion, row_ids) in enumerate(
        zip(completions, _joined(prompts, completions, n), strict=True)
    ):
        info = infos[i // n] | {
            "prompt_length": asked[i // n],
            "truncated": completion.finish == "length",
            "max_new_tokens": wanted.max_new_tokens,
        }
        mask = torch.arange(len(row_ids)) >= asked[i // n]
        row = Row(row_ids, mask, info, {"logp_sampler": completion.logp}, said[i])
        worker.store.put(first_row[i // n] + i % n, row)
    return {
        "length": torch.tensor(said, dtype=torch.int64),
        "truncated": torch.tensor([c.finish == "length" for c in completions], dtype=torch.bool),
        "stats": {name: float(value) for name, value in worker.engine.stats().items()},
    }


def _joined(
    prompts: Sequence[Tensor], completions: Sequence[Completion], n: int
) -> Iterator[Tensor]:
    """ids, int32 [L], of each prompt with each of its answers."""
    parts = [p for i, c in enumerate(completions) for p in (prompts[i // n], c.ids)]
    if not parts:
        return
    ids = torch.cat(parts).to(torch.int32)
    sizes = [len(parts[i]) + len(parts[i + 1]) for i in range(0, len(parts), 2)]
    for part in ids.split(sizes):
        yield part.clone()  # a view would keep all of them alive for as long as one row lives


VERBS: dict[str, Callable[..., Any]] = {
    "engine.build": build,
    "engine.pull": pull,
    "engine.generate": generate,
}
