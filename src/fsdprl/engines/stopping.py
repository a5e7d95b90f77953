"""When an answer ends: end tokens of the checkpoint, and stop strings in the decoded tail."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from fsdprl.checkpoint_files import NO_CODE
from fsdprl.errors import UserError

if TYPE_CHECKING:
    from fsdprl.engines.batching import Rows

CONTEXT_TOKENS = 8
"""Tokens decoded before a stop string could begin: a character may take several."""


def load_tokenizer(path: str) -> Any | None:
    """The checkpoint's tokenizer, or None where it has none."""
    try:
        return AutoTokenizer.from_pretrained(path, **NO_CODE)
    except (OSError, ValueError):
        return None


def end_tokens(path: str, config: Any, tokenizer: Any | None) -> list[int]:
    """Ids that end an answer: generation_config.json's (else config.json's), and the tokenizer's."""
    if os.path.exists(os.path.join(path, "generation_config.json")):
        listed = GenerationConfig.from_pretrained(path).eos_token_id
    else:
        listed = config.get_text_config().eos_token_id
    ids = set(listed) if isinstance(listed, list | tuple) else {listed}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(i for i in ids if i is not None)


class StopRule:
    """Which rows have just drawn their last token."""

    def __init__(
        self,
        ids: Sequence[int],
        strings: Sequence[str],
        tokenizer: Any | None,
        device: torch.device,
    ) -> None:
        """Raises UserError for stop strings without a tokenizer to find them with."""
        if strings and tokenizer is None:
            raise UserError("--stop needs text, but the checkpoint folder has no tokenizer")
        self.ids = torch.tensor(list(ids), dtype=torch.int64, device=device)
        self.strings, self.tokenizer = tuple(strings), tokenizer
        # A string of n UTF-8 bytes spans at most n tokens.
        longest = max((len(s.encode()) for s in strings), default=0)
        self.tail = longest + CONTEXT_TOKENS

    def ended(self, rows: "Rows", tokens: Tensor, width: int) -> Tensor:
        """bool [B]: the row's last token is an end token or completes a stop string.

        tokens: int32 [lanes * width], the answers so far, a request's from its lane * width on.
        """
        ended = (rows.token[:, None] == self.ids).any(dim=1)
        if not self.strings:
            return ended
        found = ended.tolist()
        for row, (lane, drawn) in enumerate(
            zip(rows.lane.tolist(), rows.drawn.tolist(), strict=True)
        ):
            start = lane * width + max(0, drawn - self.tail)
            if not found[row]:
                found[row] = self._holds(tokens[start : lane * width + drawn].tolist())
        return torch.tensor(found, dtype=torch.bool, device=rows.token.device)

    def _holds(self, ids: list[int]) -> bool:
        assert self.tokenizer is not None
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return any(string in text for string in self.strings)
