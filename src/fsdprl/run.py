"""A run: its folder, its steps, what is saved and what people see of it.

    run = Run(cfg.run)
    policy = ...
    run.track(policy=policy)
    for step in run.steps(plan):
        run.log({"critic/score/mean": ...})

Step s of metrics.jsonl and of completions holds what was measured with the weights after s updates:
step 0 is the initial model, and what is logged after the loop stands at step `steps`. Checkpoint
step-000100 holds the weights after 100 steps, and a run restored from it begins with step 100.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdprl import dryrun
from fsdprl.console import Console, clock, shorten
from fsdprl.controller import current
from fsdprl.metrics import StepMetrics, counted, jsonable, throughput, timings
from fsdprl.options import RunOptions
from fsdprl.plan import Plan
from fsdprl.plots import Plots
from fsdprl.records import JsonLines, Patience
from fsdprl.run_checkpoints import Tracked
from fsdprl.run_folder import RunFolder, finished_message, profile_window
from fsdprl.tracker import Trackers

if TYPE_CHECKING:
    from fsdprl.batch import Batch

SHOWN = ("prompt", "response", "answer", "reward", "length", "truncated")


class Run:
    """One run in one folder. Make it first in `main`: it refuses a wrong folder before models load."""

    def __init__(self, options: RunOptions) -> None:
        """Claims the folder, or continues it. Exits with 0 if it holds this very run, finished.

        UserError: the folder holds another run or is in use, a flag of RunOptions is out of range, or
        the disk cannot hold a checkpoint.
        """
        self.options, self.controller = options, current()
        self.profile = profile_window(options.profile)
        self.console = Console(options.log_every)
        self.tracked = Tracked()
        self.metrics = StepMetrics()
        self.step, self.stopping = 0, False
        self.plan: Plan | None = None
        if self.controller.flags.dry_run:
            return
        self.folder = RunFolder(
            options,
            config=self.controller.config,
            recipe=self.controller.recipe,
            world_size=self.controller.world_size,
            say=self.console.say,
            warn=self.console.warn,
        )
        if self.folder.finished:
            self.console.say(finished_message(options))
            raise SystemExit(0)
        self.folder.check_space(str(self.folder.config.get("model", "")))
        self.folder.set_status("running", phase="starting", step=self.restored)
        self.lines = JsonLines(self.folder.metrics, self.console.warn)
        self.shown = JsonLines(self.folder.completions / "shown.jsonl", self.console.warn)
        self.trackers = Trackers(options.track, self.path, self.console.warn)
        self.plots = Plots(self.path, self.console.warn)
        self.saving = Patience("saving a checkpoint", self.console.warn)
        self.owed = False  # a checkpoint that could not be written
        self.controller.on_exit.append(self._exit)
        self.controller.pause_hooks.append(self.console.pause)

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def restored(self) -> int:
        """Steps done before this process began."""
        return self.folder.restore[0] if self.folder.restore else 0

    # ---- what recipes call -----------------------------------------------------------------

    def track(self, **things: Any) -> None:
        """Save and restore these with the run: models (save(dir), load(dir)) and small things
        (state_dict() that is JSON, load_state_dict()). The first model's Hugging Face checkpoint is
        the checkpoint folder itself."""
        for name, thing in things.items():
            self.tracked.add(name, thing)

    def steps(self, plan: Plan) -> Iterator[int]:
        """Restore what is tracked, then yield the steps that are left, timing and recording each.

        With --dry-run: print what would run and exit with 0.
        """
        if self.controller.flags.dry_run:
            dryrun.show(
                self.console.say, self.controller.config, plan.describe(), self.controller.report
            )
            raise SystemExit(0)
        self._begin(plan)
        self.step = self.restored
        while self.step < plan.steps and not self.stopping:
            self._begin_step()
            yield self.step
            self._end_step(plan)
            self.step += 1
            if self.controller.leaving:
                raise self.controller.leaving
        self.controller.step = self.step
        while self.owed:  # no later step will try again
            part = self._write_checkpoint(self.step)
            self.owed = not (self.lines.flush(sync=True) and self._commit(part, self.step))

    def stop(self) -> None:
        """Make the current step the last one: it is finished, saved, and the run counts as finished."""
        self.stopping = True

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Numbers of the current step. A name logged again in a step is averaged (*/max and */min keep
        the extreme); after the last step, numbers go to a line of their own."""
        self.metrics.add(metrics)

    def record(self, batch: "Batch") -> None:
        """Every rank appends its rows of this batch to completions/."""
        if not self.controller.flags.dry_run:
            batch.write_completions(self.folder.completions.resolve(), self.step)

    def show(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Samples for people, as Batch.peek returns them: on the display, in completions/shown.jsonl,
        and the first and last ones side by side when the run ends."""
        if self.controller.flags.dry_run:
            return
        self.console.show(samples)
        for sample in samples:
            kept = {name: sample[name] for name in SHOWN if name in sample}
            self.shown.append({"step": self.step} | kept)

    # ---- one step --------------------------------------------------------------------------

    def _begin(self, plan: Plan) -> None:
        self.plan = plan
        for line in plan.describe():
            self.console.say(line)
        if self.folder.restore:
            if self.restored > plan.steps:
                self.console.warn(f"{self.path} has {self.restored} steps, more than {plan.steps}")
            self.tracked.load(self.folder.restore[1])
        self.folder.note(**self.controller.facts)
        self.trackers.start(self.folder.config, self.folder.facts["id"], self.restored)
        self.began = time.monotonic()
        self.controller.timeline.drain()  # loading is no step
        self.started = time.perf_counter()
        self.console.start(self.path.name, self.restored, plan.steps)

    def _begin_step(self) -> None:
        self.controller.step = self.step
        self.tracked.remember()
        self.controller.changed = not self.tracked.steady
        self.folder.set_status("running", phase="training", **self._progress(self.step))
        if self.profile and self.step == self.profile[0]:
            self.controller.call("profile_start", {}).wait()

    def _end_step(self, plan: Plan) -> None:
        self.controller.changed = True  # a signal waits until the step is written down
        if self.profile and self.step == self.profile[1]:
            out = str((self.path / "profile").resolve())
            self.controller.call("profile_stop", {"out": out}).wait()
            self.console.say(f"profile of steps {self.options.profile}: {out}")
        every, done = self.options.save_every, self.step + 1
        due = self.owed or self.stopping or done == plan.steps or (every > 0 and done % every == 0)
        due = due or self.controller.leaving is not None
        part = self._write_checkpoint(done) if due else None
        self.controller.phases.note_peak()
        written = self._write_metrics(sync=part is not None)
        self.owed = due and not (written and self._commit(part, done))
        if self.controller.leaving and not due:  # it came while the step's line was written
            self.owed = not self._save_now(done)
        self.controller.changed = False

    def _commit(self, part: Path | None, done: int) -> bool:
        """Make a written checkpoint count. The step's line is on the disk by now, so that a run
        resumed from it misses none."""
        checkpoints, keep = self.folder.checkpoints, self.options.keep
        if part is None or not self.saving.attempt(lambda: checkpoints.commit(part, done, keep)):
            return False
        self.plots.draw()
        return True

    def _write_metrics(self, *, sync: bool) -> bool:
        """Close the step's metrics. False if they wait for room on the disk."""
        start, end = self.started, time.perf_counter()
        self.started = end  # what comes after belongs to the next step: none of the time is lost
        spans, counts = self.controller.timeline.drain()
        seconds = timings(spans, start, end)
        metrics = self.metrics.merged() | seconds
        metrics |= throughput(seconds, counts, self.controller.world_size) | counted(counts)
        self.metrics = StepMetrics()
        self.console.step(self.step, metrics)
        return self._publish(self.step, metrics, sync=sync)

    def _publish(self, step: int, metrics: Mapping[str, float], *, sync: bool) -> bool:
        numbers = jsonable(metrics)
        self.trackers.log(step, numbers)
        return self.lines.append({"step": step} | numbers, sync=sync)

    def _save_now(self, done: int, *, remembered: bool = False) -> bool:
        """A checkpoint out of turn, after a signal. Whether there is one."""
        part = self._write_checkpoint(done, remembered=remembered)
        return self.lines.flush(sync=True) and self._commit(part, done)

    def _write_checkpoint(self, done: int, *, remembered: bool = False) -> Path | None:
        """Everything tracked, in a folder that does not count yet. None if the disk refused."""
        made: list[Path] = []

        def write() -> None:
            self._check_room()
            made.append(self.folder.checkpoints.begin(done))
            self.tracked.save(made[0], done, remembered=remembered)
            self.folder.checkpoints.seal(made[0], done)

        with self.controller.timeline.span("save"):
            self.folder.set_status("running", phase="save", **self._progress(done))
            return made[0] if self.saving.attempt(write) else None

    def _check_room(self) -> None:
        """OSError if there is less room than the last checkpoint took: found out before ranks write."""
        last = self.folder.checkpoints.all()[-1:]
        need = sum(
            path.stat().st_size for _, top in last for path in top.rglob("*") if path.is_file()
        )
        if shutil.disk_usage(self.path).free < need:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {need / 1e9:.3g} GB")

    def _progress(self, step: int) -> dict[str, Any]:
        return {"step": step, "steps": self.plan.steps if self.plan else None}

    # ---- the end ---------------------------------------------------------------------------

    def _exit(self, cause: Mapping[str, Any]) -> None:
        """Called once by launch, when `main` is over or has failed; the ranks may be gone."""
        self.console.stop()
        if cause["kind"] == "finished" and self.plan is not None:
            self._finish(self.plan)
            return
        state = "interrupted" if cause["kind"] in ("interrupted", "exit") else "failed"
        facts = {name: cause.get(name) for name in ("kind", "rank", "host")} | self._progress(
            self.step
        )
        facts["phase"] = cause.get("phase") or ("training" if self.plan else "starting")
        self.folder.set_status(state, **facts, cause=cause["message"], saved=self._saved())
        if cause["kind"] == "interrupted":
            self._save_on_the_way_out()
            saved = self._saved()
            self.folder.set_status(state, **facts, cause=cause["message"], saved=saved)
            self.console.say(f"the same command continues from step {saved or 0}")
        self.plots.kill()
        self.trackers.close(3.0)

    def _saved(self) -> int | None:
        """Steps in the newest checkpoint: where the same command goes on. None: at the beginning."""
        found = self.folder.checkpoints.all()
        return found[-1][0] if found else None

    def _save_on_the_way_out(self) -> None:
        """Save what the step under way began with, if no update has touched it and it is not saved.

        The ranks are alive (a dead one is another cause), and save after what they are doing; launch
        ends the process if that takes too long, and then the last checkpoint stands.
        """
        if self.plan is not None and not self.controller.changed and self._saved() != self.step > 0:
            try:
                self._save_now(self.step, remembered=self.step < self.plan.steps)
            except Exception as error:
                self.console.warn(f"no checkpoint of step {self.step}: {error}")

    def _finish(self, plan: Plan) -> None:
        if self.step < plan.steps and not self.stopping:
            self.console.warn(
                f"the loop was left at step {self.step} with no checkpoint of it: run.stop() ends a "
                f"run after the current step and saves"
            )
        if self.metrics:
            self._publish(self.step, self.metrics.merged(), sync=True)
        self.plots.draw()
        plot = self.plots.close()
        self.trackers.close()
        self.folder.set_status("finished", phase="finished", **self._progress(self.step))
        self._summary(plot)

    def _summary(self, plot: Path | None) -> None:
        checkpoints = self.folder.checkpoints.all()
        say = self.console.say
        say(f"run         {self.path}  ({clock(time.monotonic() - self.began)})")
        if plot:
            say(f"plot        {plot}")
        say(f"metrics     {self.folder.metrics}")
        if checkpoints:
            say(f"checkpoint  {checkpoints[-1][1]}  (AutoModelForCausalLM.from_pretrained)")
        for line in before_and_after(self.folder.shown_samples()):
            say(line)


def before_and_after(shown: Sequence[Mapping[str, Any]], most: int = 3) -> list[str]:
    """The first and the last samples shown of up to `most` prompts, side by side."""
    steps = sorted({sample["step"] for sample in shown})
    if len(steps) < 2:
        return []
    first = [sample for sample in shown if sample["step"] == steps[0]]
    last = {sample.get("prompt"): sample for sample in shown if sample["step"] == steps[-1]}
    lines = [f"samples     before (step {steps[0]}) and after (step {steps[-1]})"]
    for before in [sample for sample in first if sample.get("prompt") in last][:most]:
        lines.append(f"  {shorten(str(before.get('prompt', '')), 200)!r}")
        for label, sample in (("before", before), ("after ", last[before.get("prompt")])):
            reward = f"  reward {sample['reward']:g}" if "reward" in sample else ""
            lines.append(f"    {label} {shorten(str(sample.get('response', '')), 200)!r}{reward}")
    return lines
