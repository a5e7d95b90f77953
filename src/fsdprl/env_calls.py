"""Calls of environments beside the engine: many at once, each with a deadline, none of them waited for.

Async functions share one event loop in a thread of its own. Plain ones run in threads, up to a number at a time; one
that is overdue is left behind with its thread, which ends with the process.
"""

import asyncio
import inspect
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fsdprl.conversation import Conversation
from fsdprl.errors import UnscoredError
from fsdprl.reward_forms import is_async


@dataclass(frozen=True)
class Answer:
    """What became of one call."""

    key: int
    value: Any = None
    lost: str = ""
    """Why there is no verdict: overdue, or it raised UnscoredError."""
    trace: str = ""
    """The traceback of any other exception: a mistake in the environment."""


class Partner:
    """One conversation's environment: the function itself, or an object of the class, made with its first call."""

    def __init__(self, env: Callable[..., Any]) -> None:
        self.env, self.is_async = env, is_async(env)
        bare = env
        while hasattr(bare, "func"):
            bare = bare.func  # type: ignore[attr-defined]
        self.fresh = inspect.isclass(bare)

    def __call__(self, conversation: Conversation) -> Any:
        if self.fresh:
            self.env, self.fresh = self.env(), False
        return self.env(conversation)


class EnvCalls:
    """The calls under way of one rollout."""

    def __init__(self, timeout_s: float, concurrency: int) -> None:
        """timeout_s: seconds of one call. concurrency: most plain calls at a time."""
        self.timeout_s, self.concurrency = timeout_s, concurrency
        self._answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._deadlines: dict[int, tuple[float, int, bool]] = {}
        self._pending: deque[tuple[int, int, Partner, Conversation]] = deque()
        self._tickets = 0
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def ask(self, key: int, partner: Partner, conversation: Conversation) -> None:
        """Begin a call; `answers` tells its end."""
        self._tickets += 1
        if not partner.is_async:
            self._pending.append((self._tickets, key, partner, conversation))
            self._start_threads()
            return
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=_serve, args=(self._loop,), daemon=True, name="environments"
            ).start()
        self._deadlines[self._tickets] = (time.monotonic() + self.timeout_s, key, False)
        awaited = self._awaited(self._tickets, key, partner, conversation)
        asyncio.run_coroutine_threadsafe(awaited, self._loop)

    def answers(self, wait_s: float) -> list[Answer]:
        """Calls that have ended or are overdue; waits up to wait_s for the first one."""
        found = []
        try:
            while True:
                ticket, answer = (
                    self._answers.get(timeout=wait_s) if wait_s else self._answers.get_nowait()
                )
                wait_s = 0.0
                if (due := self._deadlines.pop(ticket, None)) is not None:
                    self._threads -= due[2]
                    found.append(answer)
        except queue.Empty:
            pass
        now = time.monotonic()
        for ticket, (deadline, key, threaded) in list(self._deadlines.items()):
            if now >= deadline:
                del self._deadlines[ticket]
                self._threads -= threaded
                found.append(Answer(key, lost=f"no answer within {self.timeout_s:g} s"))
        self._start_threads()
        return found

    def close(self) -> None:
        """Let go of whatever is still under way."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _start_threads(self) -> None:
        while self._pending and self._threads < self.concurrency:
            work = self._pending.popleft()
            self._deadlines[work[0]] = (time.monotonic() + self.timeout_s, work[1], True)
            self._threads += 1
            threading.Thread(
                target=self._called, args=work, daemon=True, name="environment"
            ).start()

    def _called(self, ticket: int, key: int, partner: Partner, conversation: Conversation) -> None:
        try:
            value = partner(conversation)
            if inspect.isawaitable(value):
                value = asyncio.run(_result(value))
            answer = Answer(key, value)
        except BaseException as error:
            answer = _failure(key, error)
        self._answers.put((ticket, answer))

    async def _awaited(
        self, ticket: int, key: int, partner: Partner, conversation: Conversation
    ) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = Answer(key, await partner(conversation))
        except TimeoutError:
            answer = Answer(key, lost=f"no answer within {self.timeout_s:g} s")
        except BaseException as error:
            answer = _failure(key, error)
        self._answers.put((ticket, answer))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then end what is left in it."""
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def _failure(key: int, error: BaseException) -> Answer:
    if isinstance(error, UnscoredError):
        return Answer(key, lost=str(error) or "no verdict")
    return Answer(key, trace="".join(traceback.format_exception(error)))
