"""The injector: Python imports this first where the folder is on PYTHONPATH. fsdprl knows nothing of it.

    FSDPRL_FAULT="phase=generate,rank=1,step=2,kind=sigkill"   several are separated by ;
    FSDPRL_FAULT_ONCE=FOLDER                                   each fault strikes once, restarts included

phase: a verb, whole or its last part (generate, pull, grade, forward, forward_backward, optim_step, save),
or a moment of the controller (step, seal, commit). rank, step: any where they are left out. nth: only the
nth time that phase, rank and step match (from 0). delay: strike that many seconds later, in a thread.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Fault:
    """One line of FSDPRL_FAULT."""

    name: str
    phase: str
    kind: str
    rank: int | None = None
    step: int | None = None
    nth: int = 0
    delay: float = 0.0
    seconds: float = 600.0
    met: int = field(default=0)

    def meets(self, moment: Any) -> bool:
        named = self.phase in (moment.name, moment.name.rpartition(".")[2])
        if (
            not named
            or self.rank not in (None, moment.rank)
            or self.step not in (None, moment.step)
        ):
            return False
        self.met += 1
        return self.met > self.nth and first_time(self.name)


def parse(text: str) -> list[Fault]:
    """Every fault of the variable. KeyError for a kind that there is none of."""
    faults = []
    for words in filter(None, text.split(";")):
        fields: dict[str, Any] = dict(word.split("=", 1) for word in words.split(","))
        for name in ("rank", "step", "nth"):
            if name in fields:
                fields[name] = int(fields[name])
        for name in ("delay", "seconds"):
            if name in fields:
                fields[name] = float(fields[name])
        KINDS[fields["kind"]]
        faults.append(Fault(words, **fields))
    return faults


def first_time(name: str) -> bool:
    """Whether no process of any attempt has struck so yet. Without a folder a fault always strikes."""
    folder = os.environ.get("FSDPRL_FAULT_ONCE")
    if not folder:
        return True
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def strike(fault: Fault, moment: Any) -> None:
    if fault.delay:
        threading.Timer(fault.delay, lambda: KINDS[fault.kind](fault, moment)).start()
    else:
        KINDS[fault.kind](fault, moment)


# ---- what can go wrong


def send(number: int) -> Any:
    return lambda fault, moment: os.kill(os.getpid(), number)


def tell_job(number: int) -> Any:
    """A signal to whoever started this rank: torchrun, or with one rank itself."""

    def tell(fault: Fault, moment: Any) -> None:
        os.kill(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(), number)

    return tell


def throw(fault: Fault, moment: Any) -> None:
    raise RuntimeError("injected: the phase is broken")


def run_out(fault: Fault, moment: Any) -> None:
    import torch

    raise torch.OutOfMemoryError("injected: tried to allocate 80.00 GiB")


def rest(fault: Fault, moment: Any) -> None:
    time.sleep(fault.seconds)


def spin(fault: Fault, moment: Any) -> None:
    """Holds the interpreter's lock in one C call, as a bad regular expression does."""
    sum(range(10**15))


def spoil_gradient(fault: Fault, moment: Any) -> None:
    """NaN in this rank's shard of a gradient."""
    import torch

    worker, name = moment.facts["worker"], moment.facts["payload"]["model"]
    for parameter in worker.models[name].network.parameters():
        gradient = parameter.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if local is not None and local.numel():
            with torch.no_grad():
                local.view(-1)[0] = float("nan")
            return


def spoil_loss(fault: Fault, moment: Any) -> None:
    """NaN in what the loss of this rank's first row is made from."""
    samples = moment.facts["payload"]["samples"]
    name = next(name for name in ("advantage", "weight") if name in samples)
    if len(samples[name]):
        samples[name][0] = float("nan")


def spoil_engine(fault: Fault, moment: Any) -> None:
    """NaN logits: the first parameter of the engine's own copy of the model."""
    import torch

    engine = moment.facts["worker"].engine
    with torch.no_grad():
        for parameter in engine.replica.hf.parameters():
            parameter.fill_(float("nan"))


def stale_bucket(fault: Fault, moment: Any) -> None:
    """One tensor of a pull arrives with another content than was sent."""

    def spoiled(buckets: Any) -> Any:
        for number, bucket in enumerate(buckets):
            if number == 0:
                (name, tensor), *others = bucket.tensors
                bucket.tensors[:] = [(name, tensor + 1), *others]
            yield bucket

    replace_buckets(moment.facts["worker"].engine, spoiled)


def lose_bucket(fault: Fault, moment: Any) -> None:
    """The last bucket of a pull never arrives."""
    replace_buckets(moment.facts["worker"].engine, lambda buckets: iter([*buckets][:-1]))


def replace_buckets(engine: Any, spoiled: Any) -> None:
    update = engine.update_weights

    def once(buckets: Any, version: int) -> Any:
        engine.update_weights = update
        return update(spoiled(buckets), version)

    engine.update_weights = once


KINDS: dict[str, Any] = {
    "sigkill": send(signal.SIGKILL),
    "sigstop": send(signal.SIGSTOP),
    "segfault": send(signal.SIGSEGV),
    "term": tell_job(signal.SIGTERM),
    "int": tell_job(signal.SIGINT),
    "usr1": tell_job(signal.SIGUSR1),
    "raise": throw,
    "oom": run_out,
    "slow": rest,
    "hang": rest,
    "spin": spin,
    "nan": spoil_gradient,
    "nan_loss": spoil_loss,
    "nan_logits": spoil_engine,
    "stale": stale_bucket,
    "lost": lose_bucket,
}


def install(text: str) -> None:
    from fsdprl import moments

    faults = parse(text)

    def listen(moment: Any) -> None:
        for fault in faults:
            if fault.meets(moment):
                strike(fault, moment)

    moments.listeners.append(listen)


if os.environ.get("FSDPRL_FAULT") and "fsdprl" not in sys.modules:
    install(os.environ["FSDPRL_FAULT"])
