"""Standard output and error that outlive their reader: a run is not lost with `| tee`, a pager or a terminal."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)
"""A disk that may have room again: what is buffered goes out then."""


class Lasting:
    """A text stream that drops what cannot be written, where others raise. In all else it is the one inside."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Characters taken: all of them."""
        self._attempt(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As `write`."""
        self._attempt(self._stream.writelines, lines)

    def flush(self) -> None:
        """As far as it goes."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, act: Any, *text: Any) -> None:
        try:
            act(*text)
        except OSError as error:
            if error.errno in FULL:
                return
            # What is buffered would fail again, and at the latest when the interpreter ends.
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def outlive_readers() -> None:
    """Have print() and all else that writes to standard output and error of this process go on without a reader.

    The same Ctrl-C that asks for a checkpoint ends `tee`, and before it is written.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Lasting):
            setattr(sys, name, Lasting(stream))
