"""Tokenizers, chat templates and conversations."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from fsdprl.checkpoint_files import FROM_HUB, NO_CODE
from fsdprl.errors import UserError

PromptFormat = Literal["auto", "chat", "raw"]
Messages = list[dict[str, Any]]


def load_tokenizer(path: str, *, chat_template: str | None = None, flag: str = "--model") -> Any:
    """The tokenizer of a Hugging Face checkpoint, with another chat template if one is given.

    chat_template: a Jinja file, or the template itself (it holds `{{` or `{%`).
    Raises UserError naming `flag` or --chat-template.
    """
    from transformers import AutoTokenizer  # seconds to import

    no_hub_name = ("/" in path and path.startswith((".", "/", "~"))) or path.count("/") > 1
    if no_hub_name and not Path(path).expanduser().is_dir():
        raise UserError(f"{flag} {path}: no such folder")
    folder = Path(path).expanduser() if "~" in path else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **NO_CODE)
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        if not Path(folder).is_dir():
            reason = f"there is no such folder here, and as the name of a hub: {reason}; {FROM_HUB}"
        raise UserError(f"{flag} {path}: no tokenizer can be loaded: {reason}") from error
    if chat_template:
        tokenizer.chat_template = template_text(chat_template)
    return tokenizer


def template_text(value: str) -> str:
    """A chat template given as Jinja text or as the file that holds it. Raises UserError."""
    if "{{" in value or "{%" in value:
        return value
    if not Path(value).expanduser().is_file():
        raise UserError(f"--chat-template {value}: no such file")
    return Path(value).expanduser().read_text(encoding="utf-8")


def text_or_file(value: str, flag: str) -> str:
    """A text given on the command line, or the content of the file that it names."""
    if "\n" not in value and len(value) < 1024 and Path(value).expanduser().is_file():
        try:
            return Path(value).expanduser().read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise UserError(f"{flag} {value}: not a UTF-8 text file") from None
    if Path(value).suffix.lower() in (".txt", ".md", ".jinja") and " " not in value:
        raise UserError(f"{flag} {value}: no such file")
    return value


class Conversations:
    """How one recipe turns rows into conversations and renders them with its tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt_format: PromptFormat = "auto",
        system: str = "",
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """prompt_format says what a string prompt is: `chat`, a user's message; `raw`, the text
        itself; `auto`, a message if the tokenizer has a chat template, else text. system: text of
        a system message before every conversation that brings none of its own. tools: JSON schemas that
        the template tells the model of.

        Raises UserError if messages are asked for and there is no chat template.
        """
        self.tokenizer = tokenizer
        self.system, self.tools = system, list(tools) or None
        has_template = bool(tokenizer.chat_template)
        self.chat = has_template if prompt_format == "auto" else prompt_format == "chat"
        if self.chat and not has_template:
            raise UserError(f"--prompt-format chat: {self.no_template()}")
        if system and not self.chat:
            raise UserError(f"--system needs chat messages, but {self._why_text()}")

    def tells_of_tools(self) -> bool:
        """Whether what the model reads is another with the tools than without."""
        asked = [{"role": "user", "content": "?"}]
        texts = [
            self.tokenizer.apply_chat_template(asked, tokenize=False, tools=tools)
            for tools in ((self.tools, None) if self.chat else ())
        ]
        return len(set(texts)) > 1

    def of(self, value: Any, where: str, key: str) -> str | Messages:
        """A row's prompt as messages, or as a text if prompts are raw. Raises UserError."""
        if isinstance(value, str):
            if not value.strip():
                raise UserError(f"{where}: field {key!r} is an empty string")
            if not self.chat:
                return value
            messages = [{"role": "user", "content": value}]
        else:
            messages = checked_messages(value, where, key)
            if not self.chat:
                raise UserError(f"{where}: field {key!r} holds messages, but {self._why_text()}")
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return messages

    def render(
        self,
        conversations: Sequence[Messages],
        where: Callable[[int], str],
        *,
        reply: bool = True,
    ) -> list[str]:
        """Texts of conversations. reply: end them where the assistant is to answer; one that
        already ends with an assistant's message is left open, to be continued.

        Raises UserError with the row's place if the template refuses a conversation.
        """
        texts = []
        for index, messages in enumerate(conversations):
            resumed = reply and messages[-1]["role"] == "assistant"
            try:
                texts.append(
                    self.tokenizer.apply_chat_template(
                        messages,
                        tokenize=False,
                        add_generation_prompt=reply and not resumed,
                        continue_final_message=resumed,
                        tools=self.tools,
                    )
                )
            except Exception as error:  # whatever a template raises: Jinja's errors, TypeError, ...
                raise UserError(
                    f"{where(index)}: the chat template refuses these messages: {error}; "
                    f"another one can be given with --chat-template"
                ) from error
        return texts

    def encode(self, texts: Sequence[str], *, rendered: bool) -> list[list[int]]:
        """Token ids. A rendered template brings its own special tokens; a raw text gets those that
        the tokenizer puts before a text, and never an end token."""
        if not texts:
            return []
        batch = self.tokenizer(list(texts), add_special_tokens=not rendered)["input_ids"]
        end = self.tokenizer.eos_token_id
        if not rendered and end is not None and self.tokenizer("a")["input_ids"][-1:] == [end]:
            batch = [ids[:-1] for ids in batch]
        return batch

    def no_template(self) -> str:
        return (
            f"the tokenizer of {self.tokenizer.name_or_path or 'this model'} has no chat template; "
            f"give one with --chat-template FILE"
        )

    def _why_text(self) -> str:
        return "--prompt-format is raw" if self.tokenizer.chat_template else self.no_template()


def checked_messages(value: Any, where: str, key: str) -> Messages:
    """A list of chat messages with the fields that have a value. Raises UserError."""
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: field {key!r} is {shown(value)}, but must be a string or a non-empty list "
            f'of messages such as {{"role": "user", "content": "..."}}'
        )
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where}: {key}[{number}] is {shown(message)}, but must be a message with a role"
            )
        # Tables fill the fields that only other messages have with nulls.
        message = {name: part for name, part in message.items() if part is not None}
        content = message.get("content", "" if "tool_calls" in message else None)
        if not isinstance(content, str | list):
            raise UserError(
                f"{where}: {key}[{number}].content is {shown(content)}, but must be a string"
            )
        messages.append(message | {"content": content})
    return messages


def shown(value: Any) -> str:
    """A value and its type, short, for messages."""
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return "null" if value is None else f"{text} ({type(value).__name__})"
