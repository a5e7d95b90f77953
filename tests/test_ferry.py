"""What ranks of other hosts write arrives on the disk of rank 0, also when that disk refuses, and comes back."""

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdprl import ferry, run_hosts
from fsdprl import rows as rows_module
from fsdprl.controller import set_current
from fsdprl.errors import UserError
from fsdprl.ferry import Ferry
from fsdprl.manifest import joined
from fsdprl.safetensors_file import Tally
from fsdprl.sample import Sample
from fsdprl.worker import Worker
from fsdprl.world import World


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Rank 0, and ranks 1 and 2 of another host; what they send goes through queues."""
    lines: defaultdict[Any, queue.Queue] = defaultdict(queue.Queue)
    me = threading.local()

    def send(tensor: torch.Tensor, to: int, *, group: Any, tag: int) -> None:
        lines[me.rank, to, tag].put(tensor.clone())

    def recv(tensor: torch.Tensor, source: int, *, group: Any, tag: int) -> None:
        tensor.copy_(lines[source, me.rank, tag].get(timeout=20))

    monkeypatch.setattr(ferry, "dist", SimpleNamespace(send=send, recv=recv))
    workers = [Worker(World(rank=rank, size=3)) for rank in range(3)]
    for rank, worker in enumerate(workers):
        worker.state["ferry"] = Ferry(rank, (1, 2), (1,), me)  # type: ignore[arg-type]
    return workers


def together(workers: list[Worker], act: Any) -> list[BaseException]:
    """Every rank runs the verb, in a thread each. What they raised."""
    raised: list[BaseException] = []

    def one(worker: Worker) -> None:
        worker.state["ferry"].group.rank = worker.world.rank
        try:
            act(worker)
        except OSError as error:
            raised.append(error)

    threads = [threading.Thread(target=one, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return raised


def test_each_ranks_file_is_delivered_and_added_to(ranks: list[Worker], tmp_path: Path):
    def deliver(worker: Worker) -> None:
        path = tmp_path / "completions" / f"rank-{worker.world.rank}"
        for text in (b"one\n", b"", b"two\n"):
            ferry.deliver(worker, path, text, append=True)
        ferry.deliver(worker, tmp_path / f"whole-{worker.world.rank}", b"longer")
        ferry.deliver(worker, tmp_path / f"whole-{worker.world.rank}", b"short")

    assert together(ranks, deliver) == []
    for rank in range(3):
        assert (tmp_path / "completions" / f"rank-{rank}").read_bytes() == b"one\ntwo\n"
        assert (tmp_path / f"whole-{rank}").read_bytes() == b"short"


def test_ranges_of_all_ranks_make_one_file(ranks: list[Worker], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ferry, "PIECE_BYTES", 3)
    path, found = tmp_path / "model.safetensors", {}

    def save(worker: Worker) -> None:
        trip, rank = ferry.begin(worker), worker.world.rank
        assert trip
        if trip.away:
            chunks = [(4 * rank, bytes_of(*[rank] * 4)), (12 + rank, bytes_of(9))]
            trip.write(path, iter(chunks), Tally())
        found.update(trip.finish(worker.progress))

    assert together(ranks, save) == []
    own = Tally()
    ferry.write_ranges(path, [(0, bytes_of(0, 0, 0, 0)), (12, bytes_of(8))], own)
    assert list(path.read_bytes()) == [0] * 4 + [1] * 4 + [2] * 4 + [8, 9, 9]
    assert joined(path, [*own.facts(), *found[str(path)].facts()])["bytes"] == 15


def test_exchanges_under_way_at_once_do_not_mix(ranks: list[Worker], tmp_path: Path):
    """As when completions are written while a checkpoint is on its way."""
    slow, quick = tmp_path / "model.safetensors", tmp_path / "rank.jsonl"
    found: list[set[str]] = []

    def both(worker: Worker) -> None:
        saving, adding = ferry.begin(worker), ferry.begin(worker)
        assert saving and adding
        if saving.away:
            adding.write(quick, [(0, bytes_of(2))], Tally())
            adding.finish(worker.progress)
            saving.write(slow, [(worker.world.rank, bytes_of(1))], Tally())
            saving.finish(worker.progress)
        else:
            found.extend(set(trip.finish(worker.progress)) for trip in (saving, adding))

    assert together(ranks, both) == []
    assert found == [{str(slow)}, {str(quick)}]
    assert slow.read_bytes() == b"\0\1\1" and quick.read_bytes() == b"\2"


def test_a_disk_that_refuses_is_told_after_all_is_heard(ranks: list[Worker], tmp_path: Path):
    (tmp_path / "file").touch()

    def deliver(worker: Worker) -> None:
        trip, rank = ferry.begin(worker), worker.world.rank
        assert trip
        if trip.away:
            for folder in ("file", f"good-{rank}"):  # a file is no folder
                trip.write(tmp_path / folder / "x", [(0, bytes_of(1))], Tally())
        trip.finish(worker.progress)

    (error,) = together(ranks, deliver)
    assert isinstance(error, OSError)
    assert all((tmp_path / f"good-{rank}" / "x").is_file() for rank in (1, 2))


def test_a_checkpoint_is_fetched_once_a_host_and_dropped(
    ranks: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ferry, "PIECE_BYTES", 64)
    source, into = tmp_path / "step-1", tmp_path / "copy"
    (source / "trainer").mkdir(parents=True)
    (source / "trainer" / "o").write_bytes(bytes(range(200)))
    (source / "empty").touch()
    into.mkdir()
    (into / "left over").touch()

    def fetch(worker: Worker) -> None:
        ferry.fetch(worker, path=str(source), into=str(into))

    assert together(ranks, fetch) == []
    assert (into / "trainer" / "o").read_bytes() == bytes(range(200))
    assert not (into / "left over").exists()
    places = [ferry.here(worker, str(source / "trainer")) for worker in ranks]
    assert places == [source / "trainer", into / "trainer", into / "trainer"]
    assert ferry.here(ranks[1], tmp_path / "step-2") == tmp_path / "step-2"
    assert together(ranks, ferry.drop) == []
    assert not into.exists() and ferry.here(ranks[1], source) == source


def test_every_other_host_gets_its_copy(
    ranks: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And every piece counts as progress where it comes from and where it arrives: large models take long."""
    progressed: list[int] = []
    monkeypatch.setattr(Worker, "progress", lambda worker: progressed.append(worker.world.rank))
    source, into = tmp_path / "step-1", tmp_path / "copy"
    source.mkdir()
    (source / "x").write_bytes(b"x")
    for worker in ranks:
        worker.state["ferry"].leaders = (1, 2)
        assert together([worker], lambda w: ferry.fetch(w, path=str(source), into=str(into))) == []
        if worker.world.rank:
            assert (into / "x").read_bytes() == b"x"
            (into / "x").unlink()
    assert progressed == [0, 0, 1, 2]


def test_rank_0_and_those_apart_are_members(monkeypatch: pytest.MonkeyPatch):
    """Others must not wait for a group they are not in."""
    made: list[list[int]] = []
    monkeypatch.setattr(ferry, "cpu_group", made.append)
    for rank in range(4):
        worker = Worker(World(rank=rank, size=4))
        ferry.join(worker, apart=[2, 3], leaders=[2])
        assert (ferry.begin(worker) is not None) == (rank != 1)
    assert made == [[0, 2, 3]] * 3


def test_pieces_are_taken_in_to_the_end(tmp_path: Path):
    left = iter([("a/x", 0, bytes_of(1)), ("a/x", 1, bytes_of(2)), ("b", 0, bytes_of(3))])
    (tmp_path / "a").touch()
    with pytest.raises(OSError):
        ferry.store(left, lambda name: tmp_path / name, lambda: None)
    assert next(left, None) is None and (tmp_path / "b").read_bytes() == b"\3"


def test_completions_that_cannot_be_written_end_the_run_in_words(tmp_path: Path):
    (tmp_path / "completions").touch()  # a file is no folder
    rows = torch.zeros(0, dtype=torch.int64)
    worker = Worker(World())
    write = rows_module.write_completions
    sample = Sample(row=0, prompt="1+1", response="2")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UserError, match=r"rank-00000\.jsonl: .*the same command again"),
    ):
        patch.setattr(rows_module, "samples_of", lambda *_: [sample])
        worker.store = SimpleNamespace(rows=[SimpleNamespace(info={})])  # type: ignore[assignment]
        write(worker, rows=rows, path=str(tmp_path / "completions"), step=0, samples={})


# ---- the controller's side


def hosts(tmp_path: Path, seen: list[bool], nodes: list[int]) -> tuple[Any, list[Any], list[str]]:
    calls: list[Any] = []
    said: list[str] = []

    def call(verb: str, payload: dict[str, Any], *, phase: str) -> Any:
        calls.append((verb, payload))
        replies = [{"seen": s, "node": n} for s, n in zip(seen, nodes, strict=True)]
        return SimpleNamespace(wait=lambda: replies)

    world = World(size=len(seen), local_size=nodes.count(0))
    set_current(SimpleNamespace(world=world, call=call))  # type: ignore[arg-type]
    return run_hosts.Hosts(tmp_path, said.append), calls, said


@pytest.fixture(autouse=True)
def no_controller() -> Iterator[None]:
    yield
    set_current(None)


def test_one_host_is_not_asked(tmp_path: Path):
    known, calls, _ = hosts(tmp_path, [True, True], [0, 0])
    with known.holding(tmp_path / "step-1"):
        assert calls == []


def test_hosts_that_share_the_disk_have_no_ferry(tmp_path: Path):
    known, calls, said = hosts(tmp_path, [True, True], [0, 1])
    assert [verb for verb, _ in calls] == ["ferry.look"] and not said
    sign = Path(calls[0][1]["path"])
    assert ferry.look(Worker(World(node_rank=1)), **calls[0][1]) == {"seen": True, "node": 1}
    sign.write_text("of another run")
    with known.holding(tmp_path / "step-1"):
        assert len(calls) == 1


def test_one_rank_of_each_other_host_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    known, calls, said = hosts(tmp_path, [True, True, False, False, False], [0, 0, 1, 1, 2])
    assert calls[1] == ("ferry.join", {"apart": [2, 3, 4], "leaders": [2, 4]})
    assert len(said) == 1 and "3 ranks on 2 other hosts do not see" in said[0]
    with known.holding(tmp_path / "step-1"):
        assert calls[-1][0] == "ferry.fetch"
        assert not Path(calls[-1][1]["into"]).is_relative_to(tmp_path)
    assert calls[-1][0] == "ferry.drop"


def test_a_folder_of_the_same_name_is_not_the_same_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ferry, "LOOK_S", 0.05)
    (tmp_path / "sign").write_text("other")
    answer = ferry.look(Worker(), path=str(tmp_path / "sign"), token="mine")
    assert answer == {"seen": False, "node": 0}


def test_a_shared_disk_may_be_slow(tmp_path: Path):
    """A file of rank 0 that shows a little later is seen all the same."""
    later = threading.Timer(0.3, (tmp_path / "sign").write_text, ("mine",))
    later.start()
    answer = ferry.look(Worker(), path=str(tmp_path / "sign"), token="mine")
    assert answer == {"seen": True, "node": 0}
