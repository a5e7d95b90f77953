"""Text that nobody reads, or that finds no room, costs nothing but itself."""

import os
import sys
from typing import Any

import pytest

from fsdprl.lasting import Lasting, outlive_readers


def target(stream: Any) -> str:
    return os.readlink(f"/proc/self/fd/{stream.fileno()}")


def test_a_closed_pipe_is_given_up():
    reader, writer = os.pipe()
    with open(writer, "w") as file:
        stream: Any = Lasting(file)
        print("read", file=stream, flush=True)
        assert os.read(reader, 10) == b"read\n" and "pipe:" in target(stream)
        os.close(reader)
        print("unread", file=stream, flush=True)
        assert target(stream) == "/dev/null"
        stream.writelines(["still", "unread"])


def test_a_full_disk_may_have_room_again():
    with open(os.open("/dev/full", os.O_WRONLY), "w") as file:
        stream: Any = Lasting(file)
        print("x", file=stream, flush=True)
        assert target(stream) == "/dev/full" and not stream.isatty()
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # closing would raise


def test_streams_are_wrapped_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)  # as under pythonw
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # the true one is put back
    for _ in range(2):
        outlive_readers()
    wrapped: Any = sys.stderr
    assert isinstance(wrapped, Lasting) and not isinstance(wrapped._stream, Lasting)
