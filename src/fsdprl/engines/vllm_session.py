"""Requests that join and leave a live vLLM one by one, in lockstep where several ranks share it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fsdprl.engines import Completion, Request, Sampling, answer_limits

if TYPE_CHECKING:
    from fsdprl.engines.vllm import VllmEngine


class VllmSession:
    """See `Session`. Requests join vLLM's own batch between two of its steps."""

    def __init__(
        self, engine: "VllmEngine", sampling: Sampling, progress: Callable[[], None]
    ) -> None:
        self.engine, self.sampling, self.progress = engine, sampling, progress
        self.over = False
        self.new: list[list[int]] = []
        self.lanes: dict[str, tuple[int, int]] = {}
        """vLLM's name of a request under way: rank in the group, and lane."""

    @property
    def busy(self) -> bool:
        """See `Session.busy`."""
        return bool(self.lanes or self.new)

    def add(self, lane: int, request: Request, limit: int) -> None:
        """See `Session.add`."""
        wanted = dataclasses.replace(self.sampling, max_new_tokens=limit)
        (limit,) = answer_limits([request], wanted, self.engine.max_model_len)
        self.new.append([lane, limit, request.seed, *request.ids])

    def step(self, waiting: bool) -> list[tuple[int, Completion]]:
        """See `Session.step`. With tensor parallelism, collective over the engine's ranks."""
        new, self.new, group, rank = [[int(waiting)], *self.new], [], self.engine.group, 0
        everyones = [new]
        if group is not None:
            everyones, rank = gather_numbers(new, group), dist.get_rank(group)
        self.over = not self.lanes and all(rows == [[0]] for rows in everyones)
        with self.engine.running(self.progress):
            for owner, (_, *rows) in enumerate(everyones):
                for lane, limit, seed, *ids in rows:
                    self._enter(owner, lane, Request(ids, seed), limit)
            if not self.lanes:
                return []
            outputs = [o for o in self.engine.llm.llm_engine.step() if o.finished]
        ended = []
        for output in outputs:
            owner, lane = self.lanes.pop(output.request_id)
            if owner == rank:
                ended.append((lane, self.engine.completion(lane, output)))
                self.engine.count([output], [ended[-1][1]])
        return ended

    def _enter(self, owner: int, lane: int, request: Request, limit: int) -> None:
        sampling = dataclasses.replace(self.sampling, max_new_tokens=limit)
        (name,) = self.engine.llm.enqueue(
            [{"prompt_token_ids": list(request.ids)}],
            [self.engine.parameters(request, sampling)],
            use_tqdm=False,
        )
        # what comes back bears the name before vLLM made it unique
        self.lanes[name.partition("-")[0]] = (owner, lane)


def gather_requests(requests: Sequence[Request], group: Any) -> list[list[Request]]:
    """Everyone's requests, by rank of `group`. Collective."""
    everyones = gather_numbers([[r.seed, *r.ids] for r in requests], group)
    return [[Request(row[1:], row[0]) for row in rows] for rows in everyones]


def gather_numbers(rows: Sequence[Sequence[int]], group: Any) -> list[list[list[int]]]:
    """Everyone's rows of whole numbers, by rank of `group`. Collective; as tensors, nothing is pickled."""
    words = [word for row in rows for word in (len(row), *row)]
    mine = torch.tensor(words, dtype=torch.int64)
    size = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(mine)]), group=group)
    longest = max(int(count) for count in counts)
    buffers = [torch.zeros(longest, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(buffers, torch.cat([mine, mine.new_zeros(longest - len(mine))]), group=group)
    everyones = []
    for buffer, count in zip(buffers, counts, strict=True):
        flat, start, part = buffer.tolist(), 0, []
        while start < int(count):
            length = flat[start]
            part.append(flat[start + 1 : start + 1 + length])
            start += 1 + length
        everyones.append(part)
    return everyones
