"""Secrets are taken out of what is printed and written; what only looks a little like one stays."""

import pytest

from fsdprl.redaction import known_secrets, redacted, redacted_leaves


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_TOKEN", "my_secret"],
)  # fmt: skip
def test_values_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "canary-7d31")
    text = "Authorization: canary-7d31!"
    assert redacted(text, prose=True) == f"Authorization: [{name}]!"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false-false"),
        ("HF_TOKEN_PATH", "/root/.cache/token"),
        ("WANDB_API_KEY", "short"),
        ("PATH", "/usr/local/bin"),
    ],
)
def test_values_that_are_no_secrets(name: str, value: str):
    assert known_secrets({name: value}) == []


def test_the_longer_of_two_secrets_goes_first():
    found = known_secrets({"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefgh-ijkl"})
    assert [name for name, _ in found] == ["B_TOKEN", "A_TOKEN"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("hub said hf_" + "aB3" * 9, "hub said [redacted]"),
        ("key sk-proj-0123456789abcdef.", "key [redacted]."),
        ("git clone https://me:hunter2@host/x", "git clone https://[redacted]@host/x"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
        ("AKIAABCDEFGHIJKLMNOP", "[redacted]"),
        ("ask-the-model-for-a-longer-answer", "ask-the-model-for-a-longer-answer"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
    ],
)
def test_well_known_forms(text: str, clean: str):
    assert redacted(text, prose=True) == clean


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("judge(api_key='0f8e7d6c')", "judge(api_key='[redacted]')"),
        ("judge(api_key=0f8e7d6c, model='m')", "judge(api_key=[redacted], model='m')"),
        ('"password": "hunter2!"', '"password": "[redacted]"'),
        ("tokens = 1234567", "tokens = 1234567"),
    ],
)
def test_what_is_assigned_to_a_name_of_a_secret(text: str, clean: str):
    assert redacted(text) == clean
    assert redacted("the password: swordfish", prose=True) == "the password: swordfish"


def test_plain_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "canary-7d31")
    value = {"a": ["x canary-7d31", 3, None], "b": {"c": ("canary-7d31", True)}}
    assert redacted_leaves(value) == {
        "a": ["x [HF_TOKEN]", 3, None],
        "b": {"c": ["[HF_TOKEN]", True]},
    }
