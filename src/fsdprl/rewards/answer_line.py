"""DAPO's verifier: the last "Answer: ..." line of a response against the gold answer, as normalised strings."""

import re

from fsdprl.rewards.answer_text import gold_text
from fsdprl.sample import Sample

_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TAIL = 300
"""Characters at the end of a response that are looked at."""

# The rules of Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D), in its order.
_UNITS = (
    "square ways integers dollars mph inches ft hours km units \\ldots sue points feet minutes digits cents degrees "
    "cm gm pounds meters meals edges students childrentickets multiples"
)
_REWRITES = (
    *((article, "") for article in ("an ", "a ")),
    (".$", "$"),
    *((space, "") for space in ("\\$", "\\ ", " ")),
    ("mbox", "text"),
    *((conjunction, ",") for conjunction in (",\\text{and}", "\\text{and}")),
    ("\\text{m}", "\\text{}"),
    *((word, "") for word in _UNITS.split()),
    *((f"\\text{{{inner}}}", "") for inner in ("s", ".", "\ns")),
    *((f"\\text{{}}{power}", "") for power in ("^2", "^3")),
    *((rest, "") for rest in ("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}")),
    *((rest, "") for rest in ("\\;", ",\\!", "{,}", '"', "\\dots")),
)
_UNWRAP = (
    (re.compile(r".*?\$(.*?)\$.*"), r"\1"),
    (re.compile(r"\\(?:text|textbf|overline)\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def answer_line(sample: Sample) -> float:
    """1.0 if the last line `Answer: ...` equals the gold answer, else -1.0, also where there is none.

    Only the last 300 characters count; letter case of "Answer" does not. Both sides are normalised as in Minerva:
    what stands after the last "=", units and articles gone, LaTeX wrappers off, 1,000 as 1000. Called
    `acc_for_dapo`; made for DAPO-Math-17k, whose prompts ask for such a line (a box is not looked at).
    Raises ValueError without a gold answer.
    """
    lines = _LINE.findall(sample.response[-_TAIL:])
    return 1.0 if lines and normalised(lines[-1]) == normalised(gold_text(sample.answer)) else -1.0


def normalised(answer: str) -> str:
    """An answer's text in the form in which Minerva compares answers."""
    text = answer.rpartition("=")[2]
    for old, new in _REWRITES:
        text = text.replace(old, new)
    for pattern, new in _UNWRAP:
        text = pattern.sub(new, text)
    text = text.replace("$", "").strip()
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text
