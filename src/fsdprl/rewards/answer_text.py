"""Where a response states its final answer, and where a gold answer does."""

import re
from typing import Any

MARKER = "####"
"""GSM8K writes its final number after this."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def stated_answer(response: str) -> str | None:
    """The part of a response that is marked as its final answer, or None if nothing is.

    Looked for after the last `</think>`: the last `<answer>` block, narrowed to what follows its
    last `####`, else to what is inside its last `\\boxed{}`; without such a block the same of the
    whole text.
    """
    text = response.rpartition("</think>")[2]
    if blocks := _ANSWER_TAG.findall(text):
        text = blocks[-1]
    _, marker, tail = text.rpartition(MARKER)
    if marker:
        return tail.strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return text.strip() if blocks else None


def last_boxed(text: str) -> str | None:
    """What is inside the last `\\boxed{...}`, braces balanced; None without a closed one."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    start += len(r"\boxed{")
    for index in range(start, len(text)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth < 0:
                return text[start:index]
    return None


def gold_text(answer: Any) -> str:
    """A gold answer as text, only what follows its last `####` if it has one.

    Raises ValueError if the sample has none.
    """
    if answer is None:
        raise ValueError("the sample has no gold answer: name its column with --answer-key")
    return str(answer).rpartition(MARKER)[2].strip()
