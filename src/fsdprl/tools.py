"""Tools that a model calls, and the environment that runs the calls.

A tool is a module-level function, plain or async, with typed parameters and a docstring that says what it does and
what each parameter is (Google's form, as transformers reads it): the chat template tells the model of it. Calls are
read as Hermes and Qwen write them, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import ast
import asyncio
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from fsdprl.conversation import Conversation, Message
from fsdprl.errors import UserError
from fsdprl.functions import import_named
from fsdprl.rewards.tool_calls import calls_in
from fsdprl.sandbox import Limits, run_python

MOST_DIGITS = 400


def environment(tools: Sequence[str], *, max_calls: int = 8, max_result: int = 4096) -> Any:
    """`call_tools` with these tools, ready for `sampler.rollout`. Raises UserError as `schemas` does."""
    schemas(tools)
    return functools.partial(
        call_tools, tools=list(tools), max_calls=max_calls, max_result=max_result
    )


def call_tools(
    conversation: Conversation, *, tools: list[str], max_calls: int = 8, max_result: int = 4096
) -> list[Message] | None:
    """Run the tool calls of the model's last turn and return their results; a turn without any ends it.

    What goes wrong in a call (unknown name, arguments that do not fit, an exception, more than max_calls in a
    conversation) is told to the model and counted in `tool_errors`. A result of more than max_result characters loses
    its middle.
    """
    calls = calls_in(conversation.said)
    if not calls or conversation.over:
        return None
    known = {tool.__name__: tool for tool in map(named_tool, tools)}
    heard = []
    for name, arguments in calls:
        conversation.counts["tool_calls"] += 1
        try:
            if conversation.counts["tool_calls"] > max_calls:
                raise ValueError(f"no more than {max_calls} calls are allowed")
            result = _called(known, name, arguments)
        except Exception as error:
            conversation.counts["tool_errors"] += 1
            result = f"Error: {error}" if isinstance(error, ValueError) else f"Error: {error!r}"
        heard.append({"role": "tool", "name": name, "content": _cut(str(result), max_result)})
    return heard


def schemas(tools: Sequence[str]) -> list[dict[str, Any]]:
    """JSON schemas of tools by name, from their signatures and docstrings.

    Raises UserError naming a tool that does not exist, or what its docstring and types lack.
    """
    if not tools:
        return []
    from transformers.utils.chat_template_utils import get_json_schema  # seconds to import

    made = []
    for text in tools:
        tool = named_tool(text)
        try:
            made.append(get_json_schema(tool))
        except Exception as error:  # its own kinds, for a docstring or a type that it cannot read
            raise UserError(f"--tools {text}: {error}") from None
    return made


@functools.cache
def named_tool(text: str) -> Callable[..., Any]:
    """`calculator`, `python`, `module:function` or `path/to/file.py:function`. Raises UserError."""
    module, colon, name = text.rpartition(":")
    if not colon:
        if text in BUILT_IN:
            return BUILT_IN[text]
        raise UserError(
            f"--tools {text}: no such tool; known are {', '.join(BUILT_IN)} (or module:function, or "
            f"path/to/file.py:function)"
        )
    try:
        found = getattr(import_named(module), name, None)
    except (ImportError, UserError) as error:
        raise UserError(f"--tools {text}: cannot import {module}: {error}") from None
    if not inspect.isroutine(found):
        raise UserError(f"--tools {text}: {module} has no function {name}")
    return found


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, and parentheses.
    """
    if len(expression) > MOST_DIGITS:
        raise ValueError(f"the expression has more than {MOST_DIGITS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def python(code: str) -> str:
    """Run a Python program in a sandbox, standard library only, and return what it prints.

    Args:
        code: The program.
    """
    ran = run_python(code, limits=Limits(timeout_s=10.0, cpu_s=10))
    if ran.timed_out:
        raise ValueError("the program ran for more than 10 seconds")
    if ran.code:
        last = ran.err.strip().splitlines()[-1:] or [f"exit code {ran.code}"]
        raise ValueError(last[0])
    return ran.out.strip()


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    parts: list[int | float] = []
    if isinstance(node, ast.BinOp):
        parts = [_value(node.left), _value(node.right)]
    elif isinstance(node, ast.UnaryOp):
        parts = [_value(node.operand)]
    apply = _OPERATORS.get(type(getattr(node, "op", None)))
    if not parts or apply is None:
        raise ValueError(f"{ast.unparse(node)[:40]!r} is not arithmetic")
    if apply is operator.pow and (abs(parts[1]) > 64 or abs(parts[0]) > 1e6):
        raise ValueError("the power is too large")
    value = apply(*parts)
    if isinstance(value, complex) or abs(value) > 10**MOST_DIGITS:
        raise ValueError("the value is too large, or no real number")
    return value


def _called(known: dict[str, Callable[..., Any]], name: str, arguments: Any) -> Any:
    if not name:
        raise ValueError('a call is {"name": ..., "arguments": {...}} in JSON')
    if name not in known:
        raise ValueError(f"there is no tool {name!r}; there are {', '.join(known)}")
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    try:
        inspect.signature(known[name]).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    value = known[name](**arguments)
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {text[len(text) - half :]}"
