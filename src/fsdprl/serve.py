"""What a rank does when told: a dict of verbs, one at a time, in the order they were sent."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fsdprl import (
    blending,
    conversing,
    feeding,
    ferry,
    learn,
    moving,
    profiling,
    rewording,
    rollout,
    row_files,
    rows,
    slicing,
    worker,
    writing,
)
from fsdprl.device import out_of_memory, peak_memory_bytes
from fsdprl.liveness import Lifeline
from fsdprl.moments import reached
from fsdprl.wire import Line, decode, encode
from fsdprl.worker import Worker

VERBS: dict[str, Callable[..., Any]] = {
    **worker.VERBS,
    **rows.VERBS,
    **row_files.VERBS,
    **learn.VERBS,
    **writing.VERBS,
    **ferry.VERBS,
    **blending.VERBS,
    **rollout.VERBS,
    **conversing.VERBS,
    **slicing.VERBS,
    **feeding.VERBS,
    **moving.VERBS,
    **profiling.VERBS,
    **rewording.VERBS,
}


def serve(
    rank: Worker,
    line: Line,
    lifeline: Lifeline,
    verbs: Mapping[str, Callable[..., Any]] = VERBS,
) -> None:
    """Run verbs until `shutdown`. After a verb has raised, the job is lost: run nothing more."""
    pulse = rank.pulse = lifeline.pulse
    pulse.thread = threading.get_ident()
    pulse.done = 0
    line.reply(0, 0.0, encode(None))
    verb = ""
    while verb != "shutdown":
        seq, verb, body = line.receive()
        begin = time.perf_counter()
        try:
            payload = decode(body)
            reached(verb, rank=rank.world.rank, step=line.step, worker=rank, payload=payload)
            reply = encode(verbs[verb](rank, **payload))
        except BaseException as error:
            lifeline.failed(error, memory_note(verb) if out_of_memory(error) else "")
            threading.Event().wait()  # the controller ends this process
            raise
        pulse.done, pulse.ticks = seq, 0
        if verb == "shutdown":
            lifeline.leave()
        line.reply(seq, time.perf_counter() - begin, reply)
    line.close()


def memory_note(verb: str) -> str:
    """What a rank that ran out of memory in this verb held at most, and which options make it hold less."""
    remedy = "--sharding.tokens-per-microbatch, or give --sharding.activation-checkpointing true"
    if verb.startswith("engine."):
        remedy = "--engine.gpu-memory-utilization, --engine.max-num-seqs or --max-new-tokens"
    return f"out of memory (its peak was {peak_memory_bytes() / 1e9:.3g} GB): lower {remedy}"
