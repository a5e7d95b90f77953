"""Programs that a model wrote, run against tests in the sandbox."""

import json
import re
import secrets
from typing import Any

from fsdprl.sample import Sample
from fsdprl.sandbox import Limits, run_python

_BLOCK = re.compile(r"```(?:python|py|Python)?[ \t]*\n(.*?)(?:```|$)", re.DOTALL)


def code_tests(
    sample: Sample,
    *,
    partial: bool = False,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> float:
    """1.0 if the Python program of the response passes all tests of the gold answer, else 0.0; the share of tests
    passed if `partial`.

    The program is the last ``` block after any `</think>`; without one nothing passes. Tests, as an object, a list
    or JSON text: assertions to run behind the program (`["assert f(1) == 2"]`, or one text with several), or input
    and output texts of the program (`{"inputs": [...], "outputs": [...]}` as in verl and APPS, or
    `[{"input": ..., "output": ...}]`), compared line by line without space at the ends. timeout_s and memory_mb are
    for each test. See sandbox.py for what a program can reach, and for allow_unsandboxed.

    Raises ValueError if the gold answer holds no tests, UserError where there is no sandbox.
    """
    tests = tests_of(sample.answer)
    blocks = _BLOCK.findall(sample.response.rpartition("</think>")[2])
    if not blocks:
        return 0.0
    limits = Limits(timeout_s=timeout_s, cpu_s=max(1, int(timeout_s)), memory_mb=memory_mb)
    passed = 0
    for given, expected in tests:
        if _passes(blocks[-1], given, expected, limits, allow_unsandboxed):
            passed += 1
        elif not partial:
            return 0.0
    return passed / len(tests)


def tests_of(answer: Any) -> list[tuple[str, str | None]]:
    """(assertions, None) or (input, output) of each test. Raises ValueError if there are none."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError:
            answer = [answer] if "assert" in answer else None
    if isinstance(answer, dict):
        if "test_list" in answer:
            answer = answer["test_list"]
        elif {"inputs", "outputs"} <= set(answer):
            pairs = zip(answer["inputs"], answer["outputs"], strict=True)
            answer = [{"input": said, "output": out} for said, out in pairs]
    tests: list[tuple[str, str | None]] = []
    for test in answer if isinstance(answer, list) else []:
        if isinstance(test, str):
            tests.append((test, None))
        elif isinstance(test, dict) and {"input", "output"} <= set(test):
            tests.append((_text(test["input"]), _text(test["output"])))
        else:
            raise ValueError(f"a test is an assertion, or has input and output: {str(test)[:80]!r}")
    if not tests:
        raise ValueError(
            f"the gold answer {str(answer)[:80]!r} holds no tests: is --answer-key the right column?"
        )
    return tests


def _passes(
    program: str, given: str, expected: str | None, limits: Limits, allow_unsandboxed: bool
) -> bool:
    if expected is None:
        # The token says that the tests were reached and passed: a program may also leave with 0 before them.
        token = secrets.token_hex(16)
        program = f"{program}\n\n{given}\nprint('\\n{token}')\n"
        ran = run_python(program, "", limits, allow_unsandboxed=allow_unsandboxed)
        return ran.code == 0 and ran.out.rstrip().endswith(token)
    ran = run_python(program, given, limits, allow_unsandboxed=allow_unsandboxed)
    return ran.code == 0 and _lines(ran.out) == _lines(expected)


def _text(value: Any) -> str:
    """Inputs and outputs come as texts, or as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
