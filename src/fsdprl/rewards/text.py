"""Small rewards on the text of a response."""

import re

from fsdprl.rewards.answer_text import gold_text
from fsdprl.sample import Sample

_THINK_ANSWER = re.compile(
    r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)


def exact_match(sample: Sample, *, after: str = "", finished: bool = False) -> float:
    """1.0 if the response equals the gold answer, surrounding space apart, else 0.0.

    after: compare only what follows the last occurrence of this marker in the response (without
    it 0.0). finished: a response cut off at the token limit is wrong whatever it says.
    """
    text = sample.response
    if finished and sample.truncated:
        return 0.0
    if after:
        _, marker, text = text.rpartition(after)
        if not marker:
            return 0.0
    return float(text.strip() == gold_text(sample.answer))


def contains_answer(sample: Sample) -> float:
    """1.0 if the gold answer occurs in the response as whole words, letter case apart, else 0.0."""
    pattern = rf"(?<!\w){re.escape(gold_text(sample.answer))}(?!\w)"
    return float(re.search(pattern, sample.response, re.IGNORECASE) is not None)


def think_answer_format(sample: Sample) -> float:
    """1.0 for exactly one `<think>` block, then one `<answer>` block, and nothing else, else 0.0.

    White space between and after the blocks is allowed (unlike in ms-swift, where one newline at
    the end scores 0).
    """
    return float(_THINK_ANSWER.fullmatch(sample.response) is not None)


def soft_overlong(sample: Sample, *, max_length: int, cache_length: int) -> float:
    """A penalty that grows over the last `cache_length` tokens before `max_length`: 0 to -1.

    -clamp((length - (max_length - cache_length)) / cache_length, 0, 1), lengths in engine tokens.
    DAPO (arXiv:2503.14476), equation 13. Raises ValueError unless 0 < cache_length < max_length.
    """
    if not 0 < cache_length < max_length:
        raise ValueError(f"cache_length {cache_length} must lie between 0 and {max_length}")
    exceed = sample.length - (max_length - cache_length)
    return 0.0 - min(max(exceed / cache_length, 0.0), 1.0)
