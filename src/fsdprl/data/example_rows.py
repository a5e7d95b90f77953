"""Rows of supervised fine-tuning as tokens and loss mask, on the rank that trains on them.

Three kinds, told apart by the columns of the first row: `messages`, a conversation of which the
assistant's turns are learnt; `prompt` and `completion` (texts or messages), of which the completion
is; and `text`, which is learnt whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fsdprl.data import rows as files
from fsdprl.data.chat import Conversations, Messages, PromptFormat, checked_messages, load_tokenizer
from fsdprl.data.mixture import read_as
from fsdprl.data.row_tokens import Parts, RowTokens, TokenRow, cut, too_long
from fsdprl.errors import UserError

OverLength = Literal["error", "drop", "truncate", "truncate_left"]
DEFAULT_KEYS = ("messages", "prompt", "completion", "text")
"""With these, rows in the forms of other tools are read as they are (handlers.py)."""


@dataclass(frozen=True)
class ExampleFormat:
    """How the rows of a file are read: all that a rank needs to know, of plain types."""

    path: str
    tokenizer_path: str
    max_length: int
    """Most tokens of a row."""
    over_length: OverLength = "error"
    """What becomes of longer rows; truncate keeps their first max_length tokens, truncate_left the last ones."""
    assistant_turns: Literal["all", "last"] = "all"
    """Which assistant messages of a conversation are learnt."""
    prompt_format: PromptFormat = "auto"
    """Whether string prompts and completions are chat messages (chat) or texts (raw)."""
    chat_template: str = ""
    system: str = ""
    """Text of a system message for conversations without one."""
    messages_key: str = "messages"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    text_key: str = "text"
    fingerprint: str = ""
    """Of the file as the controller read it; empty is not compared."""


class ExampleRows:
    """The rows of one file, tokenised when they are asked for. Every rank makes its own.

    Raises UserError if the file is not the one that the controller read.
    """

    def __init__(self, form: ExampleFormat, *, flag: str = "--data") -> None:
        if form.fingerprint and files.fingerprint(form.path) != form.fingerprint:
            raise UserError(
                f"{flag} {form.path}: this rank reads another file than rank 0: copy the same one "
                f"to every machine, or put it where all of them see it"
            )
        self._form = form
        rows = files.open_rows(form.path, flag=flag)
        keys = (form.messages_key, form.prompt_key, form.completion_key, form.text_key)
        self._files = read_as(rows, "example") if keys == DEFAULT_KEYS else rows
        self.tokenizer = load_tokenizer(form.tokenizer_path, chat_template=form.chat_template)
        self._conversations = Conversations(
            self.tokenizer, prompt_format=form.prompt_format, system=form.system
        )
        self.kind = self._kind(self._files[0], self._files.where(0))
        self._tokens = RowTokens(self._conversations, form.tokenizer_path)

    def __len__(self) -> int:
        return len(self._files)

    def where(self, index: int) -> str:
        """The row's place, for messages."""
        return self._files.where(index)

    def check(self, index: int) -> None:
        """Raise UserError with file:line, field and value unless the row can be used."""
        self._parts(index)

    def rows(self, indices: Sequence[int]) -> list[TokenRow]:
        """The tokens of these rows, in this order; too long ones truncated if that is the policy.

        Raises UserError for a row that is broken, or longer than max_length unless truncated.
        """
        found = self._tokenise(indices)
        limit, places = self._form.max_length, list(indices)
        for number, row in enumerate(found):
            if len(row.ids) > limit:
                if not self._form.over_length.startswith("truncate"):
                    raise UserError(f"{self.where(places[number])}: {too_long(row.ids, limit)}")
                found[number] = cut(row, limit, self._form.over_length)
        return found

    def measure(
        self, indices: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(tokens, loss tokens within max_length) of these rows, each int32 [len(indices)]."""
        found = self._tokenise(indices)
        limit = self._form.max_length
        tokens = np.array([len(row.ids) for row in found], dtype=np.int32)
        within = [cut(row, limit, self._form.over_length).mask.sum() for row in found]
        loss_tokens = np.array(within, dtype=np.int32)
        return tokens, loss_tokens

    def _tokenise(self, indices: Sequence[int]) -> list[TokenRow]:
        places = [self.where(index) for index in indices]
        return self._tokens.of([self._parts(index) for index in indices], places)

    def _kind(self, row: dict[str, Any], where: str) -> str:
        form = self._form
        if form.messages_key in row:
            return "messages"
        if form.prompt_key in row and form.completion_key in row:
            return "completion"
        if form.text_key in row:
            return "text"
        raise UserError(
            f"{where}: needs a field {form.messages_key!r}, or {form.prompt_key!r} and "
            f"{form.completion_key!r}, or {form.text_key!r}; the row has {', '.join(row)}"
        )

    def _parts(self, index: int) -> Parts:
        form, row, where = self._form, self._files[index], self._files.where(index)
        if self.kind == "text":
            value = files.field(row, form.text_key, where, "--text-key")
            return Parts(completion=_string(value, where, form.text_key))
        if self.kind == "completion":
            prompt = files.field(row, form.prompt_key, where, "--prompt-key")
            completion = files.field(row, form.completion_key, where, "--completion-key")
            said = self._conversations.of(prompt, where, form.prompt_key)
            if isinstance(said, str):
                return Parts(
                    prompt=said, completion=_string(completion, where, form.completion_key)
                )
            if isinstance(completion, str):
                text = _string(completion, where, form.completion_key)
                completion = [{"role": "assistant", "content": text}]
            messages = said + checked_messages(completion, where, form.completion_key)
            return Parts(messages, self._learnt(messages, len(said), where))
        value = files.field(row, form.messages_key, where, "--messages-key")
        if isinstance(value, str):
            raise UserError(f"{where}: field {form.messages_key!r} is a string, not messages")
        said = self._conversations.of(value, where, form.messages_key)
        assert not isinstance(said, str)
        return Parts(said, self._learnt(said, 0, where))

    def _learnt(self, messages: Messages, start: int, where: str) -> tuple[int, ...]:
        turns = [
            number
            for number, message in enumerate(messages)
            if number >= start and message["role"] == "assistant"
        ]
        if not turns:
            raise UserError(f"{where}: no assistant message to learn from")
        if turns[0] == 0:
            raise UserError(f"{where}: the conversation starts with the assistant's message")
        return tuple(turns[-1:] if self._form.assistant_turns == "last" else turns)


def _string(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not value:
        kind = "an empty string" if value == "" else f"a {type(value).__name__}"
        raise UserError(f"{where}: field {key!r} is {kind}, but must be text")
    return value
