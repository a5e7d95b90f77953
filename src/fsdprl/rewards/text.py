"""Small rewards on the text of a response."""

import re

from fsdprl.rewards.answer_text import gold_text
from fsdprl.sample import Sample

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STEP = re.compile(r"Step \d+:|^\d+\.|\n[-*]|First,|Second,|Next,|Finally,")
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


def strict_format(sample: Sample) -> float:
    """1.0 if `<think>`, `</think>`, `<answer>`, `</answer>` occur once each and in this order, the first at the
    response's beginning and the last at its end, else -0.5.

    White space around the response is passed over; text between the blocks is allowed. MindSpeed RL's strict_format.
    """
    text = sample.response.strip()
    places = [text.find(tag) for tag in _TAGS]
    once = all(text.count(tag) == 1 for tag in _TAGS)
    ends = text.startswith(_TAGS[0]) and text.endswith(_TAGS[-1])
    return 1.0 if once and ends and places == sorted(places) else -0.5


def steps(sample: Sample) -> float:
    """min(1, step markers / 3): does the response show its working?

    Markers: "Step 1:", a number with a dot at the very beginning, a bullet at the beginning of a line, and "First,",
    "Second,", "Next,", "Finally,". Called `step` in open-r1's and MindSpeed RL's lists.
    """
    return min(1.0, len(_STEP.findall(sample.response)) / 3.0)
