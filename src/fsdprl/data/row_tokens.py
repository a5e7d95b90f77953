"""Conversations and texts as tokens, and which of them are learnt. Runs on the rank that trains on the row."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdprl.data.chat import Conversations, Messages
from fsdprl.errors import UserError

# The tag by which a template marks what the assistant says.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One row to train on."""

    ids: npt.NDArray[np.int32]
    """Tokens [L]."""
    mask: npt.NDArray[np.bool_]
    """Which tokens are learnt, [L]; the first never is."""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """What a row says, before it has tokens: a conversation, or two texts of which one is learnt."""

    messages: Messages | None = None
    turns: tuple[int, ...] = ()
    """Ordinals of the messages that are learnt."""
    prompt: str = ""
    completion: str = ""


class RowTokens:
    """How what rows say becomes tokens, with one tokenizer."""

    def __init__(self, conversations: Conversations, tokenizer_path: str) -> None:
        self.tokenizer = conversations.tokenizer
        self._conversations = conversations
        self._path = tokenizer_path
        self._marked = bool(_GENERATION.search(str(self.tokenizer.chat_template or "")))

    def of(self, parts: Sequence[Parts], places: Sequence[str]) -> list[TokenRow]:
        """The tokens of these rows, in this order. places: where each stands, for messages.

        Raises UserError where the learnt turns cannot be found in what the template renders.
        """
        chats = [number for number, part in enumerate(parts) if part.messages]
        found: dict[int, TokenRow] = {}
        if chats and self._marked:
            for number in chats:
                found[number] = self._from_tags(parts[number], places[number])
        elif chats:
            rows = self._from_spans(
                [parts[number] for number in chats], [places[number] for number in chats]
            )
            found = dict(zip(chats, rows, strict=True))
        texts = [number for number in range(len(parts)) if number not in found]
        found |= zip(texts, self._from_texts([parts[number] for number in texts]), strict=True)
        return [found[number] for number in range(len(parts))]

    def _from_texts(self, parts: Sequence[Parts]) -> list[TokenRow]:
        """Prompt and completion encoded apart, as in sampling, and the end token behind them."""
        prompts = self._conversations.encode(
            [part.prompt or part.completion for part in parts], rendered=False
        )
        completions = self._conversations.encode([part.completion for part in parts], rendered=True)
        end = self.tokenizer.eos_token_id
        ending = [] if end is None else [end]
        rows = []
        for part, prompt, completion in zip(parts, prompts, completions, strict=True):
            ids = [*prompt, *completion, *ending] if part.prompt else [*prompt, *ending]
            mask = np.ones(len(ids), dtype=bool)
            mask[: len(prompt) if part.prompt else 1] = False
            rows.append(TokenRow(np.array(ids, dtype=np.int32), mask))
        return rows

    def _from_tags(self, part: Parts, where: str) -> TokenRow:
        """The template says what the assistant says; keep the turns that are learnt."""
        assert part.messages is not None
        encoded = self.tokenizer.apply_chat_template(
            part.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        mask = np.array(encoded["assistant_masks"], dtype=bool)
        starts = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)
        spoken = [n for n, message in enumerate(part.messages) if message["role"] == "assistant"]
        if len(starts) != len(spoken):
            raise UserError(
                f"{where}: the chat template marks {len(starts)} stretches with {{% generation %}} "
                f"for {len(spoken)} assistant messages"
            )
        mask[: starts[len(spoken) - len(part.turns)]] = False
        mask[:1] = False
        return TokenRow(ids, mask)

    def _from_spans(self, parts: Sequence[Parts], places: Sequence[str]) -> list[TokenRow]:
        """Find the learnt turns in the rendered text, and the tokens that lie inside them."""
        if not self.tokenizer.is_fast:
            raise UserError(
                f"{self._path}: a slow tokenizer cannot tell which tokens the "
                f"assistant's are; give a template with {{% generation %}} by --chat-template"
            )
        whole = self._conversations.render(
            [part.messages or [] for part in parts], lambda i: places[i], reply=False
        )
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        rows = []
        for number, part in enumerate(parts):
            ids = np.array(encoded["input_ids"][number], dtype=np.int32)
            offsets = np.array(encoded["offset_mapping"][number]).reshape(-1, 2)
            mask = np.zeros(len(ids), dtype=bool)
            for start, end in self._spans(part, whole[number], places[number]):
                # A token that reaches over the start would not be sampled like that: not learnt.
                mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end)
            mask[:1] = False
            rows.append(TokenRow(ids, mask))
        return rows

    def _spans(self, part: Parts, whole: str, where: str) -> list[tuple[int, int]]:
        """Where each learnt turn stands in the text: from the generation prompt to its end token.

        The text before the turn and the text up to its end must be beginnings of the whole, or
        training would see another text than sampling does.
        """
        messages, spans = part.messages or [], []

        def render(conversation: Messages, reply: bool) -> str:
            return self._conversations.render([conversation], lambda _: where, reply=reply)[0]

        for turn in part.turns:
            before = render(messages[:turn], True)
            last = turn + 1 == len(messages)
            after = whole if last else render(messages[: turn + 1], False)
            if not after.startswith(before) or not whole.startswith(after):
                raise UserError(
                    f"{where}: the chat template writes message {turn} differently when it stands "
                    f"alone and inside the conversation (some drop earlier thinking): learn the "
                    f"last answer only with --assistant-turns last, or mark what the assistant "
                    f"says with {{% generation %}} in a --chat-template"
                )
            spans.append((len(before), len(before) + len(self._ended(after[len(before) :]))))
        return spans

    def _ended(self, turn: str) -> str:
        """A turn's text without the white space that templates put behind its end token."""
        bare = turn.rstrip()
        return bare if bare.endswith(tuple(self.tokenizer.all_special_tokens)) else turn


def cut(row: TokenRow, limit: int, policy: str) -> TokenRow:
    """The row's first `limit` tokens; its last ones if the policy is `truncate_left`."""
    if policy != "truncate_left" or len(row.ids) <= limit:
        return TokenRow(row.ids[:limit], row.mask[:limit], row.meta)
    mask = row.mask[-limit:].copy()
    mask[:1] = False  # it has lost what it is to be predicted from
    return TokenRow(row.ids[-limit:], mask, row.meta)


def too_long(tokens: Sequence[Any] | np.ndarray, limit: int) -> str:
    """How errors say that a row is too long."""
    return (
        f"{len(tokens)} tokens, more than --max-length {limit}: raise it, or choose "
        f"--over-length drop, truncate or truncate_left"
    )
