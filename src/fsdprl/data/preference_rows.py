"""Preference data as tokens: pairs of a chosen and a rejected completion, or single completions with a label.

A prompt is a text, a list of messages, or ShareGPT's `conversations` (`from`, `value`); a completion is a text, a
message, a list of messages, or a whole conversation that begins with the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdprl.data import rows as files
from fsdprl.data.chat import Conversations, Messages, PromptFormat, checked_messages, load_tokenizer
from fsdprl.data.example_rows import OverLength
from fsdprl.data.handlers import SHAREGPT_ROLES
from fsdprl.data.mixture import read_as
from fsdprl.data.row_tokens import Parts, RowTokens, TokenRow, cut, too_long
from fsdprl.errors import UserError

DEFAULT_KEYS = ("prompt", "chosen", "rejected", "completion", "label")
CONVERSATION_KEYS = ("conversations", "messages")
"""Where the prompt is looked for if there is no field of --prompt-key."""


@dataclass(frozen=True)
class PreferenceFormat:
    """How the rows of a file are read: all that a rank needs to know, of plain types."""

    path: str
    tokenizer_path: str
    max_length: int
    """Most tokens of prompt and completion."""
    over_length: OverLength = "error"
    """What becomes of longer ones, and of the other completion of their pair; truncate keeps the beginning."""
    prompt_format: PromptFormat = "auto"
    chat_template: str = ""
    system: str = ""
    prompt_key: str = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    completion_key: str = "completion"
    """Of rows with one completion each."""
    label_key: str = "label"
    """Whether that completion is desirable: true or false, 1 or 0."""
    margin_key: str = ""
    """By how much the chosen completion is better, a number; empty if the file does not say."""
    fingerprint: str = ""
    """Of the file as the controller read it; empty is not compared."""


class PreferenceRows:
    """The completions of one file, tokenised when they are asked for. Every rank makes its own.

    Of a file of pairs, completion 2 i is the chosen and 2 i + 1 the rejected one of row i; of a file with one
    completion a row, completion i is row i's. A row of tokens ends with the completion's last token.
    """

    def __init__(self, form: PreferenceFormat, *, flag: str = "--data") -> None:
        """Raises UserError if the file is not the one that the controller read, or holds neither kind."""
        if form.fingerprint and files.fingerprint(form.path) != form.fingerprint:
            raise UserError(
                f"{flag} {form.path}: this rank reads another file than rank 0: copy the same one "
                f"to every machine, or put it where all of them see it"
            )
        self._form = form
        rows = files.open_rows(form.path, flag=flag)
        keys = (
            form.prompt_key,
            form.chosen_key,
            form.rejected_key,
            form.completion_key,
            form.label_key,
        )
        self._files = read_as(rows, "preference") if keys == DEFAULT_KEYS else rows
        self.tokenizer = load_tokenizer(form.tokenizer_path, chat_template=form.chat_template)
        self._conversations = Conversations(
            self.tokenizer, prompt_format=form.prompt_format, system=form.system
        )
        self._tokens = RowTokens(self._conversations, form.tokenizer_path)
        self.paired = self._is_paired(self._files[0], self._files.where(0))

    def __len__(self) -> int:
        return len(self._files) * (2 if self.paired else 1)

    def where(self, index: int) -> str:
        """The place of a completion's row, for messages."""
        return self._files.where(index // 2 if self.paired else index)

    def check(self, index: int) -> None:
        """Raise UserError with file:line, field and value unless the completion can be used."""
        self._parts(index, index)
        self.better(index)
        self.margin(index)

    def better(self, index: int) -> bool:
        """Whether a completion is the chosen one of its pair, or labelled desirable."""
        if self.paired:
            return index % 2 == 0
        row, where = self._row(index)
        label = files.field(row, self._form.label_key, where, "--label-key")
        if label not in (True, False, 0, 1):
            raise UserError(
                f"{where}: field {self._form.label_key!r} is {label!r}, not true or false"
            )
        return bool(label)

    def margin(self, index: int) -> float:
        """By how much the chosen completion of this pair is better; 0 without a margin_key."""
        if not self._form.margin_key:
            return 0.0
        row, where = self._row(index)
        margin = files.field(row, self._form.margin_key, where, "--margin-key")
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            raise UserError(
                f"{where}: field {self._form.margin_key!r} is {margin!r}, but must be a number"
            )
        return float(margin)

    def rows(self, indices: Sequence[int], answers: Sequence[int] | None = None) -> list[TokenRow]:
        """The tokens of these completions behind their prompts, in this order.

        answers: completions to put behind the prompts of `indices` instead of their own; such a row
        is cut at max_length whatever the policy. Raises UserError for a row that is too long otherwise.
        """
        found = self._tokenise(indices, indices if answers is None else answers)
        limit, places = self._form.max_length, list(indices)
        for number, row in enumerate(found):
            if len(row.ids) > limit:
                policy = self._form.over_length
                if not policy.startswith("truncate") and answers is None:
                    raise UserError(f"{self.where(places[number])}: {too_long(row.ids, limit)}")
                found[number] = cut(row, limit, policy)
        return found

    def measure(
        self, indices: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(tokens, loss tokens within max_length) of these completions, each int32 [len(indices)]."""
        found, limit = self._tokenise(indices, indices), self._form.max_length
        tokens = np.array([len(row.ids) for row in found], dtype=np.int32)
        within = [cut(row, limit, self._form.over_length).mask.sum() for row in found]
        loss_tokens = np.array(within, dtype=np.int32)
        return tokens, loss_tokens

    def _tokenise(self, indices: Sequence[int], answers: Sequence[int]) -> list[TokenRow]:
        parts = [self._parts(*pair) for pair in zip(indices, answers, strict=True)]
        made = self._tokens.of(parts, [self.where(index) for index in indices])
        # What a template writes behind the last turn's end was never sampled: it is cut off, so
        # that a reward model scores the token at which an answer ends.
        ends = [int(np.flatnonzero(row.mask)[-1]) + 1 if row.mask.any() else 1 for row in made]
        return [
            TokenRow(row.ids[:end], row.mask[:end], row.meta)
            for row, end in zip(made, ends, strict=True)
        ]

    # ---- what a row says -------------------------------------------------------------------

    def _is_paired(self, row: dict[str, Any], where: str) -> bool:
        form = self._form
        if form.chosen_key in row and form.rejected_key in row:
            return True
        if form.label_key in row:
            return False
        raise UserError(
            f"{where}: needs fields {form.chosen_key!r} and {form.rejected_key!r}, or a completion and "
            f"{form.label_key!r}; the row has {', '.join(row)}"
        )

    def _row(self, index: int) -> tuple[dict[str, Any], str]:
        number = index // 2 if self.paired else index
        return self._files[number], self._files.where(number)

    def _parts(self, index: int, answer: int) -> Parts:
        prompt, _ = self._said(index)
        _, completion = self._said(answer)
        if isinstance(prompt, str):
            return Parts(prompt=prompt, completion=_text_of(completion, self.where(answer)))
        messages = prompt + completion
        turns = [n for n in range(len(prompt), len(messages)) if messages[n]["role"] == "assistant"]
        if not turns:
            raise UserError(f"{self.where(answer)}: no assistant message in the completion")
        return Parts(messages, tuple(turns))

    def _said(self, index: int) -> tuple[str | Messages, Messages]:
        """Prompt and completion of one completion's row."""
        form, (row, where) = self._form, self._row(index)
        if not self.paired:
            return self._said_singly(row, where)
        keys = (form.chosen_key, form.rejected_key)
        flags = ("--chosen-key", "--rejected-key")
        both = [
            turns_of(files.field(row, key, where, flag), where, key)
            for key, flag in zip(keys, flags, strict=True)
        ]
        whole = [said[0]["role"] != "assistant" for said in both]
        if all(whole):
            prompt, both = split_conversations(both, where, keys)
        elif any(whole):
            raise UserError(
                f"{where}: one of {keys[0]!r} and {keys[1]!r} holds its prompt, one not"
            )
        else:
            key = self._prompt_field(row)
            prompt = self._prompt_value(row, key, where)
        return self._conversations.of(prompt, where, form.prompt_key), both[index % 2]

    def _said_singly(self, row: dict[str, Any], where: str) -> tuple[str | Messages, Messages]:
        form, key = self._form, self._prompt_field(row)
        prompt = self._prompt_value(row, key, where)
        if form.completion_key in row:
            value = files.field(row, form.completion_key, where, "--completion-key")
            said = turns_of(value, where, form.completion_key)
        elif isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
            prompt, said = prompt[:-1], prompt[-1:]
        else:
            raise UserError(
                f"{where}: no field {form.completion_key!r}, and {key!r} does not end with an "
                f"assistant's message; name the completion with --completion-key"
            )
        return self._conversations.of(prompt, where, key), said

    def _prompt_field(self, row: dict[str, Any]) -> str:
        known = (self._form.prompt_key, *CONVERSATION_KEYS)
        return next((key for key in known if key in row), known[0])

    def _prompt_value(self, row: dict[str, Any], key: str, where: str) -> str | Messages:
        value = files.field(row, key, where, "--prompt-key")
        if isinstance(value, str):
            return value
        messages = turns_of(value, where, key)
        system = row.get("system")  # where ShareGPT files keep it
        if isinstance(system, str) and system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return messages


def turns_of(value: Any, where: str, key: str) -> Messages:
    """A text, a message or a list of them, with ShareGPT's names or the usual ones, as messages.

    A text is the assistant's. Raises UserError for anything else.
    """
    if isinstance(value, str):
        if not value:
            raise UserError(f"{where}: field {key!r} is an empty string")
        return [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if isinstance(turns, list):
        turns = [_renamed(turn, where, key) for turn in turns]
    return checked_messages(turns, where, key)


def _renamed(turn: Any, where: str, key: str) -> Any:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        return turn
    if turn["from"] not in SHAREGPT_ROLES and turn["from"] not in SHAREGPT_ROLES.values():
        raise UserError(
            f"{where}: field {key!r} has a message from {turn['from']!r}; known are "
            f"{', '.join(SHAREGPT_ROLES)}"
        )
    return {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}


def split_conversations(
    both: Sequence[Messages], where: str, keys: tuple[str, str]
) -> tuple[Messages, list[Messages]]:
    """(prompt, completions) of two whole conversations: what they share, and where the answers begin.

    Raises UserError where they part at another's message than the assistant's.
    """
    shortest = min(map(len, both)) - 1
    shared = 0
    while shared < shortest and both[0][shared] == both[1][shared]:
        shared += 1
    if not shared or any(said[shared]["role"] != "assistant" for said in both):
        raise UserError(
            f"{where}: the conversations of {keys[0]!r} and {keys[1]!r} must share a prompt and part "
            f"at an assistant's message"
        )
    return both[0][:shared], [said[shared:] for said in both]


def _text_of(completion: Messages, where: str) -> str:
    """A raw prompt's completion."""
    content = completion[0]["content"]
    if len(completion) > 1 or not isinstance(content, str) or not content:
        raise UserError(f"{where}: a raw text prompt needs a text as its completion")
    return content
