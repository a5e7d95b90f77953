"""A recipe whose main does one thing, often a bad one, named by --case."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import bare  # noqa: F401

from fsdprl import errors, joining, liveness, worker
from fsdprl.controller import current
from fsdprl.launch import launch
from fsdprl.options import RunOptions


@dataclass
class Config:
    case: str = "normal"
    out: str = ""
    """Folder for what the test wants to see."""
    run: RunOptions = field(default_factory=RunOptions)


def hurt(rank, *, who: int, how: str, number: int = 0):
    if rank.world.rank != who or (how == "once" and rank.world.restart):
        return rank.world.rank
    if how == "raise":
        raise ValueError("the verb is broken")
    if how == "user":
        raise errors.UserError("--model nowhere: no such folder")
    if how == "sleep":
        time.sleep(120)
    os.kill(os.getpid(), number or signal.SIGKILL)
    time.sleep(120)


def meet(rank, *, absent: int):
    """A collective that one rank does not join."""
    import torch.distributed as dist

    if rank.world.rank == absent:
        time.sleep(120)
    dist.barrier()


def pids(rank):
    return os.getpid()


worker.VERBS |= {"hurt": hurt, "meet": meet, "pids": pids}


def note(cfg: Config, name: str, text: str) -> None:
    folder = Path(cfg.out)
    (folder / f".{name}").write_text(text)
    (folder / f".{name}").rename(folder / name)


def main(cfg: Config) -> None:
    controller = current()
    last = controller.world_size - 1
    controller.step = 12
    controller.on_exit.append(lambda cause: note(cfg, "cause", json.dumps(cause)))
    controller.pause_hooks.append(lambda paused: print("paused" if paused else "resumed"))
    note(cfg, "began", "yes")
    CASES[cfg.case](cfg, controller, last)
    print("main is done", flush=True)


def normal(cfg, controller, last):
    print(
        f"devices {controller.device_type}, ranks",
        controller.call("hurt", {"who": -1, "how": ""}).wait(),
    )


def raise_in_verb(cfg, controller, last):
    controller.call("hurt", {"who": last, "how": "raise"}, phase="update").wait()


def user_in_verb(cfg, controller, last):
    controller.call("hurt", {"who": last, "how": "user"}).wait()


def kill_in_verb(cfg, controller, last):
    controller.call("hurt", {"who": last, "how": "kill"}, phase="rollout").wait()


def kill_while_main_is_busy(cfg, controller, last):
    os.kill(controller.call("pids", {}).wait()[last], signal.SIGKILL)
    time.sleep(120)


def stop(cfg, controller, last):
    liveness.FROZEN_S = 2.0
    payload = {"who": last, "how": "stop", "number": signal.SIGSTOP}
    controller.call("hurt", payload, phase="rollout").wait()


def stall(cfg, controller, last):
    controller.call("meet", {"absent": last}, phase="update", stall_s=1.0).wait()


def controller_killed(cfg, controller, last):
    controller.call("hurt", {"who": last, "how": "sleep"})
    os.kill(os.getpid(), signal.SIGKILL)


def controller_stopped(cfg, controller, last):
    os.kill(os.getpid(), signal.SIGSTOP)


def wait(cfg, controller, last):
    handle = controller.call("hurt", {"who": last, "how": "sleep"}, phase="rollout")
    note(cfg, "waiting", str(os.getpid()))
    handle.wait()


def save_when_interrupted(cfg, controller, last):
    note(cfg, "waiting", str(os.getpid()))
    try:
        time.sleep(120)
    except errors.Interrupted as interrupted:
        print(f"saving on {interrupted.signum}:", controller.call("ping", {"a": 1}).wait()[0])
        raise


def ignore_interrupts(cfg, controller, last):
    note(cfg, "waiting", str(os.getpid()))
    try:
        time.sleep(120)
    except errors.Interrupted:
        note(cfg, "stubborn", "yes")
        time.sleep(120)


def print_for_nobody(cfg, controller, last):
    note(cfg, "waiting", str(os.getpid()))
    while not (Path(cfg.out) / "gone").exists():
        time.sleep(0.05)
    for stream in (sys.stdout, sys.stderr):
        print("x" * 100_000, file=stream, flush=True)
        stream.writelines(["y", "\n"])
    note(cfg, "printed", "yes")
    time.sleep(120)


def user_error(cfg, controller, last):
    raise errors.UserError("--data x.jsonl:3: no field 'question'")


def bug(cfg, controller, last):
    {}["missing"]


def leave(cfg, controller, last):
    sys.exit(3)


def die_once(cfg, controller, last):
    controller.call("hurt", {"who": last, "how": "once"}).wait()


def breakpoint_in_main(cfg, controller, last):
    handle = controller.call("hurt", {"who": last, "how": "sleep"}, stall_s=1.0)
    breakpoint()
    print("back in main")
    handle.wait()


def dry(cfg, controller, last):
    assert controller.flags.dry_run
    controller.report.append(("plan", ["two steps", "of 64 samples"]))
    print(controller.report)
    raise SystemExit(0)  # as Run.steps does


def bad_hook(cfg, controller, last):
    controller.on_exit.append(lambda cause: {}["no room"])


CASES = {
    fn.__name__: fn
    for fn in (
        normal, raise_in_verb, user_in_verb, kill_in_verb, kill_while_main_is_busy, stop, stall,
        controller_killed, controller_stopped, wait, print_for_nobody, save_when_interrupted, ignore_interrupts,
        user_error, bug, leave, die_once, breakpoint_in_main, dry, bad_hook,
    )
}  # fmt: skip


def die_before_connecting(self):
    """Stands in for Joining.rendezvous on rank 1, once rank 0 waits for it."""
    rendezvous(self).get("controller")
    os.kill(os.getpid(), signal.SIGKILL)


rendezvous = joining.Joining.rendezvous

if __name__ == "__main__":
    if "--case=controller_stopped" in sys.argv:
        liveness.FROZEN_S = 2.0
    if "--case=early" in sys.argv and os.environ["RANK"] == "1":
        joining.Joining.rendezvous = die_before_connecting
    launch(main, Config)
