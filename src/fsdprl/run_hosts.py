"""Which ranks see the run folder, and how the others get to it: where hosts share no disk, by way of rank 0."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdprl.controller import current
from fsdprl.records import write_atomic

SIGN = ".shared"
"""A file of the run folder by which ranks of other hosts know it."""


class Hosts:
    """The ranks of a run, by whether they see its folder."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Asks all ranks, where there are several hosts; and has those that do not see it send to rank 0."""
        controller = current()
        self.folder, self.apart = folder.resolve(), list[int]()
        if controller.world.local_size == controller.world.size:
            return
        token, sign = secrets.token_hex(8), self.folder / SIGN
        write_atomic(sign, token)
        payload = {"path": str(sign), "token": token}
        replies = controller.call("ferry.look", payload, phase="start").wait()
        self.apart = [rank for rank, reply in enumerate(replies) if not reply["seen"]]
        if not self.apart:
            return
        first: dict[int, int] = {}
        for rank in self.apart:
            first.setdefault(replies[rank]["node"], rank)
        say(
            f"{len(self.apart)} ranks on {len(first)} other hosts do not see {folder}: what they save goes to rank 0"
        )
        payload = {"apart": self.apart, "leaders": sorted(first.values())}
        controller.call("ferry.join", payload, phase="start").wait()

    @contextmanager
    def holding(self, checkpoint: Path) -> Iterator[None]:
        """While in it, every host can read this checkpoint. A copy lies beside where the run folder would be."""
        if not self.apart:
            yield
            return
        into = self.folder.with_name(f".{self.folder.name}-fetched")
        payload = {"path": str(checkpoint.resolve()), "into": str(into)}
        current().call("ferry.fetch", payload, phase="load").wait()
        yield
        current().call("ferry.drop", {}, phase="load").wait()
