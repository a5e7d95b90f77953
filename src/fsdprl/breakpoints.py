"""breakpoint() in a recipe: deadlines and the live display rest while someone sits at the prompt."""

import contextlib
import os
import pdb
import sys
from collections.abc import Iterator
from typing import Any

from fsdprl.controller import Controller


@contextlib.contextmanager
def breakpoints(controller: Controller) -> Iterator[None]:
    """Have breakpoint() stop in its caller's line with a pdb that pauses the controller.

    With PYTHONBREAKPOINT set the choice is the user's, and `--debug` drops the deadlines.
    """
    if "PYTHONBREAKPOINT" in os.environ:
        yield
        return

    class Debugger(pdb.Pdb):
        def interaction(self, *args: Any, **kwargs: Any) -> None:
            with controller.paused():
                super().interaction(*args, **kwargs)

    def stop(*_: Any, **__: Any) -> None:
        Debugger().set_trace(sys._getframe(1))

    before, sys.breakpointhook = sys.breakpointhook, stop
    try:
        yield
    finally:
        sys.breakpointhook = before
