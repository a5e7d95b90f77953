"""Rows of supervised fine-tuning as tokens and loss mask, on the rank that trains on them.

Three kinds, told apart by the columns of the first row: `messages`, a conversation of which the
assistant's turns are learnt; `prompt` and `completion` (texts or messages), of which the completion
is; and `text`, which is learnt whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fsdprl.data import rows as files
from fsdprl.data.chat import Conversations, Messages, PromptFormat, checked_messages, load_tokenizer
from fsdprl.errors import UserError

OverLength = Literal["error", "drop", "truncate"]

# The tag by which a template marks what the assistant says.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ExampleFormat:
    """How the rows of a file are read: all that a rank needs to know, of plain types."""

    path: str
    tokenizer_path: str
    max_length: int
    """Most tokens of a row."""
    over_length: OverLength = "error"
    """What becomes of longer rows; truncate keeps their first max_length tokens."""
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


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One row to train on."""

    ids: npt.NDArray[np.int32]
    """Tokens [L]."""
    mask: npt.NDArray[np.bool_]
    """Which tokens are learnt, [L]; the first never is."""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Parts:
    """What a row says, before it has tokens: a conversation, or two texts of which one is learnt."""

    messages: Messages | None = None
    turns: tuple[int, ...] = ()
    """Ordinals of the messages that are learnt."""
    prompt: str = ""
    completion: str = ""


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
        self._files = files.open_rows(form.path, flag=flag)
        self.tokenizer = load_tokenizer(form.tokenizer_path, chat_template=form.chat_template)
        self._conversations = Conversations(
            self.tokenizer, prompt_format=form.prompt_format, system=form.system
        )
        self.kind = self._kind(self._files[0], self._files.where(0))
        self._marked = bool(_GENERATION.search(str(self.tokenizer.chat_template or "")))

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
                if self._form.over_length != "truncate":
                    raise UserError(f"{self.where(places[number])}: {too_long(row.ids, limit)}")
                found[number] = TokenRow(row.ids[:limit], row.mask[:limit], row.meta)
        return found

    def measure(
        self, indices: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(tokens, loss tokens within max_length) of these rows, each int32 [len(indices)]."""
        found = self._tokenise(indices)
        limit = self._form.max_length
        tokens = np.array([len(row.ids) for row in found], dtype=np.int32)
        loss_tokens = np.array([row.mask[:limit].sum() for row in found], dtype=np.int32)
        return tokens, loss_tokens

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

    def _parts(self, index: int) -> _Parts:
        form, row, where = self._form, self._files[index], self._files.where(index)
        if self.kind == "text":
            value = files.field(row, form.text_key, where, "--text-key")
            return _Parts(completion=_string(value, where, form.text_key))
        if self.kind == "completion":
            prompt = files.field(row, form.prompt_key, where, "--prompt-key")
            completion = files.field(row, form.completion_key, where, "--completion-key")
            said = self._conversations.of(prompt, where, form.prompt_key)
            if isinstance(said, str):
                return _Parts(
                    prompt=said, completion=_string(completion, where, form.completion_key)
                )
            if isinstance(completion, str):
                text = _string(completion, where, form.completion_key)
                completion = [{"role": "assistant", "content": text}]
            messages = said + checked_messages(completion, where, form.completion_key)
            return _Parts(messages, self._learnt(messages, len(said), where))
        value = files.field(row, form.messages_key, where, "--messages-key")
        if isinstance(value, str):
            raise UserError(f"{where}: field {form.messages_key!r} is a string, not messages")
        said = self._conversations.of(value, where, form.messages_key)
        assert not isinstance(said, str)
        return _Parts(said, self._learnt(said, 0, where))

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

    def _tokenise(self, indices: Sequence[int]) -> list[TokenRow]:
        parts = [self._parts(index) for index in indices]
        chats = [number for number, part in enumerate(parts) if part.messages]
        found: dict[int, TokenRow] = {}
        if chats and self._marked:
            for number in chats:
                found[number] = self._from_tags(parts[number], self.where(indices[number]))
        elif chats:
            places = [self.where(indices[number]) for number in chats]
            rows = self._from_spans([parts[number] for number in chats], places)
            found = dict(zip(chats, rows, strict=True))
        texts = [number for number in range(len(parts)) if number not in found]
        found |= zip(texts, self._from_texts([parts[number] for number in texts]), strict=True)
        return [found[number] for number in range(len(parts))]

    def _from_texts(self, parts: Sequence[_Parts]) -> list[TokenRow]:
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

    def _from_tags(self, part: _Parts, where: str) -> TokenRow:
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

    def _from_spans(self, parts: Sequence[_Parts], places: Sequence[str]) -> list[TokenRow]:
        """Find the learnt turns in the rendered text, and the tokens that lie inside them."""
        if not self.tokenizer.is_fast:
            raise UserError(
                f"{self._form.tokenizer_path}: a slow tokenizer cannot tell which tokens the "
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

    def _spans(self, part: _Parts, whole: str, where: str) -> list[tuple[int, int]]:
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


def too_long(tokens: Sequence[Any] | np.ndarray, limit: int) -> str:
    """How errors say that a row is too long."""
    return (
        f"{len(tokens)} tokens, more than --max-length {limit}: raise it, or choose "
        f"--over-length drop or truncate"
    )


def _string(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not value:
        kind = "an empty string" if value == "" else f"a {type(value).__name__}"
        raise UserError(f"{where}: field {key!r} is {kind}, but must be text")
    return value
