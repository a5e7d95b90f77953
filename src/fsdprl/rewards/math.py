"""Mathematical equality by math-verify (`pip install 'fsdprl[math]'`)."""

import functools
import logging
from types import ModuleType
from typing import Any

from fsdprl.errors import UserError
from fsdprl.rewards.answer_text import gold_text, last_boxed, stated_answer
from fsdprl.rewards.text import think_answer_format
from fsdprl.sample import Sample


def math_accuracy(sample: Sample) -> float | None:
    """1.0 if the response's final answer equals the gold answer mathematically, else 0.0.

    The final answer is what follows the last `####`, else inside the last `\\boxed{}` or `<answer>`
    block, else the whole text, where LaTeX goes before plain numbers (all after any `</think>`). A
    gold answer may be LaTeX with or without dollars, plain text or a number; GSM8K's counts from
    its `####`. None (not applicable) where math-verify cannot read the gold answer, as in TRL;
    ms-swift scores it 0. Unlike there, `\\boxed{3} ... \\boxed{72}` means 72, and "The answer is 72" is an answer.
    """
    gold = _parsed(_anchored(gold_text(sample.answer)))
    if not gold:
        return None
    stated = stated_answer(sample.response)
    text = sample.response.rpartition("</think>")[2] if stated is None else _anchored(stated)
    # A deadline of math-verify's own needs SIGALRM; the reward process has one that always works.
    return float(bool(_math_verify().verify(gold, _parsed(text), timeout_seconds=None)))


def boxed_accuracy(
    sample: Sample,
    *,
    right: float = 1.0,
    wrong: float = 0.0,
    missing: float = 0.0,
    structured: bool = False,
) -> float | None:
    """`right` if what the last `\\boxed{}` holds equals the gold answer mathematically, else `wrong`; `missing`
    without a closed box. structured: a response that is not exactly one `<think>` and one `<answer>` block is wrong.

    MindSpeed RL's acc_for_ppo and math_17k_acc; its base_acc is boxed(structured=True), its acc is
    boxed(wrong=-0.5, missing=-1.0). None (not applicable) where math-verify cannot read the gold answer.
    """
    gold = _parsed(_anchored(gold_text(sample.answer)))
    if not gold:
        return None
    said = last_boxed(sample.response)
    if said is None:
        return missing
    if structured and not think_answer_format(sample):
        return wrong
    same = _math_verify().verify(gold, _parsed(_anchored(said)), timeout_seconds=None)
    return right if same else wrong


def _anchored(text: str) -> str:
    """LaTeX is only found between dollars; text that says where its mathematics is keeps it."""
    return text if any(sign in text for sign in ("$", r"\boxed", r"\(", r"\[")) else f"${text}$"


def _parsed(text: str) -> list[Any]:
    library = _math_verify()
    return library.parse(text, extraction_config=_targets(), parsing_timeout=None)


@functools.cache
def _targets() -> tuple[Any, ...]:
    library = _math_verify()
    return (
        library.LatexExtractionConfig(boxed_match_priority=0),
        library.ExprExtractionConfig(),
    )


@functools.cache
def _math_verify() -> ModuleType:
    try:
        import math_verify
    except ImportError:
        raise UserError(
            "rewards.math needs math-verify: pip install 'fsdprl[math]' (or grade numbers with "
            "fsdprl.rewards.numeric.numeric_match)"
        ) from None
    # It warns in every process that its own deadlines are off, which is on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _warm_up() -> None:
    """Import and parse once (sympy takes a second): see grading.Grader."""
    _parsed("$1$")


math_accuracy.warm_up = _warm_up  # type: ignore[attr-defined]
boxed_accuracy.warm_up = _warm_up  # type: ignore[attr-defined]
