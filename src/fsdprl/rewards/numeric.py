"""Exact numeric match, with GSM8K's gold answers (the number after ####) as they come."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from fsdprl.rewards.answer_text import gold_text, stated_answer
from fsdprl.sample import Sample

_NUMBER = re.compile(
    r"""
    (?<![\w.])                                       # not inside a word or another number
    [-+]?\$?                                         # -5, $5, -$5
    (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?   # 1,234,567 or 1234567, 0.5
       |\.\d+)                                       # .5
    (?:[eE][-+]?\d{1,3}(?![\w.]))?
    (?:\s?/\s?\d+(?![\w.]))?                         # 3/4
    """,
    re.VERBOSE,
)
_MOST_CHARACTERS = 1000  # Python refuses to convert digit strings above 4300


def numeric_match(sample: Sample) -> float:
    """1.0 if the response's final number equals the gold answer's, exactly, else 0.0.

    The final number is the last one after the last `####`, else inside the last `\\boxed{}` or
    `<answer>` block, else in the whole response (all after any `</think>`). 1,234 = 1234.0,
    0.5 = 1/2 and $5 = 5; a per cent sign or a unit is passed over. Nothing is rounded.

    Raises ValueError if the gold answer holds no number: then --answer-key names the wrong column.
    """
    return float(final_number(sample.response) == gold_number(sample.answer))


def gold_number(answer: Any) -> Fraction:
    """The number of a gold answer: a number, or a text whose part after the last #### ends in one.

    Raises ValueError if there is none.
    """
    if isinstance(answer, int | float | Decimal | Fraction) and not isinstance(answer, bool):
        return Fraction(str(answer))
    number = last_number(gold_text(answer))
    if number is None:
        raise ValueError(
            f"the gold answer {str(answer)[:80]!r} holds no number: is --answer-key the right column?"
        )
    return number


def final_number(response: str) -> Fraction | None:
    """The number that a response ends on (see `numeric_match`), or None."""
    stated = stated_answer(response)
    return last_number(response.rpartition("</think>")[2] if stated is None else stated)


def last_number(text: str) -> Fraction | None:
    """The last number in a text as an exact fraction, or None."""
    found = _NUMBER.findall(text)
    if not found or len(found[-1]) > _MOST_CHARACTERS:
        return None
    top, _, bottom = re.sub(r"[\s,$]", "", found[-1]).partition("/")
    if bottom and int(bottom) == 0:
        return None
    return Fraction(top) / int(bottom or 1)
