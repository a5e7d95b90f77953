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

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdprl import determinism, dryrun
from fsdprl.console import Console, clock, shorten
from fsdprl.controller import current
from fsdprl.data.chat import template_text
from fsdprl.errors import UserError
from fsdprl.metrics import StepMetrics, counted, jsonable, throughput, timings
from fsdprl.moments import reached
from fsdprl.options import RunOptions
from fsdprl.plan import Plan
from fsdprl.plots import Plots
from fsdprl.records import JsonLines, read_lines
from fsdprl.run_checkpoints import Tracked
from fsdprl.run_folder import RunFolder, finished_message, given_checkpoint, profile_window
from fsdprl.run_hosts import Hosts
from fsdprl.run_saves import Best, Saves
from fsdprl.tracker import Trackers

if TYPE_CHECKING:
    from fsdprl.batch import Batch

UNHARMED = ("interrupted", "exit", "user", "error", "nonfinite")
"""Causes of an end with which all ranks still answer."""
SHOWN = ("prompt", "response", "answer", "reward", "length", "truncated")


class Run:
    """One run in one folder. Make it first in `main`: it refuses a wrong folder before models load."""

    def __init__(self, options: RunOptions) -> None:
        """Claims the folder, or continues it. Exits with 0 if it holds this very run, finished.

        UserError: the folder holds another run or is in use, a flag of RunOptions is out of range, or
        the disk cannot hold its checkpoints.
        """
        self.options, self.controller = options, current()
        self.controller.may_skip = options.skip_nonfinite
        self.controller.log_entropy = options.log_entropy
        self.profile, self.profiling = profile_window(options.profile), False
        self.console = Console(options.log_every)
        self.tracked = Tracked()
        self.metrics = StepMetrics()
        self.step, self.stopping = 0, False
        self.plan: Plan | None = None
        template = self.controller.config.get("chat_template")
        texts = {"chat_template.jinja": template_text(template)} if template else {}
        if self.controller.flags.dry_run:
            return
        self.folder = RunFolder(
            options,
            config=self.controller.config,
            recipe=self.controller.recipe,
            world_size=self.controller.world_size,
            restarted=self.controller.world.restart > 0,
            say=self.console.say,
            warn=self.console.warn,
        )
        if self.folder.finished:
            self.console.say(finished_message(options))
            raise SystemExit(0)
        if options.deterministic:
            self.console.say(determinism.COST)
        self.hosts = Hosts(self.path, self.console.say)
        self.lines = JsonLines(self.folder.metrics, self.console.warn)
        self.shown = JsonLines(self.folder.completions / "shown.jsonl", self.console.warn)
        self.trackers = Trackers(options.track, self.path, self.console.warn)
        self.plots = Plots(self.path, self.console.warn, wanted=options.plots)
        self.saves = Saves(
            self.folder.checkpoints,
            self.tracked,
            self.console.warn,
            keep=options.keep,
            best=Best(options.keep_best, options.save_every),
            texts=texts,
        )
        self.saves.committed = self.plots.draw
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
            leaving = self._end_step(plan)
            self.step += 1
            if leaving:
                raise leaving
        self.controller.step = self.step
        self._settle(changed=False)
        self.saves.poll(wait=True)
        while self.saves.owed:  # no later step will try again
            self._save_now(self.step)

    def stop(self) -> None:
        """Make the current step the last one: it is finished, saved, and the run counts as finished."""
        self.stopping = True

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Numbers of the current step. A name logged again in a step is averaged (*/max and */min keep
        the extreme); after the last step, numbers go to a line of their own."""
        self.metrics.add(metrics)
        if not self.controller.flags.dry_run:
            self.saves.poll()  # the earlier a checkpoint counts, the less a kill can cost

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
            checkpoint = self.folder.restore[1].resolve()  # ranks elsewhere know it by this name
            with self.hosts.holding(checkpoint):
                self.tracked.load(checkpoint, self.folder.forget)
            self.controller.redrawn = self.tracked.redrawn
            self.controller.skipped = self.tracked.progress.get("skipped", 0)
            stopped = self.tracked.progress.get("stopped") == plan.steps
            self.stopping = stopped and checkpoint != given_checkpoint(self.options.resume)
        if self.profile and self.profile[0] >= plan.steps:
            self.console.warn(
                f"--run.profile {self.options.profile}: no trace will be made: the last step is {plan.steps - 1}"
            )
        self.saves.recall(read_lines(self.folder.metrics) if self.options.keep_best else ())
        self.folder.note(**self.controller.facts)
        self.trackers.start(self.folder.config, self.folder.facts["id"], self.restored)
        self.began = time.monotonic()
        self.controller.timeline.drain()  # loading is no step
        self.started = time.perf_counter()
        self.console.start(self.path.name, self.restored, plan.steps)

    def _begin_step(self) -> None:
        self.controller.step = self.step
        reached("step", rank=0, step=self.step)
        self._settle(changed=not self.tracked.steady)
        self.folder.set_status("running", phase="training", **self._progress(self.step))
        first, last = self.profile or (1, 0)
        if first <= self.step <= last and not self.profiling:  # a resumed run may meet its middle
            self.controller.call("profile_start", {}).wait()
            self.profiling = True

    def _settle(self, *, changed: bool) -> None:
        """Between two steps: from here on a signal saves the states of now, where it had to wait before."""
        self._note_progress()
        self.tracked.remember()
        self.controller.changed = changed
        if self.controller.leaving:
            self.controller.changed = False  # nothing has begun yet, whatever the step will change
            raise self.controller.leaving

    def _end_step(self, plan: Plan) -> BaseException | None:
        """Write the step down; returns what a signal left for the run to raise, which is then saved."""
        self.controller.changed = True  # a signal waits until the next step's states are remembered
        every, done = self.options.save_every, self.step + 1
        last = self.stopping or done == plan.steps
        if self.profiling and self.profile and (last or self.step == self.profile[1]):
            out = str((self.path / "profile").resolve())
            self.controller.call("profile_stop", {"out": out}).wait()
            self.profiling = False
            self.console.say(f"profile of steps {self.profile[0]}:{self.step}: {out}")
        last = last or self.controller.leaving is not None
        due = self.saves.owed or last or (every > 0 and done % every == 0)
        begun = due and self._begin_save(done, background=not last)
        self.controller.phases.note_peak()
        written = self._write_metrics(sync=begun)
        self.saves.record(written)
        leaving = self.controller.leaving
        if leaving and not due:  # it came while the step's line was written
            self._save_now(done)
        if leaving:
            self.saves.poll(wait=True)
        return leaving

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

    def _publish(
        self, step: int, metrics: Mapping[str, float], *, sync: bool, last: bool = False
    ) -> bool:
        numbers = jsonable(metrics)
        self.trackers.log(step, numbers)
        written = self.lines.append({"step": step} | numbers, sync=sync)
        self.saves.note(step, numbers, last=last)
        return written

    def _note_progress(self) -> None:
        """What of the run itself later steps depend on, for the next checkpoint."""
        assert self.plan
        progress = {"skipped": self.controller.skipped, "stopped": self.stopping * self.plan.steps}
        self.tracked.progress = {name: count for name, count in progress.items() if count}

    def _begin_save(self, done: int, *, background: bool, remembered: bool = False) -> bool:
        """Have everything tracked copied and written; whether that began."""
        background = background and self.options.background_save
        if not remembered:
            self._note_progress()
        with self.controller.timeline.span("save"):
            self.folder.set_status("running", phase="save", **self._progress(done))
            return self.saves.begin(done, background=background, remembered=remembered)

    def _save_now(self, done: int, *, remembered: bool = False) -> None:
        """A checkpoint out of turn, after a signal or a full disk."""
        if self._begin_save(done, background=False, remembered=remembered):
            self.saves.record(self.lines.flush(sync=True))

    def _progress(self, step: int) -> dict[str, Any]:
        return {"step": step, "steps": self.plan.steps if self.plan else None}

    # ---- the end ---------------------------------------------------------------------------

    def _exit(self, cause: Mapping[str, Any]) -> None:
        """Called once by launch, when `main` is over or has failed; the ranks may be gone."""
        self.console.stop()
        if cause["kind"] == "finished" and self.plan is not None:
            try:
                return self._finish(self.plan)
            except UserError as error:
                self._exit({"kind": "user", "message": str(error)})
                raise
        state = "interrupted" if cause["kind"] in ("interrupted", "exit") else "failed"
        facts = {name: cause.get(name) for name in ("kind", "rank", "host")} | self._progress(
            self.step
        )
        facts["phase"] = cause.get("phase") or ("training" if self.plan else "starting")
        self.folder.set_status(state, **facts, cause=cause["message"], saved=self._saved())
        if cause.get("stacks"):
            self.console.say(f"stacks of all ranks: {self.folder.write_stacks(cause['stacks'])}")
        if cause["kind"] in UNHARMED:
            self._save_on_the_way_out(new=cause["kind"] == "interrupted")
            saved = self._saved()
            self.folder.set_status(state, **facts, cause=cause["message"], saved=saved)
        if cause["kind"] == "interrupted":
            self.console.say(f"the same command continues from step {self._saved() or 0}")
        self.plots.kill()
        self.trackers.close(3.0)

    def _saved(self) -> int | None:
        """Steps in the newest checkpoint: where the same command goes on. None: at the beginning."""
        found = self.folder.checkpoints.all()
        return found[-1][0] if found else None

    def _save_on_the_way_out(self, *, new: bool) -> None:
        """Finish the checkpoint under way. new: and save what the step under way began with, if no update has
        touched it and it is not saved.

        The ranks are alive (a dead one is another cause), and save after what they are doing; launch
        ends the process if that takes too long, and then the last checkpoint stands.
        """
        try:
            self.saves.poll(wait=True)
            untouched = self.plan is not None and not self.controller.changed
            if new and untouched and self._saved() != self.step > 0:
                assert self.plan
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
            last = self.stopping or self.step == plan.steps
            written = self._publish(self.step, self.metrics.merged(), sync=True, last=last)
            while not written:  # no later step will try again
                written = self.lines.flush(sync=True)
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
