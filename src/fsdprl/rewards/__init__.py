"""Rewards to use as they are or to copy: each is a module-level `fn(sample) -> float | None`.

Bind settings with `functools.partial(fn, name=value)`, on the command line as `'name(setting=value)'`. Nothing heavy
is imported before it is used.
"""

from collections.abc import Callable
from typing import Any

from fsdprl.rewards.answer_line import answer_line as answer_line
from fsdprl.rewards.choices import multiple_choice as multiple_choice
from fsdprl.rewards.code import code_tests as code_tests
from fsdprl.rewards.judging import judge as judge
from fsdprl.rewards.lengths import cosine as cosine
from fsdprl.rewards.lengths import repetition as repetition
from fsdprl.rewards.lengths import soft_overlong as soft_overlong
from fsdprl.rewards.math import boxed_accuracy as boxed_accuracy
from fsdprl.rewards.math import math_accuracy as math_accuracy
from fsdprl.rewards.numeric import numeric_match as numeric_match
from fsdprl.rewards.text import contains_answer as contains_answer
from fsdprl.rewards.text import exact_match as exact_match
from fsdprl.rewards.text import steps as steps
from fsdprl.rewards.text import strict_format as strict_format
from fsdprl.rewards.text import think_answer_format as think_answer_format
from fsdprl.rewards.tool_calls import tool_call_f1 as tool_call_f1

BUILT_IN: dict[str, Callable[..., Any]] = {
    "accuracy": math_accuracy,
    "boxed": boxed_accuracy,
    "acc_for_dapo": answer_line,
    "numeric": numeric_match,
    "choice": multiple_choice,
    "exact": exact_match,
    "contains": contains_answer,
    "format": think_answer_format,
    "strict_format": strict_format,
    "step": steps,
    "cosine": cosine,
    "repetition": repetition,
    "soft_overlong": soft_overlong,
    "tool_f1": tool_call_f1,
    "code": code_tests,
    "judge": judge,
}
"""Names for the command line."""
