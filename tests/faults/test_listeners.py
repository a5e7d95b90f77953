"""On a single node nothing listens to other hosts but torchrun itself."""

import socket
import time
from pathlib import Path

import pytest

from tests.faults import trial
from tests.faults.listeners import is_loopback, listening
from tests.ranks.jobs import HERE, Job

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def outward(job: Job) -> set[int]:
    """Processes of the job that other hosts can reach."""
    return {pid for pid, address in listening([*job.processes()]) if not is_loopback(address)}


def test_the_probe_sees_a_listener():
    import os

    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):
        mine = listening([os.getpid()])
        assert {is_loopback(address) for _, address in mine} == {True, False}
    with socket.create_server(("::1", 0), family=socket.AF_INET6):
        assert all(is_loopback(address) for _, address in listening([os.getpid()]))


def test_the_control_plane_stays_on_loopback(tmp_path: Path):
    job = Job([str(HERE / "faulty.py"), "--case=wait", f"--out={tmp_path}"], ranks=2)
    try:
        job.until(tmp_path / "waiting")
        assert len(listening([*job.processes()])) > 2
        assert outward(job) <= {job.process.pid}
    finally:
        job.process.terminate()
        job.end()


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_run_stays_on_loopback(ranks: int, tmp_path: Path):
    """Looked at all the time: engine, rewards, saving and all."""
    out = tmp_path / "run"
    job, began = trial.begin(out, ranks)
    met: set[int] = set()
    while job.process.poll() is None and time.time() < began + 120:
        met |= outward(job)
        time.sleep(0.1)
    ended = trial.end(job, began, out)
    assert ended.code == 0, ended.said
    assert met <= ({job.process.pid} if ranks > 1 else set())
