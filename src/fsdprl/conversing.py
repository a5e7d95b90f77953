"""Worker verb: conversations of several turns, all of them under way at once inside the engine.

A row is the prompt, and behind it turns of the model and of its environment, token by token as they were sampled and
encoded. Loss tokens are the model's; each keeps the engine's log-prob. While an environment thinks, its conversation
is not in the engine, and nobody waits for it.
"""

import hashlib
import math
import numbers
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsdprl.conversation import Conversation
from fsdprl.data.chat import checked_messages
from fsdprl.data.turns import Turns
from fsdprl.engines import Completion, Request, Sampling, Session
from fsdprl.env_calls import Answer, EnvCalls, Partner
from fsdprl.errors import UserError
from fsdprl.functions import FunctionRef, resolve
from fsdprl.options import TurnOptions
from fsdprl.rollout import sampling_of
from fsdprl.store import Row
from fsdprl.worker import Worker

SPEAKERS = ("tool", "user", "system")
IDLE_S = 0.05


@dataclass
class Talk:
    """One conversation on its way."""

    row: int
    prompt: list[int]
    info: dict[str, Any]
    seed: int
    partner: Partner
    seen: Conversation
    said: list[dict[str, Any]] | None
    """Messages as the template reads them, special tokens in them; None for a plain text prompt."""
    text: str
    ids: list[int] = field(default_factory=list)
    """Tokens behind the prompt."""
    mask: list[bool] = field(default_factory=list)
    """Which of them the model has drawn."""
    logps: list[Tensor] = field(default_factory=list)
    end: str = ""
    rewritten: bool = False
    cut: bool = False
    """The environment's messages left no room for another turn."""
    unheard: bool = False
    """It would have gone on, but had no turns left."""
    reward: float = math.nan
    lost: str = ""

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended it."""
        return self.seen.truncated or self.cut


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn, below 2^62; the first one's is the conversation's own."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class Rollout:
    """The conversations of one call."""

    def __init__(
        self,
        worker: Worker,
        talks: Sequence[Talk],
        sampling: Sampling,
        options: TurnOptions,
        turns: Turns,
    ) -> None:
        self.worker, self.talks, self.options, self.turns = worker, list(talks), options, turns
        self.sampling, self.tokenizer = sampling, worker.state["tokenizer"]
        self.specials = set(self.tokenizer.all_special_ids)

    def run(self) -> None:
        """Let all conversations come to their ends. Raises UserError for an environment's mistakes."""
        session: Session = self.worker.engine.session(
            len(self.talks), self.sampling, self.worker.progress
        )
        calls = EnvCalls(self.options.timeout_s, self.options.concurrency)
        outside: set[int] = set()
        try:
            for lane in range(len(self.talks)):
                self._ask_model(session, lane)
            while True:
                for lane, completion in session.step(bool(outside)):
                    self._hear_model(self.talks[lane], completion)
                    calls.ask(lane, self.talks[lane].partner, self.talks[lane].seen)
                    outside.add(lane)
                if session.over:
                    return
                for answer in calls.answers(0.0 if session.busy or not outside else IDLE_S):
                    outside.remove(answer.key)
                    if self._hear_env(self.talks[answer.key], answer):
                        self._ask_model(session, answer.key)
                self.worker.progress()
        finally:
            calls.close()

    def _ask_model(self, session: Session, lane: int) -> None:
        talk = self.talks[lane]
        limit = min(self._room(talk), self.options.max_turn_tokens or self.sampling.max_new_tokens)
        seed = turn_seed(talk.seed, talk.seen.turn)
        session.add(lane, Request([*talk.prompt, *talk.ids], seed), limit)

    def _room(self, talk: Talk) -> int:
        return self.sampling.max_new_tokens - len(talk.ids)

    def _hear_model(self, talk: Talk, completion: Completion) -> None:
        ids = completion.ids.tolist()
        talk.ids += ids
        talk.mask += [True] * len(ids)
        talk.logps.append(completion.logp)
        ended = completion.finish == "stop" and not self.specials.isdisjoint(ids[-1:])
        talk.end = self._decoded(ids[-1:]) if ended else ""
        whole = self._decoded(ids)
        talk.text += whole
        seen = talk.seen
        _append(seen.messages, self.tokenizer.decode(ids, skip_special_tokens=True))
        if talk.said is not None:
            _append(talk.said, whole.removesuffix(talk.end))
        seen.turn += 1
        seen.truncated = completion.finish == "length"
        seen.turns_left = 0 if seen.truncated else self.options.max_turns - seen.turn
        seen.tokens_left = self._room(talk)

    def _hear_env(self, talk: Talk, answer: Answer) -> bool:
        """Take an environment's answer; whether the model is to go on."""
        seen = talk.seen
        if answer.trace:
            raise UserError(
                f"the environment raised after turn {seen.turn} of row {talk.row}:\n{answer.trace}"
            )
        if answer.lost:
            talk.lost = answer.lost
            # a thread that is left behind may go on writing into what it was given
            talk.seen = replace(seen, messages=list(seen.messages), counts=Counter(seen.counts))
            return False
        value = answer.value
        if value is None or isinstance(value, numbers.Real):
            talk.reward = math.nan if value is None else float(value)
            if value is not None and not math.isfinite(talk.reward):
                raise UserError(f"the environment ended row {talk.row} with reward {value!r}")
            return False
        heard = _checked(value, talk.row)
        if seen.truncated or not seen.turns_left:
            talk.unheard = not seen.truncated
            return False
        between = self.turns.between(talk.said, heard, talk.text, talk.end)
        if len(between.ids) >= self._room(talk):
            talk.cut = True
            return False
        talk.ids += between.ids
        talk.mask += [False] * len(between.ids)
        talk.text += between.text
        talk.rewritten |= between.rewritten
        seen.messages += _copies(heard)
        if talk.said is not None:
            talk.said += heard
        return True

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _copies(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For the environment, which may write into what it sees."""
    return [dict(message) for message in messages]


def _append(messages: list[dict[str, Any]], text: str) -> None:
    """A turn of the model's; it continues an assistant's message that the prompt left open."""
    if messages and messages[-1]["role"] == "assistant":
        messages[-1] = messages[-1] | {"content": messages[-1]["content"] + text}
    else:
        messages.append({"role": "assistant", "content": text})


def _checked(value: Any, row: int) -> list[dict[str, Any]]:
    """An environment's messages. Raises UserError naming what is wrong with them."""
    where = f"the environment's answer to row {row}"
    heard = checked_messages([value] if isinstance(value, dict) else value, where, "messages")
    for message in heard:
        if message["role"] not in SPEAKERS or not isinstance(message["content"], str):
            raise UserError(
                f"{where} has a message of role {message['role']!r} with {type(message['content']).__name__} content: "
                f"it may speak as {', '.join(SPEAKERS)}, in text"
            )
    return heard


def rollout(
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
    env: dict,
    turns: dict,
    tools: list[dict],
) -> dict[str, Any]:
    """Hold n conversations from each prompt of this rank and keep them as rows; arguments as of `engine.generate`.

    env: the environment by name. turns: TurnOptions. tools: JSON schemas that the prompts were rendered with.
    Returns sample columns [prompts * n], (row, cause) of lost conversations, and the engine's statistics.
    """
    wanted = sampling_of(worker, sampling, version)
    options = TurnOptions(**turns)
    function = resolve(FunctionRef(**env))
    prompts = [part.tolist() for part in ids.split(lengths.tolist())] if len(lengths) else []
    talks = []
    for i, seed in enumerate(seeds.tolist()):
        info, prompt = infos[i // n], prompts[i // n]
        messages = info["messages"] or [{"role": "user", "content": info["prompt"]}]
        said = list(info["messages"]) if info["messages"] else None
        seen = Conversation(
            prompt=info["prompt"],
            messages=_copies(messages),  # the prompt's other conversations have the same ones
            answer=info.get("answer"),
            meta=dict(info.get("meta") or {}),
            seed=seed,
            row=first_row[i // n] + i % n,
        )
        talks.append(
            Talk(seen.row, prompt, info, seed, Partner(function), seen, said, info["prompt"])
        )
    known = Turns(worker.state["tokenizer"], tools=tools, history=options.history)
    Rollout(worker, talks, wanted, options, known).run()
    for talk in talks:
        worker.store.put(talk.row, row_of(talk, wanted.max_new_tokens))
    return columns_of(talks) | {
        "stats": {name: float(value) for name, value in worker.engine.stats().items()}
    }


def row_of(talk: Talk, max_new_tokens: int) -> Row:
    """A conversation that has ended, as a row."""
    ids = torch.tensor([*talk.prompt, *talk.ids], dtype=torch.int32)
    mask = torch.tensor([*[False] * len(talk.prompt), *talk.mask], dtype=torch.bool)
    start = len(talk.info["messages"] or [None])
    open_ended = bool(talk.info["messages"]) and talk.info["messages"][-1]["role"] == "assistant"
    info = talk.info | {
        "prompt_length": len(talk.prompt),
        "truncated": talk.truncated,
        "max_new_tokens": max_new_tokens,
        "turns": talk.seen.messages[start - open_ended :],
    }
    return Row(ids, mask, info, {"logp_sampler": torch.cat(talk.logps)})


def columns_of(talks: Sequence[Talk]) -> dict[str, Any]:
    """What the controller hears of each conversation: numbers."""
    names = sorted({name for talk in talks for name in talk.seen.counts})
    counts = {
        name: torch.tensor([float(talk.seen.counts[name]) for talk in talks], dtype=torch.float64)
        for name in names
    }

    def flags(of: Callable[[Talk], bool]) -> Tensor:
        return torch.tensor([of(talk) for talk in talks], dtype=torch.bool)

    return {
        "length": torch.tensor([len(talk.ids) for talk in talks], dtype=torch.int64),
        "loss_tokens": torch.tensor([sum(talk.mask) for talk in talks], dtype=torch.int64),
        "turns": torch.tensor([talk.seen.turn for talk in talks], dtype=torch.int64),
        "truncated": flags(lambda talk: talk.truncated),
        "out_of_turns": flags(lambda talk: talk.unheard),
        "rewritten": flags(lambda talk: talk.rewritten),
        "env_failed": flags(lambda talk: bool(talk.lost)),
        "env_reward": torch.tensor([talk.reward for talk in talks], dtype=torch.float64),
        "counts": counts,
        "lost": [(talk.row, talk.lost) for talk in talks if talk.lost],
    }


VERBS: dict[str, Callable[..., Any]] = {"engine.rollout": rollout}
