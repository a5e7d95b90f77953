"""Controller, watch and serving ranks over real sockets, with ranks as threads of this process."""

import re
import signal
import socket
import struct
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

from fsdprl import moments
from fsdprl import watch as watch_module
from fsdprl.controller import Controller, Timeline, current, set_current
from fsdprl.errors import Interrupted, RemoteError, UserError
from fsdprl.liveness import Channel, Lifeline
from fsdprl.serve import serve
from fsdprl.watch import Job, Watch
from fsdprl.wire import Line, Wire
from fsdprl.worker import VERBS, Worker
from fsdprl.world import World

TOKEN = b"0123456789abcdef"


class Ranks:
    """A controller and `size` ranks, each a thread with its own sockets."""

    def __init__(self, size: int, verbs: dict, relaxed: bool = False) -> None:
        world = World(size=size, local_size=size, host="here")
        self.watch = Watch("127.0.0.1", TOKEN, world, relaxed=relaxed)
        self.watch.on_neglect = lambda: None
        self.wire = Wire("127.0.0.1", TOKEN, size)
        self.lifelines: list[Lifeline] = []
        for rank in range(size):
            threading.Thread(target=self.serve, args=(rank, size, verbs), daemon=True).start()
        self.controller = Controller(world, stall_s=30.0)
        self.controller.connect(self.wire, self.watch)
        self.watch.gather(20.0)
        assert self.watch.missing == []
        self.controller.ready().wait()

    def serve(self, rank: int, size: int, verbs: dict) -> None:
        hello = {"rank": rank, "host": f"host{rank}", "pid": 1 << 30, "files": {}}
        lifeline = Lifeline(self.watch.address, TOKEN, hello, follow=False)
        self.lifelines.append(lifeline)
        lifeline.rank = rank
        line = Line(self.wire.endpoint, TOKEN, rank)
        serve(Worker(World(rank=rank, size=size)), line, lifeline, VERBS | verbs)

    def cut(self, rank: int) -> None:
        """End a rank's lifeline as the kernel does when its process dies."""
        (lifeline,) = [one for one in self.lifelines if one.rank == rank]
        lifeline._channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.watch.close()
        self.wire.close()


@pytest.fixture
def ranks():
    made = []

    def make(size: int = 2, verbs: dict | None = None, **options) -> Ranks:
        made.append(Ranks(size, verbs or {}, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def whoami(worker, **payload):
    return [worker.world.rank, payload]


def boom(worker, *, who):
    if worker.world.rank in who:
        raise ValueError(f"boom on {worker.world.rank}")


def refuse(worker):
    raise UserError("--model x: no such folder")


def nap(worker, *, seconds, ticks=()):
    for _ in range(dict(ticks).get(str(worker.world.rank), 0)):
        worker.progress()
    time.sleep(dict(seconds).get(str(worker.world.rank), 0.0))
    return worker.world.rank


def test_payloads_go_to_their_ranks_and_replies_come_in_their_order(ranks):
    controller = ranks(3, {"who": whoami}).controller
    assert controller.call("who", {"x": 1}).wait() == [[r, {"x": 1}] for r in range(3)]
    replies = controller.call("who", [{"x": "b"}, {"x": "a"}], ranks=[2, 0]).wait()
    assert replies == [[2, {"x": "b"}], [0, {"x": "a"}]]
    (reply,) = controller.call("ping", {"t": torch.arange(4.0)}, ranks=[1]).wait()
    assert torch.equal(reply["t"], torch.arange(4.0))


def test_several_handles_run_in_order_on_each_rank_and_may_be_awaited_in_any(ranks):
    order = []

    def note(worker, *, name, seconds=0.0):
        time.sleep(seconds)
        order.append((worker.world.rank, name))
        return name

    controller = ranks(2, {"note": note}).controller
    slow = controller.call("note", {"name": "slow", "seconds": 0.3}, ranks=[0])
    after = controller.call("note", {"name": "after"})
    quick = controller.call("note", {"name": "quick"}, ranks=[1])
    assert quick.wait() == ["quick"]
    assert not slow.replies and len(after.replies) == 1
    assert after.wait() == ["after", "after"] and slow.wait() == ["slow"]
    assert [name for rank, name in order if rank == 0] == ["slow", "after"]
    assert [name for rank, name in order if rank == 1] == ["after", "quick"]


def test_a_payload_that_cannot_travel_stops_before_any_rank_moves(ranks):
    job = ranks(2, {"who": whoami})
    with pytest.raises(TypeError, match="cannot travel"):
        job.controller.call("who", {"x": object()})
    assert job.watch.idle
    assert job.controller.call("who", {}).wait() == [[0, {}], [1, {}]]


def test_a_verb_that_raises_fails_every_handle_with_its_traceback(ranks):
    controller = ranks(3, {"boom": boom, "who": whoami}).controller
    other = controller.call("boom", {"who": []}, ranks=[0], phase="earlier")
    failing = controller.call("boom", {"who": [1]}, phase="update")
    with pytest.raises(RemoteError) as caught:
        failing.wait()
    error = caught.value
    assert (error.rank, error.host, error.phase, error.kind) == (1, "host1", "update", "raised")
    assert "ValueError: boom on 1" in error.text and "in boom" in error.text
    assert str(error).endswith("rank 1 on host1 raised in update")
    with pytest.raises(RemoteError):
        controller.call("who", {})
    other.replies.clear()
    with pytest.raises(RemoteError):
        other.wait()


def test_a_rank_out_of_memory_says_what_to_lower(ranks):
    def exhausted(worker):
        raise MemoryError("no more")

    verbs = {"engine.generate": exhausted, "model.forward": exhausted}
    for verb, option in (
        ("engine.generate", "--engine.max-num-seqs"),
        ("model.forward", "--sharding.tokens-per-microbatch"),
    ):
        with pytest.raises(RemoteError) as raised:
            ranks(1, verbs).controller.call(verb, {}).wait()
        assert "out of memory (its peak was" in raised.value.message
        assert option in raised.value.message


def test_an_unknown_verb_names_itself(ranks):
    with pytest.raises(RemoteError, match=r"KeyError: 'rows\.typo'"):
        ranks(1).controller.call("rows.typo", {}).wait()


def test_a_users_mistake_found_on_a_rank_stays_a_users_mistake(ranks):
    with pytest.raises(UserError, match=r"^--model x: no such folder$"):
        ranks(2, {"refuse": refuse}).controller.call("refuse", {}).wait()


def test_death_is_noticed_at_once_in_a_verb_and_while_idle(ranks):
    job = ranks(2, {"nap": nap})
    handle = job.controller.call("nap", {"seconds": {"1": 30.0}}, phase="rollout")
    threading.Timer(0.3, job.cut, (1,)).start()
    with pytest.raises(RemoteError, match="rank 1 on host1 died in rollout: its process is gone"):
        handle.wait()
    idle = ranks(2)
    idle.cut(0)
    assert idle.watch.failed.wait(5.0)
    assert "rank 0 on host0 died while idle" in str(idle.watch.failure)


def test_an_echo_of_a_death_waits_for_the_death(ranks, monkeypatch):
    def echo(worker):
        if worker.world.rank == 0:
            raise RuntimeError(
                "[../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]"
            )
        time.sleep(30)

    job = ranks(2, {"echo": echo})
    handle = job.controller.call("echo", {})
    threading.Timer(1.0, job.cut, (1,)).start()
    with pytest.raises(RemoteError, match="rank 1 on host1 died in echo"):
        handle.wait()
    monkeypatch.setattr(watch_module, "ANSWER_S", 0.5)
    with pytest.raises(RemoteError, match="rank 0 on host0 raised in echo"):
        ranks(2, {"echo": echo}).controller.call("echo", {}).wait()  # no death: it is the cause


def test_a_stall_names_the_rank_that_is_behind_with_its_stack(ranks):
    job = ranks(3, {"nap": nap})
    payload = {"seconds": {"0": 30.0, "1": 30.0}, "ticks": {"0": 5, "1": 2}}
    with pytest.raises(RemoteError) as caught:
        job.controller.call("nap", payload, phase="update", stall_s=0.5).wait()
    error = caught.value
    assert (error.rank, error.kind, error.phase) == (1, "stalled", "update")
    assert "after 2 steps (deadline 0.5 s, --run.stall-timeout-s)" in error.message
    assert "rank 0 on host0 does not move either, after 5 steps" in error.message
    assert "in nap" in error.message and "rank 2" not in error.message
    assert re.search(r"in nap\n\s+time\.sleep\(", error.text)
    assert sorted(error.stacks) == [f"rank {rank} on host{rank}" for rank in range(3)]
    assert error.stacks["rank 1 on host1"] == error.text


def test_a_rank_inside_a_collective_waits_for_the_culprit_however_far_that_got(ranks):
    def gather(worker):
        if worker.world.rank == 0:  # a Python frame of torch.distributed, as a collective has
            _apply_to_tensors(lambda _: time.sleep(30), [torch.zeros(1)])
        for _ in range(7):
            worker.progress()
        time.sleep(30)

    with pytest.raises(RemoteError, match=r"rank 1 on host1 stalled in gather") as caught:
        ranks(2, {"gather": gather}).controller.call("gather", {}, stall_s=0.5).wait()
    assert "after 7 steps" in caught.value.message


def test_progress_holds_the_deadline_off(ranks):
    def steady(worker):
        for _ in range(6):
            time.sleep(0.5)
            worker.progress()
        return "done"

    # The pulse is reported every second: 3 s of work pass a deadline of 2 s only because they tick.
    assert ranks(1, {"steady": steady}).controller.call("steady", {}, stall_s=2.0).wait() == [
        "done"
    ]


@pytest.mark.parametrize("how", ["debug", "paused"])
def test_no_deadline_runs_under_debug_or_at_a_breakpoint(ranks, how):
    job = ranks(1, {"nap": nap}, relaxed=how == "debug")
    seen = []
    job.controller.pause_hooks.append(seen.append)
    handle = job.controller.call("nap", {"seconds": {"0": 2.5}}, stall_s=0.2)
    if how == "paused":
        with job.controller.paused():
            assert handle.wait() == [0]
        assert seen == [True, False]
    else:
        assert handle.wait() == [0]
    assert job.watch.failure is None


def test_the_controllers_own_thinking_has_no_deadline(ranks):
    job = ranks(1)
    job.controller.stall_s = 0.2
    handle = job.controller.call("ping", {})
    time.sleep(2.5)  # the reply lies in the socket; the rank is not late
    assert job.watch.failure is None and handle.wait() == [{}]


def test_every_rank_reaches_a_moment_before_each_verb_and_knows_the_step(ranks, monkeypatch):
    met = []
    monkeypatch.setattr(moments, "listeners", [met.append])
    controller = ranks(2).controller
    controller.step = 12
    controller.call("ping", [{"a": 0}, {"a": 1}]).wait()
    told = [(m.rank, m.step, m.facts["payload"]) for m in met if m.name == "ping"]
    assert sorted(told, key=str) == [(0, 12, {"a": 0}), (1, 12, {"a": 1})]


def test_traffic_is_counted_and_peeks_apart(ranks):
    controller = ranks(2).controller
    controller.timeline.drain()
    controller.call("ping", {"x": torch.zeros(10)}, phase="rollout").wait()
    spans, counts = controller.timeline.drain()
    assert [span.name for span in spans] == ["rollout"] and spans[0].end > spans[0].start
    assert counts["wire.sent"] > 80 and counts["wire.received"] > 80 and "wire.peek" not in counts
    controller.call("ping", {"x": 1}, metered=False).wait()
    spans, counts = controller.timeline.drain()
    assert set(counts) == {"wire.peek"} and [span.name for span in spans] == ["ping"]


def test_one_slow_rank_is_named_once(ranks, capsys):
    controller = ranks(3, {"nap": nap}).controller
    for _ in range(4):
        controller.call("nap", {"seconds": {"2": 1.1}}, phase="rollout").wait()
    lines = [line for line in capsys.readouterr().err.splitlines() if "slow" in line]
    assert len(lines) == 1 and "rank 2 on host2 is slow in rollout: 1.1 s" in lines[0]


def test_a_signal_between_halves_of_a_message_is_raised_after_it(ranks):
    controller = ranks(2, {"who": whoami}).controller
    real = controller._wire.send

    def interrupted(*args, **options):
        controller.interrupt = Interrupted(signal.SIGTERM)  # as launch's handler does
        assert controller.uninterruptible
        return real(*args, **options)

    controller._wire.send = interrupted
    with pytest.raises(Interrupted):
        controller.call("who", {"x": 1})
    controller._wire.send = real
    assert controller.call("who", {"x": 2}).wait() == [[0, {"x": 2}], [1, {"x": 2}]]


def test_a_signal_that_met_an_error_is_not_forgotten():
    """The next whole thing may be an optimizer step, which it must not cut short."""
    controller = Controller(World())
    with pytest.raises(Interrupted) as raised, controller.whole():
        with pytest.raises(OSError), controller.whole():
            controller.interrupt = Interrupted(signal.SIGTERM)  # as launch's handler does
            raise OSError("full")
        raise OSError("full")
    assert isinstance(raised.value.__context__, OSError)
    with controller.whole():
        assert controller.interrupt is None


def test_strangers_on_the_lifeline_are_dropped_and_counted(ranks):
    job = ranks(1)
    stranger = Channel(socket.create_connection(job.watch.address), b"fedcba9876543210")
    stranger.send("hello", {"rank": 0, "host": "evil", "pid": 1, "files": {}})
    twice = Channel(socket.create_connection(job.watch.address), TOKEN)
    twice.send("hello", {"rank": 0, "host": "evil", "pid": 1, "files": {}})
    huge = socket.create_connection(job.watch.address)
    huge.sendall(struct.pack("<I", 1 << 31) + TOKEN)
    early = Channel(socket.create_connection(job.watch.address), TOKEN)
    early.send("beat", msgspec.Raw(msgspec.msgpack.encode((1, 2))))
    end = time.monotonic() + 10
    while job.watch.dropped < 4 and time.monotonic() < end:
        time.sleep(0.05)
    assert job.watch.dropped == 4
    assert job.watch.failure is None and job.watch.peers[0].host == "host0"
    assert job.controller.call("ping", {}).wait() == [{}]
    for one in (stranger.sock, twice.sock, huge, early.sock):
        one.close()


def test_ranks_that_never_come_are_listed():
    watch = Watch("127.0.0.1", TOKEN, World(size=2, local_size=2))
    watch.gather(0.1)
    assert watch.missing == [0, 1]
    assert str(watch.absence("within 0.1 s")) == "rank 0, 1 had not connected within 0.1 s"
    watch.close()


def test_neglect_ends_the_job_unless_someone_sits_at_a_breakpoint(ranks, monkeypatch):
    monkeypatch.setattr(watch_module, "GRACE_S", 0.5)
    job = ranks(1)
    called = threading.Event()
    job.watch.on_neglect = called.set
    job.watch.pause(True)
    job.cut(0)
    assert not called.wait(2.0)
    job.watch.pause(False)
    assert called.wait(5.0)


def test_shutdown_is_not_a_death(ranks):
    # Threads of one process share its process group, which the real verb would end twice.
    job = ranks(2, {"shutdown": lambda worker: None})
    assert job.controller.call("shutdown", {}).wait() == [None, None]
    for rank in (0, 1):
        job.cut(rank)
    assert not job.watch.failed.wait(1.5)


def test_current_needs_launch():
    with pytest.raises(UserError, match="launch"):
        current()
    controller = Controller(World())
    set_current(controller)
    assert current() is controller
    set_current(None)
    with pytest.raises(AssertionError, match="dry run"):
        controller.call("ping", {})


def test_timeline_drains_spans_and_counts():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("rollout"):
        raise KeyError
    timeline.add("update", 1.0, 3.0)
    timeline.count("tokens", 2)
    timeline.count("tokens", 3)
    spans, counts = timeline.drain()
    assert [span.name for span in spans] == ["rollout", "update"]
    assert spans[1].end - spans[1].start == 2.0 and counts == {"tokens": 5}
    assert timeline.drain() == ([], {})


def test_deadlines_of_starting_phases_are_longer():
    jobs = []
    controller = Controller(World(), stall_s=5.0)
    controller._wire = SimpleNamespace(send=lambda *_, **__: 0)
    controller._watch = SimpleNamespace(failure=None, expect=lambda ranks, job: jobs.append(job))
    controller.call("model.build", {}, phase="load")
    controller.call("engine.generate", {}, phase="rollout")
    controller.call("model.save", {}, phase="save", stall_s=7.0)
    assert jobs == [Job(1, "load", 1800.0), Job(2, "rollout", 5.0), Job(3, "save", 7.0)]
