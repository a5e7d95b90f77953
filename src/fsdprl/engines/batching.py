"""Continuous batching: sequences enter as slots fall free, and leave when they are finished.

The active sequences always fill slots [0, B): one that ends is replaced by the last one, so that
every forward runs over a plain slice of the cache. A prompt is computed once, whatever the number
of its samples. Longer prompts go first, so that rows of like length meet and padding is small.
Nothing here can change which tokens come out: each row draws from its own seed and position.

Shapes: N requests, B active rows, P prompts of a block, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fsdprl.engines import Completion, EngineError, FinishReason, Request, Sampling
from fsdprl.engines.decoding import GREEDY_BELOW, choose, filter_logits, uniforms
from fsdprl.engines.kvcache import Prefill
from fsdprl.engines.replica import Replica
from fsdprl.engines.stopping import StopRule

PREFILL_TOKENS = 8192
"""Most padded prompt tokens of one forward; a longer prompt runs alone."""
LOGITS_ELEMENTS = 1 << 25
"""Most logits at a time (128 MB of float32), whatever the vocabulary."""


@dataclass
class Rows:
    """The active sequences, int64 [B] each; row b is slot b of the cache."""

    request: Tensor
    """Ordinal of the request."""
    seed: Tensor
    token: Tensor
    """Drawn last, not yet in the cache."""
    length: Tensor
    """Tokens in the cache."""
    drawn: Tensor
    """Answer tokens so far."""
    limit: Tensor
    """Answer tokens at most."""

    def __len__(self) -> int:
        return len(self.request)

    def of(self, function: Callable[[Tensor], Tensor]) -> "Rows":
        """`function` of every field."""
        return Rows(*(function(getattr(self, field.name)) for field in fields(self)))

    def joined(self, other: "Rows") -> "Rows":
        """These rows, then `other`."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Rows(*(torch.cat(pair) for pair in pairs))


@dataclass
class Block:
    """Computed prompts whose samples wait for slots."""

    prompts: Prefill
    logits: Tensor
    """float32 [P, V], of each prompt's first answer token."""
    source: Tensor
    """int64: prompt of each waiting sample."""
    rows: Rows
    """The waiting samples."""


class Decoding:
    """One `generate` call."""

    def __init__(
        self,
        replica: Replica,
        requests: Sequence[Request],
        limits: Sequence[int],
        sampling: Sampling,
        stop: StopRule,
        *,
        slots: int,
        progress: Callable[[], None],
    ) -> None:
        """limits: most answer tokens of each request. slots: most sequences decoded together."""
        self.replica, self.requests, self.sampling, self.stop = replica, requests, sampling, stop
        self.progress, self.device = progress, replica.device
        self.slots = min(slots, len(requests))
        self.limits, self.width = list(limits), max(limits)
        self.waiting = self._prompts()
        self.unique_tokens = sum(len(prompt) for prompt, _ in self.waiting)
        self.block: Block | None = None
        self.rows = self._rows([])
        size = len(requests) * self.width
        self.tokens = torch.zeros(size, dtype=torch.int32, device=self.device)
        self.logps = torch.zeros(size, dtype=torch.float32, device=self.device)
        self.counts = [0] * len(requests)
        self.stopped = [False] * len(requests)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            shape = (self.slots, replica.vocabulary)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        columns = max(len(r.ids) + limit - 1 for r, limit in zip(requests, limits, strict=True))
        replica.cache.open(self.slots, columns)

    def _prompts(self) -> list[tuple[tuple[int, ...], list[int]]]:
        """Each different prompt with its requests, the longest first; a stack, so reversed."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for ordinal, request in enumerate(self.requests):
            groups.setdefault(tuple(request.ids), []).append(ordinal)
        return sorted(groups.items(), key=lambda item: -len(item[0]))[::-1]

    def _rows(self, ordinals: Sequence[int]) -> Rows:
        """Fresh rows of these requests, nothing drawn yet."""
        chosen = [self.requests[i] for i in ordinals]
        columns = [
            list(ordinals),
            [request.seed for request in chosen],
            [0] * len(chosen),
            [len(request.ids) for request in chosen],
            [0] * len(chosen),
            [self.limits[i] for i in ordinals],
        ]
        return Rows(*(torch.tensor(c, dtype=torch.int64, device=self.device) for c in columns))

    @torch.inference_mode()
    def run(self) -> list[Completion]:
        """Decode everything; completions in the order of the requests."""
        while True:
            self._admit()
            if len(self.rows) == 0:
                break
            self._step()
        drawn = torch.tensor(self.counts, device=self.device)[:, None]
        kept = torch.arange(self.width, device=self.device) < drawn
        tokens = self.tokens.view(kept.shape)[kept].cpu().split(self.counts)
        logps = self.logps.view(kept.shape)[kept].cpu().split(self.counts)
        reasons: list[FinishReason] = ["stop" if stopped else "length" for stopped in self.stopped]
        return [Completion(*parts) for parts in zip(tokens, logps, reasons, strict=True)]

    def _admit(self) -> None:
        """Fill free slots, unless so few are free that the extra forward would cost more."""
        while self.block is not None or self.waiting:
            free = self.slots - len(self.rows)
            if free == 0 or (len(self.rows) and free < self.slots // 8):
                return
            if self.block is None:
                self.block = self._prefill()
                self.progress()
            self._enter(self.block, free)

    def _prefill(self) -> Block:
        """Compute the next prompts, as many as one forward takes."""
        prompts: list[tuple[int, ...]] = []
        ordinals: list[int] = []
        source: list[int] = []
        while self.waiting:
            prompt, of_prompt = self.waiting[-1]
            longest = len(prompts[0]) if prompts else len(prompt)
            full = (len(prompts) + 1) * longest > PREFILL_TOKENS
            full = full or (len(prompts) + 1) * self.replica.vocabulary > LOGITS_ELEMENTS
            if prompts and full:
                break
            self.waiting.pop()
            source += [len(prompts)] * len(of_prompt)
            ordinals += of_prompt
            prompts.append(prompt)
        longest = len(prompts[0])
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        ids = torch.tensor(padded, dtype=torch.int64, device=self.device)
        last = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        keep, logits = self.replica.prefill(ids, last)
        where = torch.tensor(source, device=self.device)
        return Block(keep, logits, where, self._rows(ordinals))

    def _enter(self, block: Block, free: int) -> None:
        """Put waiting samples of the block into free slots and draw their first tokens."""
        first = len(self.rows)
        source, new = block.source[:free], block.rows.of(lambda x: x[:free])
        block.source, block.rows = block.source[free:], block.rows.of(lambda x: x[free:])
        if len(block.rows) == 0:
            self.block = None
        self.replica.cache.place(block.prompts, source, first)
        self.rows = self.rows.joined(new)
        if self.seen is not None:
            self._mark_prompts(new, first)
        for rows in self._chunks(first, len(self.rows)):
            part = source[rows.start - first : rows.stop - first]
            self._draw(block.logits.index_select(0, part), rows)
        self._retire(first)

    def _mark_prompts(self, new: Rows, first: int) -> None:
        assert self.seen is not None
        self.seen[first : first + len(new)] = False
        for slot, ordinal in enumerate(new.request.tolist(), start=first):
            ids = torch.as_tensor(self.requests[ordinal].ids, dtype=torch.int64, device=self.device)
            self.seen[slot, ids] = True

    def _step(self) -> None:
        """One more token of every active row."""
        rows = self.rows
        shortest, longest = (int(x) for x in rows.length.aminmax())
        hidden = self.replica.decode(rows.token, rows.length, longest + 1, shortest != longest)
        rows.length += 1
        for part in self._chunks(0, len(rows)):
            self._draw(self.replica.logits(hidden[part]), part)
        self._retire(0)
        self.progress()

    def _chunks(self, start: int, stop: int) -> Iterator[slice]:
        """Rows [start, stop) in pieces whose logits fit."""
        size = max(1, LOGITS_ELEMENTS // self.replica.vocabulary)
        for i in range(start, stop, size):
            yield slice(i, min(i + size, stop))

    def _draw(self, logits: Tensor, part: slice) -> None:
        """Draw the next token of rows `part` and write it down."""
        rows = self.rows.of(lambda x: x[part])
        seen = self.seen[part] if self.seen is not None else None
        logits = filter_logits(logits, self.sampling, seen)
        greedy = self.sampling.temperature < GREEDY_BELOW
        token, logp = choose(logits, None if greedy else uniforms(rows.seed, rows.drawn))
        finite = torch.isfinite(logp)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            ordinal, position = int(rows.request[row]), int(rows.drawn[row])
            raise EngineError(
                f"non-finite logits at request {ordinal} (prompt of {len(self.requests[ordinal].ids)} "
                f"tokens), answer token {position}: weights or activations overflow"
            )
        place = rows.request * self.width + rows.drawn
        self.tokens.index_copy_(0, place, token.to(torch.int32))
        self.logps.index_copy_(0, place, logp)
        rows.token.copy_(token)
        rows.drawn.add_(1)
        if seen is not None:
            seen.scatter_(1, token[:, None], True)

    def _retire(self, first: int) -> None:
        """Take finished rows among [first, B) out; the last rows move into their slots."""
        rows = self.rows.of(lambda x: x[first:])
        ended = self.stop.ended(rows, self.tokens, self.width)
        finished = (ended | (rows.drawn >= rows.limit)).nonzero().flatten() + first
        if len(finished) == 0:
            return
        gone = self.rows.of(lambda x: x[finished])
        for ordinal, drawn, stopped in zip(
            gone.request.tolist(),
            gone.drawn.tolist(),
            ended[finished - first].tolist(),
            strict=True,
        ):
            self.counts[ordinal], self.stopped[ordinal] = drawn, stopped
        left = len(self.rows) - len(finished)
        stays = torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        stays[finished] = False
        movers = stays[left:].nonzero().flatten() + left
        holes = finished[: len(movers)]
        if len(movers):
            columns = int(self.rows.length[movers].max())
            self.replica.cache.move(movers, holes, columns)
            if self.seen is not None:
                self.seen[holes] = self.seen[movers]
        order = torch.arange(left, device=self.device)
        order[holes] = movers
        self.rows = self.rows.of(lambda x: x[order])
