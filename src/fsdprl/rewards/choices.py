"""Multiple choice: which letter a response settles on."""

import re

from fsdprl.rewards.answer_text import gold_text, stated_answer
from fsdprl.sample import Sample

_WRAPPED = re.compile(r"^\W*(?:\\text(?:bf)?\{)?\W*([A-Za-z])\W*\}?\W*$")
_LEADING = re.compile(r"^\W*(?:\\text(?:bf)?\{)?\W*([A-Z])(?:[).:\]}]|\s*$|\s+-)")
_PHRASE = re.compile(
    r"(?:answer|option|choice)\s*(?:is|:|=)?\s*(?:option|choice)?\s*[\*\(\[\{$]*([A-Z])(?![A-Za-z'])",
    re.IGNORECASE,
)
_LETTER = re.compile(r"(?<![A-Za-z])([A-J])(?![A-Za-z'])")


def multiple_choice(sample: Sample) -> float:
    """1.0 if the response settles on the gold letter, else 0.0, also if it settles on none.

    The letter is looked for in the part marked as the final answer (after `####`, in the last `\\boxed{}` or
    `<answer>`), else in the last "answer is ..." or "Answer: ...", else it is the only capital letter from A to J
    that stands alone in the last line. The gold answer is a letter, bare or as in "(B)" or "B. Paris".

    Raises ValueError if the gold answer begins with no letter.
    """
    gold = gold_choice(gold_text(sample.answer))
    return float(chosen(sample.response) == gold)


def gold_choice(text: str) -> str:
    """The letter of a gold answer. Raises ValueError if there is none."""
    found = _WRAPPED.match(text) or _LEADING.match(text)
    if not found:
        raise ValueError(
            f"the gold answer {text[:80]!r} is no letter of a choice: is --answer-key the right column?"
        )
    return found[1].upper()


def chosen(response: str) -> str | None:
    """The letter that a response settles on, or None (see `multiple_choice`)."""
    stated = stated_answer(response)
    if stated is not None:
        found = _WRAPPED.match(stated) or _LEADING.match(stated)
        return found[1].upper() if found else _last_phrase(stated)
    text = response.rpartition("</think>")[2].strip()
    if letter := _last_phrase(text):
        return letter
    alone = set(_LETTER.findall(text.splitlines()[-1])) if text else set()
    return alone.pop() if len(alone) == 1 else None


def _last_phrase(text: str) -> str | None:
    found = [letter for letter in _PHRASE.findall(text) if letter.isupper()]
    return found[-1] if found else None
