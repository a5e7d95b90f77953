"""One place that takes secrets out of text: everything fsdprl prints or writes down goes through it.

A secret is the value of an environment variable whose name says so (HF_TOKEN, WANDB_API_KEY, ...), what
has the form of a well-known credential, and a user's password in a URL.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

NAMES = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET)_?KEY)$",
    re.IGNORECASE,
)
"""Environment variables that hold secrets; TOKENIZERS_PARALLELISM and HF_TOKEN_PATH are none."""
LEAST = 8
"""Shorter values are left: "true" or "1" would be taken out of every sentence."""
FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|AKIA[A-Z0-9]{16}|xox[abp]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{16,})"
    r"|(?<=://)[^\s/:@'\"]+:[^\s/@'\"]+(?=@)|(?<=Bearer )[^\s'\"]+"
)
"""Hugging Face, OpenAI and its like, GitHub, AWS, Slack, GitLab; user:password@ in a URL; a bearer."""
PARTS = (
    "hf_",
    "sk-",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "AKIA",
    "xox",
    "glpat-",
    "://",
    "Bearer ",
)
"""What a text must hold for FORMS to fit: looked for first, which is 50 times as fast."""
ASSIGNED = re.compile(
    r"((?:api|access|private|secret)[_-]?key|(?:hf|auth|access|api)[_-]token|password|passwd|secret)"
    r"(['\"]?\s*[=:]\s*)(['\"]?)([^\s'\",)\]}]{6,})",
    re.IGNORECASE,
)
"""api_key='...' in an option or a traceback. Not applied to what models and data sets say."""
MARK = "[redacted]"


def redacted(text: str, *, prose: bool = False) -> str:
    """The text without secrets. prose: written by a model or a data set, where `password: ...` is none."""
    for name, value in known_secrets(os.environ):
        if value in text:
            text = text.replace(value, f"[{name}]")
    if any(part in text for part in PARTS):
        text = FORMS.sub(MARK, text)
    return text if prose else ASSIGNED.sub(rf"\1\2\3{MARK}", text)


def redacted_leaves(value: Any) -> Any:
    """Plain data with every string in it redacted, keys apart."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {name: redacted_leaves(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_leaves(part) for part in value]
    return value


def known_secrets(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, value) of the variables that hold secrets, the longest value first."""
    found = [
        (name, value)
        for name, value in environment.items()
        if len(value) >= LEAST and NAMES.search(name)
    ]
    return sorted(found, key=lambda pair: -len(pair[1]))
