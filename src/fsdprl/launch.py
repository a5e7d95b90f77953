"""launch(main, Config): parse, start the ranks, run main on rank 0, and end the job in one piece.

Every rank runs the same file. Rank 0's main thread runs `main`, its second thread and the other
ranks' main threads serve. However the job ends, one message says why, and no process is left.
"""

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from fsdprl import config, determinism
from fsdprl.breakpoints import breakpoints
from fsdprl.controller import Controller, set_current
from fsdprl.endings import describe
from fsdprl.errors import Interrupted, UserError
from fsdprl.inputs import check_inputs
from fsdprl.joining import Joining, check_same_files, listen
from fsdprl.lasting import outlive_readers
from fsdprl.liveness import die_with_parent, tell_torchrun
from fsdprl.options import RunOptions
from fsdprl.redaction import redacted
from fsdprl.run_folder import preflight
from fsdprl.watch import Watch
from fsdprl.world import World

ConfigT = TypeVar("ConfigT")

CONNECT_S = 600.0
"""Time all ranks have to import torch and connect."""
END_S = 8.0
"""Time the hooks have to write down why the job ends."""
SAVE_S = 20.0
"""The same after a signal, when they also save a checkpoint. torchrun kills 30 s after its SIGTERM."""
STEP_S = 15.0
"""Time that a step has, after a signal, to finish the updates it has begun and be saved."""
PROBE_S = 1.0
"""Time for a peer's death to show, before a SIGTERM counts as a preemption. Signals within this time
are one: a terminal or a batch system sends to torchrun and to us, and torchrun passes it on."""


def launch(main: Callable[[ConfigT], Any], config_class: type[ConfigT]) -> None:
    """Run `main(config)` as the controller of all ranks that torchrun started (or of this one).

    Returns when main has returned and every rank has shut down. Otherwise the process ends: with
    code 2 and only the message after a UserError; 1 after any other failure of any rank; 128 plus
    the signal after Ctrl-C or SIGTERM, which raise Interrupted in main first.
    """
    if os.environ.get("FSDPRL_REWARD_PROCESS"):
        raise UserError(
            "launch(main, ...) runs when the recipe is imported, as reward processes do: put it under "
            'if __name__ == "__main__":'
        )
    world = World()
    try:
        world = World.from_env()
        cfg, flags = config.parse(config_class, sys.argv[1:], quiet=world.rank != 0)
        fields = dataclasses.asdict(cfg)  # pyright: ignore[reportArgumentType]
        options = getattr(cfg, "run", None)
        # Of several hosts only that of rank 0 may have the folder: Run looks, when all are connected.
        alone = world.local_size == world.size and not flags.dry_run
        if isinstance(options, RunOptions) and alone:
            preflight(options, fields, quiet=world.rank != 0, restarted=world.restart > 0)
        if world.local_size == world.size:
            check_inputs(fields)
        recipe = Path(str(getattr(sys.modules[main.__module__], "__file__", None))).resolve()
        if not recipe.is_file():
            raise UserError("launch(main, ...): main must be in a file, which every rank runs")
    except (UserError, SystemExit) as error:
        _refuse(world, error)
    if world.rank != 0 and flags.dry_run:
        return
    if world.torchrun:
        die_with_parent()
    deterministic = isinstance(options, RunOptions) and options.deterministic
    if deterministic:
        determinism.prepare()
    faulthandler.enable()
    outlive_readers()
    joining = Joining(world, flags, recipe, seed=int(getattr(cfg, "seed", 0)))
    if world.rank != 0:
        joining.follow()
        return
    stall_s = float(getattr(options, "stall_timeout_s", 600.0))
    controller = Controller(world, flags=flags, config=fields, recipe=recipe, stall_s=stall_s)
    Lead(joining, controller, deterministic=deterministic).run(lambda: main(cfg))


def _refuse(world: World, error: UserError | SystemExit) -> NoReturn:
    """Exit after a mistake on the command line or a wrong run folder, which every rank sees; only
    rank 0 speaks."""
    code = 2 if isinstance(error, UserError) else error.code
    if world.rank != 0 and code:
        time.sleep(5.0)  # a rank that exits first has torchrun kill rank 0 before it has spoken
    if isinstance(error, UserError):
        print(redacted(f"fsdprl: {error}"), file=sys.stderr)
    sys.exit(code)


class Lead:
    """Rank 0: start the ranks, run main, and turn whatever happens into one end of the job."""

    def __init__(
        self, joining: Joining, controller: Controller, *, deterministic: bool = False
    ) -> None:
        self.joining, self.controller, self.deterministic = joining, controller, deterministic
        self.watch: Watch | None = None
        self._server: threading.Thread | None = None
        self._signal: tuple[int, float] | None = None
        self._once = threading.Lock()

    def run(self, main: Callable[[], Any]) -> None:
        listen(self._on_signal)
        set_current(self.controller)
        try:
            with breakpoints(self.controller):
                if not self.joining.flags.dry_run:
                    self._start()
                main()
                self._stop()
            self._once.acquire()  # from here on a first signal changes nothing
        except BaseException as error:
            self._end(error)
        written = self._call_hooks({"kind": "finished", "message": ""})
        self.controller.close()
        set_current(None)
        if not written:
            sys.exit(1)

    def _start(self) -> None:
        """Wait for the ranks, see that they run the same files, and have them take their devices."""
        wire, watch, self._server = self.joining.lead()
        self.watch = watch
        watch.on_neglect = lambda: self._end(watch.failure or AssertionError("no failure"))
        self.controller.connect(wire, watch)
        try:
            watch.gather(CONNECT_S)
        except Interrupted as signalled:
            if watch.missing and signalled.signum == signal.SIGTERM:
                # torchrun ends a job whose rank has died; nobody loses work if it was a preemption
                raise watch.absence("when torchrun ended the job: see its own lines") from None
            raise
        if watch.failure:
            raise watch.failure
        if watch.missing:
            raise watch.absence(f"within {CONNECT_S:g} s")
        check_same_files(watch)
        self.controller.ready().wait()
        payload = {"deterministic": True} if self.deterministic else {}
        started = self.controller.call("start", payload, phase="start").wait()
        self.controller.device_type = started[0]["device"]
        if self.deterministic:  # sums of matrix products depend on it
            self.controller.facts["threads"] = started[0]["threads"]
        self.controller.timeline.drain()

    def _stop(self) -> None:
        if self._server:
            self.controller.call("shutdown", {}, stall_s=60.0).wait()
            self._server.join(timeout=10.0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal:
            if now - self._signal[1] > PROBE_S:
                os._exit(128 + number)  # the others follow their lifelines
            return
        self._signal = number, now
        if self._once.locked():
            return  # the job is ending already
        if self.watch and number != signal.SIGINT:
            self.watch.failed.wait(PROBE_S)  # torchrun sends SIGTERM because a rank has died
        error = (self.watch and self.watch.failure) or Interrupted(number)
        run = self.controller.on_exit  # without one nobody saves, or raises what is left to it
        if run and self.controller.changed and isinstance(error, Interrupted):
            # Weights between two steps would resume as neither: the run saves after this one.
            self.controller.leaving = error
            limit = threading.Timer(STEP_S, self._end, (error,))
            limit.daemon = True
            limit.start()
        elif self.controller.uninterruptible:
            self.controller.interrupt = error
        else:
            raise error

    def _end(self, error: BaseException) -> NoReturn:
        """Say why, once; let the hooks write it down; leave no process; exit."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the job; this one must not outrun it
        if self.watch:
            self.watch.taken = True
            error = self._cause_of(error, self.watch)
        code, text, cause = describe(error, self.controller.recipe)
        limit_s = END_S if self.controller.changed or cause["kind"] != "interrupted" else SAVE_S
        deadline = threading.Timer(limit_s, os._exit, (code,))  # a hook may hang
        deadline.daemon = True
        deadline.start()
        for hook in self.controller.pause_hooks:
            with contextlib.suppress(Exception):
                hook(True)
        if text:
            print(redacted(text), file=sys.stderr, flush=True)
            tell_torchrun()
        self._call_hooks(cause)
        if self.watch:
            if cause["kind"] in ("interrupted", "exit") and self.watch.idle:
                with contextlib.suppress(BaseException):
                    self._stop()
            self.watch.dismiss(code)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)

    def _cause_of(self, error: BaseException, watch: Watch) -> BaseException:
        """The failure of a rank, if the main thread fell because of it or was interrupted after it."""
        met: BaseException | None = error
        while met is not None and met is not watch.failure:
            met = met.__cause__ or met.__context__
        return met or (watch.failure if isinstance(error, KeyboardInterrupt) else None) or error

    def _call_hooks(self, cause: dict[str, Any]) -> bool:
        """Have everything written down; whether all of it was."""
        known = {"rank": None, "host": None, "phase": None, "step": self.controller.step}
        fine = True
        for hook in self.controller.on_exit:
            try:
                hook(known | cause)
            except Exception as error:
                text = (
                    f"fsdprl: {error}" if isinstance(error, UserError) else traceback.format_exc()
                )
                print(redacted(text), file=sys.stderr)
                fine = False
        return fine
