"""What one round trip of the control plane costs: 2 real ranks under torchrun, and 512 simulated ones.

    python scripts/bench_control.py [--ranks 512] [--rounds 50]

Real ranks are processes that torchrun starts and that serve the framework's own verbs. Simulated
ranks have real sockets and lifelines (one DEALER and one TCP connection each, beating every second),
spread over a few processes. A round trip is one verb to all ranks and their replies, here `ping`
with a payload of about 1 kB. Prints milliseconds (median, 95th percentile, worst) and bytes a rank.
"""

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from fsdprl.controller import Controller, current
from fsdprl.joining import raise_file_limit
from fsdprl.launch import launch
from fsdprl.liveness import BEAT_S, Channel
from fsdprl.watch import Watch
from fsdprl.wire import TOKEN_BYTES, Line, Wire, encode
from fsdprl.world import World

PROCESSES = 2
LIMIT_MS = 50.0


@dataclass
class Config:
    rounds: int = 200
    """Round trips to time."""


def measure(controller: Controller, rounds: int) -> dict[str, float]:
    """Milliseconds a round trip, and bytes a rank and round trip."""
    import torch  # late: torchrun's own process and the simulated ranks do without

    payload = {"row_ids": torch.arange(64), "weight": torch.ones(64, dtype=torch.float64)}
    for _ in range(5):
        controller.call("ping", payload).wait()
    controller.timeline.drain()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        controller.call("ping", payload).wait()
        times.append(1e3 * (time.perf_counter() - start))
    _, counts = controller.timeline.drain()
    each = rounds * controller.world_size
    return {
        "ranks": controller.world_size,
        "median_ms": statistics.median(times),
        "p95_ms": statistics.quantiles(times, n=20)[-1],
        "worst_ms": max(times),
        "sent_bytes": counts["wire.sent"] / each,
        "received_bytes": counts["wire.received"] / each,
    }


def show(name: str, result: dict[str, float]) -> None:
    print(
        f"{name:>10} {result['ranks']:4.0f} ranks: {result['median_ms']:7.2f} ms median, "
        f"{result['p95_ms']:.2f} ms p95, {result['worst_ms']:.2f} ms worst; "
        f"{result['sent_bytes']:.0f} bytes sent, {result['received_bytes']:.0f} received a rank",
        flush=True,
    )


def real(config: Config) -> None:
    """main() of the torchrun job: the framework's own ranks."""
    print(json.dumps(measure(current(), config.rounds)), flush=True)


def simulate(ranks: range, address: tuple[str, int], endpoint: str, token: bytes) -> None:
    """Many ranks in one process: echo every message, beat every lifeline once a second."""
    raise_file_limit()
    lines, done, channels = {}, {}, {}
    poller, context = zmq.Poller(), zmq.Context()
    for rank in ranks:
        line = Line(endpoint, token, rank, context)
        lines[line.socket] = line, rank
        poller.register(line.socket, zmq.POLLIN)
        channels[rank] = connect(address, token, rank)
        done[rank] = 0
        line.reply(0, 0.0, encode(None))
    beat = time.monotonic() + BEAT_S
    while True:
        for ready, _ in poller.poll(1000 * BEAT_S):
            line, rank = lines[ready]
            seq, _, body = line.receive()
            line.reply(seq, 0.0, body)
            done[rank] = seq
        if time.monotonic() > beat:
            beat += BEAT_S
            for rank, channel in channels.items():
                channel.send("beat", (done[rank], 0))


def connect(address: tuple[str, int], token: bytes, rank: int) -> Channel:
    channel = Channel(socket.create_connection(address), token)
    channel.send("hello", {"rank": rank, "host": "simulated", "pid": 1 << 30, "files": {}})
    return channel


def simulated(ranks: int, rounds: int) -> dict[str, float]:
    """A controller of this process and `ranks` simulated ranks in PROCESSES others."""
    raise_file_limit()
    token, world = secrets.token_bytes(TOKEN_BYTES), World(size=ranks, local_size=ranks)
    watch, wire = Watch("127.0.0.1", token, world), Wire("127.0.0.1", token, ranks)
    spawn = multiprocessing.get_context("spawn")
    parts = [range(ranks * i // PROCESSES, ranks * (i + 1) // PROCESSES) for i in range(PROCESSES)]
    args = (watch.address, wire.endpoint, token)
    processes = [spawn.Process(target=simulate, args=(part, *args), daemon=True) for part in parts]
    for process in processes:
        process.start()
    controller = Controller(world)
    controller.connect(wire, watch)
    watch.gather(120.0)
    if watch.missing:
        raise RuntimeError(f"{len(watch.missing)} simulated ranks did not connect")
    controller.ready().wait()
    result = measure(controller, rounds)
    controller.close()
    for process in processes:
        process.terminate()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512, help="simulated ranks")
    parser.add_argument("--rounds", type=int, default=50, help="round trips to time")
    options = parser.parse_args()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.run(
        [*torchrun, str(Path(__file__)), "--rounds", str(options.rounds)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    show("real", json.loads(job.stdout.splitlines()[-1]))
    result = simulated(options.ranks, options.rounds)
    show("simulated", result)
    if result["median_ms"] > LIMIT_MS:
        sys.exit(f"over the limit of {LIMIT_MS:g} ms")


if __name__ == "__main__":
    if "RANK" in os.environ:
        launch(real, Config)
    else:
        main()
