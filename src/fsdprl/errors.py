"""The errors users meet. Everything else that escapes is a bug and comes with its traceback."""


class UserError(ValueError):
    """A mistake the user can mend. The text names the flag, file:line or row, and the remedy.

    `launch` prints only the message, once, and exits with code 2.
    """


class UnscoredError(Exception):
    """What a reward raises when it has no verdict on a sample (a judge that does not answer, say): the sample is
    counted as failed and taken out of the step, never scored 0."""


class RemoteError(RuntimeError):
    """A rank failed. What `Handle.wait` raises, and what the job ends with if nobody catches it.

    Attributes: `rank`; `host`; `phase` (what the rank was told to do); `kind`: "raised" (the verb
    raised), "died" (its process is gone), "stalled" (no progress within the phase's deadline) or
    "frozen" (silent and stopped); `text`: the worker's traceback, its stacks, or empty;
    `stacks`: of a stall, those of every rank, by its name.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        host: str,
        phase: str,
        kind: str,
        text: str = "",
        stacks: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{text.rstrip()}\n\n{message}" if text else message)
        self.message = message
        self.rank = rank
        self.host = host
        self.phase = phase
        self.kind = kind
        self.text = text
        self.stacks = stacks or {}


class NonFiniteError(RuntimeError):
    """A loss or gradient holds infinities or NaN. Raised before any weight has changed."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM reached rank 0. Raised in `main`; the job ends cleanly with 130 or 143.

    A KeyboardInterrupt, so that `except Exception` in a recipe does not swallow it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum
