"""Worker verbs where hosts share no disk: bytes of the run folder travel to the host of rank 0, which has it, and back.

Ranks that do not see the folder are apart. What they would write there they send to rank 0, and before a run is
resumed one rank of each of their hosts gets a copy of the checkpoint. All of it goes over a gloo group of its own, so
that a thread can use it while training goes on. Where all ranks see the folder there is no ferry.
"""

import contextlib
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdprl.mesh import cpu_group
from fsdprl.safetensors_file import Tally, write_ranges
from fsdprl.worker import Worker

PIECE_BYTES = 16 << 20
LOOK_S = 5.0
"""Time for a new file to show on a shared disk that is slow."""

Piece = tuple[str, int, Tensor]
"""Name of a file, byte position in it, and the bytes [n] that stand there."""
Moved = Callable[[], None]


@dataclass
class Ferry:
    """A member's view: rank 0, or a rank apart."""

    rank: int
    apart: tuple[int, ...]
    leaders: tuple[int, ...]
    """Of the ranks apart, the first of each host."""
    group: dist.ProcessGroup
    trips: int = 0
    fetched: tuple[Path, Path] | None = None
    """Where a checkpoint lies on the host of rank 0, and where its copy does here."""

    def trip(self) -> "Trip":
        """The next exchange. All members begin the same ones in the same order: they meet the same verbs."""
        self.trips += 1
        return Trip(self, self.trips)


class Trip:
    """One exchange, with a tag of its own: several may be under way, in as many threads."""

    def __init__(self, ferry: Ferry, tag: int) -> None:
        self.ferry, self.tag = ferry, tag
        self.away = ferry.rank in ferry.apart

    def write(self, path: Path, chunks: Iterable[tuple[int, Tensor]], tally: Tally) -> None:
        """As safetensors_file.write_ranges, on the host of rank 0, whose tally it will be."""
        for position, tensor in chunks:
            data = tensor.view(torch.uint8)
            for start in range(0, len(data), PIECE_BYTES):
                self.send(0, (str(path), position + start, data[start : start + PIECE_BYTES]))

    def finish(
        self, moved: Moved, *, place: Callable[[str], Path] = Path, append: bool = False
    ) -> dict[str, Tally]:
        """Apart: say that this was all. On rank 0: write what the others sent, as `store`, and tell what by path.

        Raises the first OSError after the others have been heard to the end.
        """
        if self.away:
            self.end(0)
            return {}
        tallies: dict[str, Tally] = {}
        refused: OSError | None = None
        for peer in self.ferry.apart:
            try:
                tallies = store(self.pieces(peer), place, moved, tallies, append=append)
            except OSError as error:
                refused = refused or error
        if refused:
            raise refused
        return tallies

    def send(self, peer: int, piece: Piece) -> None:
        name, position, data = piece
        encoded = torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8)
        head = torch.tensor([len(encoded), position, len(data)])
        for tensor in (head, encoded, data):
            if len(tensor):
                dist.send(tensor, peer, group=self.ferry.group, tag=self.tag)

    def end(self, peer: int) -> None:
        dist.send(torch.zeros(3, dtype=torch.int64), peer, group=self.ferry.group, tag=self.tag)

    def pieces(self, peer: int) -> Iterator[Piece]:
        """What a rank sends, until it says that this was all."""
        while True:
            length, position, size = self._receive(peer, 3, torch.int64).tolist()
            if not length:
                return
            name = bytes(self._receive(peer, length, torch.uint8).tolist()).decode()
            yield name, position, self._receive(peer, size, torch.uint8)

    def _receive(self, peer: int, size: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(size, dtype=dtype)
        if size:
            dist.recv(tensor, peer, group=self.ferry.group, tag=self.tag)
        return tensor


def store(
    pieces: Iterable[Piece],
    place: Callable[[str], Path],
    moved: Moved,
    known: dict[str, Tally] | None = None,
    *,
    append: bool = False,
) -> dict[str, Tally]:
    """Write pieces of files where `place` puts them; what was written, added to what is known.

    append: to the ends of files, wherever their positions. After an OSError, which is raised at the end, the rest is
    taken in all the same: its sender waits.
    """
    tallies = defaultdict(Tally, known or {})
    refused: OSError | None = None
    for name, of_file in groupby(pieces, key=lambda piece: piece[0]):
        path = place(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if append:
                add_to(path, of_file)
            else:
                write_ranges(path, _moving(of_file, moved), tallies[str(path)])
        except OSError as error:
            refused = refused or error
    if refused:
        raise refused
    return dict(tallies)


def add_to(path: Path, pieces: Iterable[Piece]) -> None:
    with path.open("ab") as file:
        for _, _, data in pieces:
            file.write(data.numpy().data)


def _moving(pieces: Iterable[Piece], moved: Moved) -> Iterator[tuple[int, Tensor]]:
    for _, position, data in pieces:
        moved()
        yield position, data


# ---- what other verbs call


def begin(worker: Worker) -> Trip | None:
    """An exchange for what this verb writes into the run folder; None where the folder is seen, or not rank 0's."""
    ferry: Ferry | None = worker.state.get("ferry")
    return ferry.trip() if ferry else None


def deliver(worker: Worker, path: Path, data: bytes, *, append: bool = False) -> None:
    """Write (or add) bytes to a file of the run folder; for verbs that all ranks run, each with a path of its own."""
    trip = begin(worker)
    place = Path if append else anew
    if data:
        contents = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if trip and trip.away:
            trip.send(0, (str(path), 0, contents))
        else:
            store([(str(path), 0, contents)], place, worker.progress, append=append)
    if trip:
        trip.finish(worker.progress, place=place, append=append)


def anew(name: str) -> Path:
    """The path of a file, which is not there."""
    path = Path(name)
    path.unlink(missing_ok=True)
    return path


def here(worker: Worker, path: str | Path) -> Path:
    """Where this rank finds a folder of the run: itself, or the copy that was fetched."""
    ferry: Ferry | None = worker.state.get("ferry")
    if ferry and ferry.fetched and Path(path).is_relative_to(ferry.fetched[0]):
        return ferry.fetched[1] / Path(path).relative_to(ferry.fetched[0])
    return Path(path)


# ---- verbs


def look(worker: Worker, *, path: str, token: str) -> dict[str, Any]:
    """Whether this rank sees a file that rank 0 has just written, and on which host it is."""
    end = time.monotonic() + LOOK_S
    seen = False
    while not seen and time.monotonic() < end:
        with contextlib.suppress(OSError):
            seen = Path(path).read_text() == token
        if not seen:
            time.sleep(0.1)
    return {"seen": seen, "node": worker.world.node_rank}


def join(worker: Worker, *, apart: Sequence[int], leaders: Sequence[int]) -> None:
    """Have these ranks send to rank 0 from here on."""
    rank = worker.world.rank
    if rank == 0 or rank in apart:
        group = cpu_group([0, *apart])
        worker.state["ferry"] = Ferry(rank, tuple(apart), tuple(leaders), group)


def fetch(worker: Worker, *, path: str, into: str) -> None:
    """Copy a checkpoint from the host of rank 0 to each of the others."""
    ferry: Ferry | None = worker.state.get("ferry")
    if ferry is None:
        return
    trip = ferry.trip()
    if ferry.rank == 0:
        for leader in ferry.leaders:
            for piece in read_pieces(Path(path)):
                trip.send(leader, piece)
                worker.progress()
            trip.end(leader)
        return
    if ferry.rank in ferry.leaders:
        shutil.rmtree(into, ignore_errors=True)
        store(trip.pieces(0), lambda name: Path(into) / name, worker.progress)
    ferry.fetched = Path(path), Path(into)


def read_pieces(folder: Path) -> Iterator[Piece]:
    """Every file of a folder, by its name in there."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, position = str(file.relative_to(folder)), 0
        with file.open("rb") as opened:
            while data := opened.read(PIECE_BYTES):
                yield name, position, torch.frombuffer(bytearray(data), dtype=torch.uint8)
                position += len(data)


def drop(worker: Worker) -> None:
    """Remove what was fetched."""
    ferry: Ferry | None = worker.state.get("ferry")
    if ferry and ferry.fetched:
        if ferry.rank in ferry.leaders:
            shutil.rmtree(ferry.fetched[1], ignore_errors=True)
        ferry.fetched = None


VERBS: dict[str, Callable[..., Any]] = {
    "ferry.look": look,
    "ferry.join": join,
    "ferry.fetch": fetch,
    "ferry.drop": drop,
}
