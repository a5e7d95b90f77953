"""Two hosts that share no disk: the checkpoint is whole on the one of rank 0, and a resume gets it back from there."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdprl.comparing import run_differences
from fsdprl.records import read_json, read_lines
from tests.faults.trial import PLUGIN
from tests.recipes.processes import PATHS, run, task, words

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(400)]
FLAGS: dict[str, Any] = {
    "steps": 4, "lr": 1e-2, "prompts-per-round": 7, "when-short": "error", "max-rounds": 0, "eval-every": 0,
    "run.save-every": 1, "run.deterministic": True, "sharding.min-num-params": 0,
}  # fmt: skip
"""DAPO: beside the model, groups are carried over, which are on all ranks."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Hosts:
    """One torchrun a host, of one rank each. The second has an empty disk of its own in place of `folder`."""

    def __init__(self, typed: list[str], folder: Path, **environment: str) -> None:
        port = free_port()
        env = os.environ | {"PYTHONPATH": f"{PLUGIN}{os.pathsep}{PATHS}"}
        env |= {"GLOO_SOCKET_IFNAME": "lo"} | environment
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        agent += [f"--master-port={port}", "--master-addr=localhost"]
        own = f'mount -t tmpfs tmpfs "{folder}" && exec "$@"'
        starts: list[list[str]] = [[], ["unshare", "--mount", "sh", "-c", own, "sh"]]
        self.agents = [
            subprocess.Popen(
                [*start, *agent, f"--node-rank={node}", *typed],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node, start in enumerate(starts)
        ]

    def end(self) -> tuple[list[int], str]:
        """Exit codes, and all that was said."""
        said = [agent.communicate(timeout=200)[0] for agent in self.agents]
        return [agent.returncode for agent in self.agents], "\n".join(said)

    def kill(self) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("task")
    try_it = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    if subprocess.run(try_it, capture_output=True).returncode:
        pytest.skip("a host with a disk of its own cannot be made here")
    return task(folder)


@pytest.fixture(scope="module")
def whole(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two ranks on one host."""
    out = tmp_path_factory.mktemp("one-host") / "run"
    run("dapo", files, out, ranks=2, **FLAGS)
    return out


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Of the first host alone."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def check_same(whole: Path, out: Path) -> None:
    assert run_differences(whole, out) == []
    for file in (whole / "completions").glob("rank-*.jsonl"):
        assert read_lines(out / "completions" / file.name) == read_lines(file)


def test_a_run_on_two_hosts_without_a_shared_disk(files: dict[str, str], whole: Path, disk: Path):
    """Killed after a checkpoint and started again, it is the run of two ranks on one host, to the byte."""
    typed = words("dapo", files, disk / "run", **FLAGS)
    hosts = Hosts(typed, disk)
    limit = time.monotonic() + 120
    while not (disk / "run" / "checkpoints" / "step-000002").exists():
        assert time.monotonic() < limit and hosts.agents[0].poll() is None, hosts.end()
        time.sleep(0.003)
    hosts.kill()
    hosts.end()
    hosts = Hosts(typed, disk)
    codes, said = hosts.end()
    assert codes == [0, 0], said
    assert "1 ranks on 1 other hosts do not see" in said and "continuing" in said, said
    (event,) = read_json(disk / "run" / "config.json")["resumed"]
    assert 2 <= event["step"] < FLAGS["steps"]
    check_same(whole, disk / "run")
    again = Hosts(typed, disk)
    codes, said = again.end()
    assert codes == [0, 0] and "nothing is left to do" in said, said


def test_a_host_that_dies_while_it_sends(files: dict[str, str], whole: Path, disk: Path):
    """It is named, the checkpoint it was sending does not count, and the same command goes on from the one before."""
    out = disk / "run"
    typed = words("dapo", files, out, **FLAGS)
    fault = "phase=save,rank=1,step=2,kind=sigkill,delay=0.002"
    codes, said = Hosts(typed, disk, FSDPRL_FAULT=fault).end()
    assert codes == [1, 1] and re.search(r"fsdprl: rank 1 on \S+ died in \w+", said), said
    status = read_json(out / "status.json")
    assert (status["state"], status["rank"], status["resumable"]) == ("failed", 1, True), status
    left = [path.name for path in sorted((out / "checkpoints").glob("step-*"))]
    assert left in (["step-000001", "step-000002"], ["step-000001"]), left
    codes, said = Hosts(typed, disk).end()
    assert codes == [0, 0] and f"continuing {out} from" in said and left[-1] in said, said
    check_same(whole, out)
