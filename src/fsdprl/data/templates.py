"""Prompt templates by name, and what each makes of a conversation."""

from pathlib import Path
from typing import Any

from fsdprl.errors import UserError

R1 = "Please reason step by step, and put your final answer within \\boxed{}."
"""What the R1 models' card asks to stand in the user's turn, not in a system message."""
NAMES = ("native", "empty", "r1")


def check(template: str) -> None:
    """Raise UserError unless it is the name of a template or a Jinja file."""
    if template not in NAMES and not Path(template).expanduser().is_file():
        raise UserError(
            f"--template {template}: neither one of {', '.join(NAMES)} nor a Jinja file"
        )


def asked(prompt: Any, template: str) -> Any:
    """A prompt (a text or messages) under a template.

    native: as it is, for the tokenizer's own chat template. empty: the text alone, the messages' texts line by line.
    r1: the R1 instruction behind the last user's message. A Jinja file changes nothing here: it is what renders.
    """
    if template == "empty" and isinstance(prompt, list):
        return "\n".join(str(message["content"]) for message in prompt)
    if template != "r1":
        return prompt
    if isinstance(prompt, str):
        return f"{prompt}\n{R1}"
    last = max(n for n, message in enumerate(prompt) if message["role"] == "user")
    made = [dict(message) for message in prompt]
    made[last]["content"] = f"{made[last]['content']}\n{R1}"
    return made
