"""What stands between two turns of the model: an environment's messages as tokens, written by the chat template.

Nothing that the model has said is ever encoded again: only the text behind it is. The template is asked for that text
with a mark in place of the model's last turn, so that it does not depend on what the template would make of the turn.
Whether it would show earlier turns as they were sampled is asked apart: some templates take the thinking out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdprl.data.chat import Messages
from fsdprl.errors import UserError

History = Literal["refuse", "keep"]
"""Where a template would show earlier turns without their thinking: refuse it, or keep them as they were sampled."""

MARK = "\u2e28fsdprl\u2e29"
THOUGHT, SAID, HEARD = "thoughtprobe", "saidprobe", "heardprobe"


@dataclass(frozen=True)
class Between:
    """What comes after a turn of the model's."""

    ids: list[int]
    """Tokens from behind the model's last one to where it is to go on."""
    text: str
    rewritten: bool
    """Whether the template by itself would have shown what came before otherwise than it was sampled."""


class Turns:
    """How conversations go on with one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[dict[str, Any]] = (),
        history: History = "refuse",
    ) -> None:
        """tools: their JSON schemas, as the prompts were rendered with."""
        self.tokenizer, self.history = tokenizer, history
        self.tools = list(tools) or None
        self.known: set[str] = set()

    def between(self, said: Messages | None, heard: Messages, text: str, end: str) -> Between:
        """Tokens that let the model go on after `heard`.

        said: the messages up to the model's last turn; None for a plain text prompt, which the messages' contents
        continue as they are. text: all that the model was shown and wrote, its end token included. end: that token's
        text, "" if the turn ended without one.

        Raises UserError where the template refuses a role, leaves its messages out or, with history "refuse", takes
        the thinking out of earlier turns.
        """
        if said is None:
            tail = "".join(message["content"] for message in heard)
            return Between(self._encoded(tail), tail, rewritten=False)
        for message in heard:
            self._check(said[0]["content"], message["role"])
        marked = self._rendered([*said[:-1], said[-1] | {"content": MARK}, *heard])
        tail = marked[marked.index(MARK) + len(MARK) :]
        if end and tail.startswith(end):
            tail = tail[len(end) :]
        rewritten = self._rendered([*said, *heard]) != text + tail
        return Between(self._encoded(tail), tail, rewritten)

    def _check(self, question: Any, role: str) -> None:
        """Try the template on a conversation with this role behind a turn with thinking, once a role."""
        if role in self.known:
            return
        thinking = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
        probe = [
            {"role": "user", "content": question if isinstance(question, str) else SAID},
            {"role": "assistant", "content": thinking},
            {"role": role, "content": HEARD},
        ]
        shown = self._rendered(probe)
        if HEARD not in shown or SAID not in shown:
            raise UserError(
                f"the chat template leaves out messages of role {role!r}, or the assistant's before them: give "
                f"one that knows them with --chat-template, or answer as 'user'"
            )
        if THOUGHT not in shown and self.history == "refuse":
            raise UserError(
                f"the chat template takes the thinking out of the model's earlier turns when a {role}'s message "
                f"follows, so that what it makes of them is not what the model has written. --turns.history keep "
                f"goes on from the tokens as sampled, thinking included; --chat-template takes a template that "
                f"leaves earlier turns alone"
            )
        self.known.add(role)

    def _rendered(self, messages: Messages) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, tools=self.tools
            )
        except Exception as error:  # whatever a template raises: Jinja's errors, TypeError, ...
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template refuses a conversation of {roles}: {error}; another one can be given with "
                f"--chat-template"
            ) from error

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
