"""Rewards for tests of recipes, named as tests.recipes.grades:FUNCTION."""

import time

from fsdprl.sample import Sample


def letters(sample: Sample) -> float:
    """Share of the answer's characters that are lower-case letters."""
    text = sample.response
    return sum("a" <= c <= "z" for c in text) / max(len(text), 1)


def begins(sample: Sample) -> float:
    """1 if the answer begins with a digit or a letter of the first half of the alphabet."""
    return float(sample.response[:1].lower() in "0123456789abcdefghijklm" and sample.response != "")


def matches(sample: Sample) -> float:
    """1 if the answer's length has the parity of the row's reference answer."""
    return float(len(sample.response) % 2 == int(sample.answer) % 2)


def sometimes(sample: Sample) -> float | None:
    """None on every second row: this reward does not apply there."""
    return None if sample.row % 2 else letters(sample)


def always(sample: Sample) -> float:
    """The same for every answer."""
    return 0.1


def digits(sample: Sample) -> float:
    """Share of the answer's characters that are digits."""
    return sum(c in "0123456789" for c in sample.response) / max(len(sample.response), 1)


def begins_with_a_digit(sample: Sample) -> float:
    """1 if the answer's first character is a digit."""
    return float(sample.response[:1] in tuple("0123456789"))


def stuck(sample: Sample) -> float:
    """Takes two minutes in step 2."""
    if sample.step == 2:
        time.sleep(120)
    return digits(sample)
