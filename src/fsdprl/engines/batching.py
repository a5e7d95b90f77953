"""Continuous batching: sequences enter as slots fall free, and leave when they are finished.

The active sequences always fill slots [0, B): one that ends is replaced by the last one, so that
every forward runs over a plain slice of the cache. A prompt is computed once, whatever the number
of its samples. Longer prompts go first, so that rows of like length meet and padding is small.
Nothing here can change which tokens come out: each row draws from its own seed and position.

Shapes: B active rows, P prompts of a block, V vocabulary.
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

    lane: Tensor
    """Where the request was added, and where its answer is written."""
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
        return len(self.lane)

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
    """Requests that are added at any time, and answers that leave one by one."""

    def __init__(
        self,
        replica: Replica,
        sampling: Sampling,
        stop: StopRule,
        *,
        lanes: int,
        width: int,
        columns: int,
        slots: int,
        progress: Callable[[], None],
    ) -> None:
        """lanes: most requests under way or waiting at a time. width: most tokens of an answer. columns: most tokens
        of a prompt and its answer, the last one left out. slots: most sequences decoded together."""
        self.replica, self.sampling, self.stop = replica, sampling, stop
        self.progress, self.device = progress, replica.device
        self.slots, self.width = min(slots, lanes), width
        self.requests: dict[int, Request] = {}
        self.limits: dict[int, int] = {}
        self.waiting: dict[tuple[int, ...], list[int]] = {}
        self.stack: list[tuple[int, ...]] = []
        self.computed_tokens = 0
        self.block: Block | None = None
        self.rows = self._rows([])
        size = lanes * self.width
        self.tokens = torch.zeros(size, dtype=torch.int32, device=self.device)
        self.logps = torch.zeros(size, dtype=torch.float32, device=self.device)
        self.finished: list[tuple[int, Completion]] = []
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            shape = (self.slots, replica.vocabulary)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        replica.cache.open(self.slots, columns)

    def add(self, lane: int, request: Request, limit: int) -> None:
        """Let a request wait for a slot; its lane must be free. limit: its most answer tokens."""
        self.requests[lane], self.limits[lane] = request, limit
        self.waiting.setdefault(tuple(request.ids), []).append(lane)
        self.stack.clear()  # sorted anew when prompts are computed next

    @property
    def busy(self) -> bool:
        """Whether there is anything left to decode."""
        return bool(len(self.rows) or self.block is not None or self.waiting)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Let requests in, draw a token for every active row; (lane, answer) of those that have ended."""
        self._admit()
        if len(self.rows):
            self._step()
        finished, self.finished = self.finished, []
        return finished

    def _rows(self, lanes: Sequence[int]) -> Rows:
        """Fresh rows of these requests, nothing drawn yet."""
        chosen = [self.requests[lane] for lane in lanes]
        columns = [
            list(lanes),
            [request.seed for request in chosen],
            [0] * len(chosen),
            [len(request.ids) for request in chosen],
            [0] * len(chosen),
            [self.limits[lane] for lane in lanes],
        ]
        return Rows(*(torch.tensor(c, dtype=torch.int64, device=self.device) for c in columns))

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
        lanes: list[int] = []
        source: list[int] = []
        if not self.stack:  # the longest first, and of equal ones the first to come
            self.stack = sorted(self.waiting, key=len, reverse=True)[::-1]
        while self.stack:
            prompt = self.stack[-1]
            longest = len(prompts[0]) if prompts else len(prompt)
            full = (len(prompts) + 1) * longest > PREFILL_TOKENS
            full = full or (len(prompts) + 1) * self.replica.vocabulary > LOGITS_ELEMENTS
            if prompts and full:
                break
            of_prompt = self.waiting.pop(self.stack.pop())
            source += [len(prompts)] * len(of_prompt)
            lanes += of_prompt
            prompts.append(prompt)
        self.computed_tokens += sum(map(len, prompts))
        longest = len(prompts[0])
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        ids = torch.tensor(padded, dtype=torch.int64, device=self.device)
        last = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        keep, logits = self.replica.prefill(ids, last)
        where = torch.tensor(source, device=self.device)
        return Block(keep, logits, where, self._rows(lanes))

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
        for slot, lane in enumerate(new.lane.tolist(), start=first):
            ids = torch.as_tensor(self.requests[lane].ids, dtype=torch.int64, device=self.device)
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
            lane, position = int(rows.lane[row]), int(rows.drawn[row])
            raise EngineError(
                f"non-finite logits at request {lane} (prompt of {len(self.requests[lane].ids)} "
                f"tokens), answer token {position}: weights or activations overflow"
            )
        place = rows.lane * self.width + rows.drawn
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
        self._complete(self.rows.of(lambda x: x[finished]), ended[finished - first].tolist())
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

    def _complete(self, gone: Rows, stopped: Sequence[bool]) -> None:
        """Take the answers of finished rows out of their lanes."""
        tokens = self.tokens.view(-1, self.width)[gone.lane].cpu()
        logps = self.logps.view(-1, self.width)[gone.lane].cpu()
        for i, (lane, drawn) in enumerate(
            zip(gone.lane.tolist(), gone.drawn.tolist(), strict=True)
        ):
            reason: FinishReason = "stop" if stopped[i] else "length"
            kept = Completion(tokens[i, :drawn].clone(), logps[i, :drawn].clone(), reason)
            self.finished.append((lane, kept))
            del self.requests[lane], self.limits[lane]
