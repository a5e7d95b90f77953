"""What an environment sees of one conversation, and what it may answer."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""{"role": ..., "content": ...}; an environment speaks as `tool`, `user` or `system`."""

Reply = list[Message] | Message | float | None
"""Messages: the conversation goes on. A number: it ends with this reward. None: it ends, and only the rewards judge."""


@dataclass
class Conversation:
    """One conversation as its environment sees it, after each turn of the model's."""

    prompt: str
    """The prompt as rendered for the model."""
    messages: list[Message]
    """All that was said, the prompt's messages included; the last one is the model's. A plain text prompt is a
    user's message."""
    answer: Any = None
    """The dataset's answer column, None if there is none."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The dataset row's other columns."""
    seed: int = 0
    """Its own: an environment that draws from it is the same on any number of ranks."""
    row: int = 0
    """Row id, for messages."""
    turn: int = 0
    """The model's turns so far."""
    turns_left: int = 0
    """Turns that it may still have: at 0 what an environment says is not heard, only its reward counts."""
    tokens_left: int = 0
    """Tokens that are left for messages and turns together."""
    truncated: bool = False
    """Whether the last turn stopped at a token limit: it is the last one."""
    counts: Counter[str] = field(default_factory=Counter)
    """What the environment counts: each name becomes a column of the batch. `tool_calls` and `tool_errors` always."""

    @property
    def said(self) -> str:
        """The model's last turn, special tokens removed."""
        return self.messages[-1]["content"]

    @property
    def over(self) -> bool:
        """Whether nothing can follow: no turns or tokens are left."""
        return self.truncated or not self.turns_left or self.tokens_left < 1
