"""How well the tool calls of a response match the gold ones."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fsdprl.sample import Sample

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_REACT = re.compile(
    r"Action\s*:[ \t]*(.+?)[ \t]*\n\s*Action Input\s*:\s*(.*?)(?=\n\s*(?:Observation|Thought|Action)\s*:|$)",
    re.DOTALL,
)


def tool_call_f1(sample: Sample) -> float | None:
    """F1 between the tool calls of the response and the gold ones: 0.0 to 1.0.

    Counted are the calls' names and their arguments, each a (tool, argument, value); repeated calls count each time.
    Of a conversation the calls of all turns count. They are read from
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks (Hermes, Qwen) or from ReAct's `Action:` and
    `Action Input:` lines. The gold answer is such text, a list of calls, or OpenAI's
    `tool_calls`. No gold call and none made is 1.0. None (not applicable) where the gold answer is None.
    """
    if sample.answer is None:
        return None
    said = [turn["content"] for turn in sample.turns or [] if turn["role"] == "assistant"]
    calls = [call for text in said or [sample.response] for call in calls_in(text)]
    gold, made = _facts(gold_calls(sample.answer)), _facts(calls)
    if not gold and not made:
        return 1.0
    shared = sum((gold & made).values())
    return 2.0 * shared / (sum(gold.values()) + sum(made.values()))


def calls_in(text: str) -> list[tuple[str, Any]]:
    """(name, arguments) of the tool calls in a text; a block that is no call has an empty name."""
    calls = []
    for block in _TAGGED.findall(text):
        calls.extend(_read(block))
    if not calls:
        calls = [(name, _parsed(given)) for name, given in _REACT.findall(text)]
    return calls


def gold_calls(answer: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of a gold answer. Raises ValueError where it says nothing of the kind."""
    if isinstance(answer, str):
        if (found := calls_in(answer)) or not answer.strip():
            return found
        answer = _parsed(answer)
    calls = [_call(part) for part in (answer if isinstance(answer, list) else [answer])]
    if any(call is None for call in calls):
        raise ValueError(f"the gold answer holds no tool calls: {str(answer)[:80]!r}")
    return [call for call in calls if call]


def _read(block: str) -> list[tuple[str, Any]]:
    said = _parsed(block)
    calls = [_call(part) for part in (said if isinstance(said, list) else [said])]
    return [call or ("", None) for call in calls]


def _call(part: Any) -> tuple[str, Any] | None:
    if not isinstance(part, dict):
        return None
    part = part.get("function", part) if isinstance(part.get("function", part), dict) else part
    name = part.get("name")
    given = part.get("arguments", part.get("parameters", {}))
    if not isinstance(name, str):
        return None
    return name, _parsed(given) if isinstance(given, str) else given


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text.strip()


def _facts(calls: Iterable[tuple[str, Any]]) -> Counter[tuple[str, ...]]:
    facts: Counter[tuple[str, ...]] = Counter()
    for name, given in calls:
        facts[name,] += 1
        items = given.items() if isinstance(given, dict) else [("", given)] if given else []
        for key, value in items:
            facts[name, str(key), json.dumps(value, sort_keys=True, default=str)] += 1
    return facts
