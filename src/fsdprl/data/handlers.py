"""Rows as other tools write them, turned into the columns that this one reads.

A handler makes of a row: for sampling, `prompt` and `answer`; for supervised training, `messages`, or `prompt` and
`completion`; for preferences, `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`. All other
columns stay as they are. `adapted` picks the handler by the columns of the first row.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fsdprl.errors import UserError

if TYPE_CHECKING:
    from fsdprl.data.rows import Rows

Row = dict[str, Any]
Purpose = Literal["prompt", "example", "preference"]
Handler = Callable[[Row, Purpose], Row]

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
QUESTIONS = ("prompt", "problem", "question", "query", "input", "text")
ANSWERS = (
    "answer", "ground_truth", "reward_model.ground_truth", "expected_answer", "final_answer", "solution", "gold",
    "target", "label", "labels", "output", "response", "completion",
)  # fmt: skip
PREFERENCE_PROMPTS = ("prompt", "conversations", "messages", "question", "query")
COMPLETIONS = ("completion", "response", "output", "answer", "solution")
CHOSEN = ("chosen", "chosen_response", "chosen_messages")
REJECTED = ("rejected", "rejected_response", "rejected_messages")


def math(row: Row, purpose: Purpose) -> Row:
    """A question and its answer: GSM8K, DeepScaleR, DeepMath, verl, NeMo-RL, and TRL's prompt and solution."""
    made = {"prompt": parsed(_first(row, QUESTIONS, "a question"))}
    if purpose == "prompt":
        return made | _answer(row)
    return made | {"completion": _text(_first(row, COMPLETIONS, "a completion"))}


def alpaca(row: Row, purpose: Purpose) -> Row:
    """instruction, input, output, and optionally history (pairs) and system."""
    said = [str(row[key]) for key in ("instruction", "input") if row.get(key)]
    if not said:
        raise KeyError("instruction is empty")
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for pair in row.get("history") or []:
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    question = "\n".join(said)
    prompt: Any = [*messages, {"role": "user", "content": question}] if messages else question
    made: Row = {"prompt": prompt}
    if purpose == "preference":
        return made | _pair(row)
    if purpose == "prompt":
        return made | _answer(row)
    return made | {"completion": _text(_first(row, COMPLETIONS, "an output"))}


def messages(row: Row, purpose: Purpose) -> Row:
    """A conversation under `messages`, as a list or as JSON text."""
    return _conversation(parsed(_first(row, ("messages",), "messages")), row, purpose)


def sharegpt(row: Row, purpose: Purpose) -> Row:
    """A conversation under `conversations` (`from`, `value`), and optionally system and chosen, rejected."""
    turns = [renamed(turn) for turn in parsed(_first(row, ("conversations",), "conversations"))]
    if row.get("system") and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": row["system"]}, *turns]
    return _conversation(turns, row, purpose)


def pairwise(row: Row, purpose: Purpose) -> Row:
    """A prompt (a text, messages or ShareGPT's conversations) with a chosen and a rejected completion."""
    if row.get("instruction"):
        return alpaca(row, purpose)
    made = _pair(row)
    prompt: Any = parsed(_first(row, PREFERENCE_PROMPTS, "a prompt"))
    if isinstance(prompt, list):
        prompt = [renamed(turn) for turn in prompt]
        if prompt[-1]["role"] == "assistant":
            made["chosen"] = prompt.pop()  # ms-swift: the conversation ends with the chosen one
        if row.get("system") and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": row["system"]}, *prompt]
    return made | {"prompt": prompt}


def prompt_completion(row: Row, purpose: Purpose) -> Row:
    """A prompt and its completion, under any of their usual names."""
    return math(row, "example" if purpose == "preference" else purpose)


def unpaired(row: Row, purpose: Purpose) -> Row:
    """A prompt, a completion, and whether it is a good one (`label`)."""
    label = row.get("label")
    if isinstance(label, str):
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.lower(), label)
    rest = {key: value for key, value in row.items() if key != "label"}
    return math(rest, "example") | {"label": label}


def text(row: Row, purpose: Purpose) -> Row:
    """A text under `text`: learnt whole, or a prompt."""
    said = _first(row, ("text",), "a text")
    return {"prompt": said} | _answer(row) if purpose == "prompt" else {"text": said}


HANDLERS: dict[str, Handler] = {
    "alpaca": alpaca,
    "math": math,
    "pairwise": pairwise,
    "sharegpt": sharegpt,
    "messages": messages,
    "prompt-completion": prompt_completion,
    "unpaired": unpaired,
    "text": text,
}
"""By the names that scripts/preprocess_data and data recipes take."""


class Handled:
    """Rows as a handler makes them. A row that it cannot use raises UserError with its place."""

    def __init__(
        self, rows: "Rows", handler: str, purpose: Purpose, keys: Mapping[str, str] | None = None
    ) -> None:
        """keys: column of the row for each column that the handler reads, such as {"prompt": "frage"}."""
        if handler not in HANDLERS:
            raise UserError(f"no handler {handler!r}; known are {', '.join(HANDLERS)}")
        self.rows, self.handler, self.keys = rows, handler, dict(keys or {})
        self.purpose: Purpose = purpose

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row, where = self.rows[index], self.rows.where(index)
        try:
            mapped = row | {name: _reached(row, key) for name, key in self.keys.items()}
            return row | HANDLERS[self.handler](mapped, self.purpose)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            reason = error.args[0] if isinstance(error, KeyError) and error.args else error
            raise UserError(
                f"{where}: no row for the handler {self.handler}: {reason}; the row has {', '.join(row)}"
            ) from None

    def where(self, index: int) -> str:
        return self.rows.where(index)


def adapted(rows: "Rows", purpose: Purpose) -> "Rows":
    """The rows with the columns that `purpose` needs: as they are, if they have them or nothing fits."""
    handler = suited(rows[0], purpose)
    return Handled(rows, handler, purpose) if handler else rows


def suited(row: Row, purpose: Purpose) -> str:
    """The handler for rows with these columns; empty if none is needed or none fits."""
    if purpose == "preference":
        return _suited_preference(row)
    has_question = any(row.get(key) for key in QUESTIONS)
    if purpose == "prompt":
        if "prompt" in row:
            return "" if "answer" in row or not _answer(row) else "math"
        for key, name in (
            ("instruction", "alpaca"),
            ("messages", "messages"),
            ("conversations", "sharegpt"),
        ):
            if key in row and not (
                key == "messages" and any(q in row for q in ("problem", "question"))
            ):
                return name
        return "math" if has_question else ""
    said = row.get("messages")
    if isinstance(said, list) or {"prompt", "completion"} <= set(row):
        return ""
    if isinstance(parsed(said), list):
        return "messages"
    if "conversations" in row:
        return "sharegpt"
    if "instruction" in row and any(key in row for key in COMPLETIONS):
        return "alpaca"
    if any(key in row for key in QUESTIONS[:-1]) and any(key in row for key in COMPLETIONS):
        return "prompt-completion"
    return ""


def _suited_preference(row: Row) -> str:
    keys = set(row)
    if "label" in keys and not keys & set(CHOSEN) and not keys & set(REJECTED):
        return "" if {"prompt", "completion"} <= keys else "unpaired"
    native = {"chosen", "rejected"} <= keys
    if native and keys & {"prompt", "conversations", "messages"}:
        return ""
    if keys & set(REJECTED) and keys & {*CHOSEN, "messages", "response"}:
        return "" if native and not keys & {"instruction", "question", "query"} else "pairwise"
    return ""


def parsed(value: Any) -> Any:
    """A list that stands as JSON in a text, as a list."""
    if isinstance(value, str) and value.lstrip()[:2] in ("[{", "[ "):
        try:
            found = json.loads(value)
        except json.JSONDecodeError:
            return value
        return found if isinstance(found, list) else value
    return value


def renamed(turn: Any) -> Row:
    """A ShareGPT turn as a message. Raises KeyError for a speaker that is not known."""
    if "from" not in turn:
        return turn
    if turn["from"] not in SHAREGPT_ROLES:
        raise KeyError(f"a message from {turn['from']!r}; known are {', '.join(SHAREGPT_ROLES)}")
    return {"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


def _conversation(turns: list[Row], row: Row, purpose: Purpose) -> Row:
    if not isinstance(turns, list) or not turns:
        raise KeyError("the conversation is empty")
    if purpose == "preference":
        return pairwise({**row, "prompt": turns}, purpose)
    if purpose == "example":
        return {"messages": turns}
    last = len(turns)
    while last and turns[last - 1].get("role") == "assistant":
        last -= 1
    if not last:
        raise KeyError("the conversation asks nothing")
    made: Row = {"prompt": turns[:last]} | _answer(
        {k: v for k, v in row.items() if k != "messages"}
    )
    if "answer" not in made and last < len(turns):
        made["answer"] = turns[last]["content"]
    return made


def _pair(row: Row) -> Row:
    chosen = parsed(_first(row, (*CHOSEN, "response"), "a chosen completion", unless="messages"))
    return {"chosen": chosen, "rejected": parsed(_first(row, REJECTED, "a rejected completion"))}


def _answer(row: Row) -> Row:
    for key in ANSWERS:
        value = _reached(row, key, None)
        if value is not None:
            # open-instruct keeps the answer in a list of one
            alone = (
                isinstance(value, list)
                and len(value) == 1
                and isinstance(value[0], str | int | float)
            )
            return {"answer": value[0] if alone else value}
    return {}


_RAISE: Any = object()


def _reached(row: Row, key: str, default: Any = _RAISE) -> Any:
    """row[key]; `a.b` also reaches into an object."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            if default is _RAISE:
                raise KeyError(f"there is no column {key!r}")
            return default
        value = value[part]
    return value


def _first(row: Row, keys: tuple[str, ...], what: str, unless: str = "") -> Any:
    for key in keys:
        if row.get(key) not in (None, "", []):
            return row[key]
    if unless and row.get(unless):
        return ""
    raise KeyError(f"there is no {what.removeprefix('a ')} ({', '.join(keys)})")


def _text(value: Any) -> Any:
    return value if isinstance(value, str | list) else str(value)
