"""What a reward function sees of one answer."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One sampled answer, where its text lives (a reward process)."""

    prompt: str
    """The prompt as rendered for the model."""
    response: str
    """The answer's text, special tokens removed; of a conversation, the model's last turn."""
    answer: Any = None
    """The dataset's answer column (--answer-key), None if there is none."""
    length: int = 0
    """Tokens behind the prompt as the engine counted them: end tokens and, of a conversation, all turns included."""
    truncated: bool = False
    """Whether the engine stopped at the token limit."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The dataset row's other columns."""
    messages: list[dict[str, Any]] | None = None
    """The prompt's chat messages, if it had any."""
    row: int = 0
    """Row id, for error messages."""
    ids: list[int] = field(default_factory=list)
    """The response's tokens as the engine sampled them."""
    max_new_tokens: int = 0
    """Most tokens that this answer could have had."""
    group: int = -1
    """Ordinal of its prompt in the batch, for rewards over a whole group; else -1."""
    step: int = 0
    """The training step."""
    turns: list[dict[str, Any]] | None = None
    """What was said after the prompt, tools and users included, of a conversation with an environment."""
