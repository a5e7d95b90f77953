"""A controller without processes: verbs run at once on stores in this process, one a pretended rank."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdprl import controller as controller_module
from fsdprl.batch import Batch, Lease
from fsdprl.controller import Timeline
from fsdprl.exchange import decode_rows, encode_rows
from fsdprl.phases import Phases
from fsdprl.rows import VERBS
from fsdprl.store import Row, Store


class FakeController:
    """Runs row verbs on `ranks` stores. Exchanges pass through the real encoding of rows."""

    def __init__(self, ranks: int) -> None:
        self.world_size = ranks
        self.step, self.redrawn, self.log_entropy = 0, 0, False
        self.timeline = Timeline()
        self.phases = Phases(self)  # type: ignore[arg-type]
        self.workers = [
            SimpleNamespace(
                store=Store(),
                world=SimpleNamespace(rank=rank, size=ranks),
                state={},
                progress=lambda: None,
                debug=True,
                grader=None,
            )
            for rank in range(ranks)
        ]
        self.verbs: dict[str, Any] = {**VERBS, "memory.move": lambda worker, **_: {"peak_bytes": 0}}
        self.called: list[str] = []

    def call(self, verb: str, payload: dict | Sequence[dict], **_: Any) -> Any:
        self.called.append(verb)
        each = [payload] * self.world_size if isinstance(payload, dict) else list(payload)
        if verb == "rows.exchange":
            replies = self.exchange(each)
        else:
            replies = [self.verbs[verb](w, **p) for w, p in zip(self.workers, each, strict=True)]
        return SimpleNamespace(wait=lambda: replies)

    def exchange(self, each: list[dict]) -> list[None]:
        moving = []
        for worker, payload in zip(self.workers, each, strict=True):
            for rank in set(payload["ranks"]) - {worker.world.rank}:
                ids = payload["rows"][payload["to"] == rank].tolist()
                moving.append((rank, encode_rows([(i, worker.store.rows.pop(i)) for i in ids])))
        for rank, encoded in moving:
            for row_id, row in decode_rows(encoded):
                self.workers[rank].store.put(row_id, row)
        return [None] * self.world_size

    def batch(self, prompt: Sequence[int], response: Sequence[int], ranks: Sequence[int]) -> Batch:
        """Rows of random tokens with these lengths on these ranks, with `logp_sampler`."""
        lease = Lease(torch.tensor(ranks))
        for i, (p, r, rank) in enumerate(zip(prompt, response, ranks, strict=True)):
            generator = torch.Generator().manual_seed(i)
            ids = torch.randint(5, 50, (p + r,), generator=generator, dtype=torch.int32)
            row = Row(ids, torch.arange(p + r) >= p, {"prompt": f"p{i}", "prompt_length": p})
            row.columns["logp_sampler"] = -torch.rand(r, generator=generator)
            self.workers[rank].store.put(lease.start + i, row)
        tokens = torch.tensor(prompt) + torch.tensor(response)
        columns = {
            "length": torch.tensor(response),
            "tokens": tokens,
            "loss_tokens": torch.tensor(response),
        }
        return Batch.of(lease, columns, ["logp_sampler"])


def install(monkeypatch: pytest.MonkeyPatch, ranks: int) -> FakeController:
    """Make `controller.current()` return a fake of this many ranks."""
    fake = FakeController(ranks)
    monkeypatch.setattr(controller_module, "_current", fake)
    return fake
