"""One prompt of a dataset, ready to sample from."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as tokens, as text and as the row that it came from."""

    ids: npt.NDArray[np.int32]
    """Its tokens [L], as the policy sees them."""
    text: str
    """The rendered text that `ids` encode."""
    messages: list[dict[str, Any]] | None = None
    """Its chat messages, the system message included; None for a plain text prompt."""
    answer: Any = None
    """The row's reference answer, None without --answer-key."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The row's columns apart from the prompt, all of plain types."""
    rewards: list[str] | None = None
    """Names of the rewards that count for it; None for all."""
    index: int = 0
    """Ordinal of the row in the dataset, filters not counted."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that its text tells of, the same object for all prompts of a set."""
