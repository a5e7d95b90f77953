"""Which rows a format reads."""

from typing import Any

from fsdprl.data.example_rows import ExampleFormat, ExampleRows
from fsdprl.data.preference_rows import PreferenceFormat, PreferenceRows


def open_source(
    form: ExampleFormat | PreferenceFormat, *, flag: str = "--data"
) -> ExampleRows | PreferenceRows:
    """The rows of a file, by the class of its format. Raises UserError as they do."""
    if isinstance(form, PreferenceFormat):
        return PreferenceRows(form, flag=flag)
    return ExampleRows(form, flag=flag)


def format_of(values: dict[str, Any]) -> ExampleFormat | PreferenceFormat:
    """A format that travelled as plain values."""
    return (PreferenceFormat if "chosen_key" in values else ExampleFormat)(**values)
