"""What a person sees: a live display on a terminal, one plain line a step anywhere else."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fsdprl.redaction import redacted

# Label and the metrics that may fill it, first one found.
HEADLINE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("critic/score/mean", "reward/mean", "reward")),
    ("length", ("response_length/mean", "length/mean")),
    ("truncated", ("response_length/truncated", "truncated")),
    ("loss", ("actor/pg_loss", "actor/loss", "loss", "critic/loss")),
    ("accuracy", ("actor/acc", "acc")),
    ("kl", ("actor/kl_loss", "actor/ppo_kl", "kl")),
    ("clipped", ("actor/pg_clipfrac",)),
    ("entropy", ("actor/entropy",)),
    ("grad norm", ("actor/grad_norm", "critic/grad_norm", "grad_norm")),
    ("tok/s", ("e2e_tps",)),
)
NOT_PHASES = ("timing/all", "timing/controller_overhead")


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The few numbers worth a glance, by short label; held-out metrics keep their names."""
    found = {}
    for label, names in HEADLINE:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            found[label] = metrics[name]
    held_out = {name: metrics[name] for name in metrics if name.startswith(("eval/", "val/"))}
    return found | held_out


def phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, longest first. Verbs without a phase (rows.free, ...) are in the file only."""
    seconds = {
        name.removeprefix("timing/"): value
        for name, value in metrics.items()
        if name.startswith("timing/")
        and name not in NOT_PHASES
        and not name.startswith("timing/non_overlap_")
        and "." not in name
    }
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def short(value: float) -> str:
    """At most four significant digits."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.2e}"


def clock(seconds: float) -> str:
    """1:02:03, 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain_line(step: int, steps: int, metrics: Mapping[str, float], left_s: float) -> str:
    """One step in one line, for files and pipes."""
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    parts += [f"{label} {short(value)}" for label, value in headline(metrics).items()]
    took = ", ".join(f"{name} {short(value)}" for name, value in list(phases(metrics).items())[:4])
    whole = metrics.get("timing/all", 0.0)
    overhead = metrics.get("timing/controller_overhead", 0.0)
    parts.append(
        f"{short(whole)} s ({took}, controller {overhead:.1%})" if took else f"{short(whole)} s"
    )
    return " | ".join([*parts, f"left {clock(left_s)}"])


class Console:
    """Shows the steps of a run. `pause` frees the terminal for a debugger."""

    def __init__(self, log_every: int = 1, stream: TextIO | None = None) -> None:
        """A live display where `stream` (standard output) is a terminal."""
        self.log_every = log_every
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            expand=True,
        )
        self._metrics: Mapping[str, float] = {}
        self._samples: Sequence[Mapping[str, Any]] = ()
        self._begun = time.monotonic()
        self._first = self._steps = 0
        self._warned: set[str] = set()

    def start(self, title: str, first: int, steps: int) -> None:
        """Steps first .. steps - 1 are about to run."""
        self._first, self._steps, self._begun = first, steps, time.monotonic()
        self._task = self._progress.add_task(title, completed=first, total=steps, left="?")
        if self._rich.is_terminal:
            live = Live(get_renderable=self._render, console=self._rich, refresh_per_second=2)
            self._live = live
            live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""
        self._metrics = metrics
        left = self.left_s(step + 1)
        if self._live is not None:
            self._progress.update(self._task, completed=step + 1, left=clock(left))
        elif step % self.log_every == 0 or step + 1 == self._steps:
            self.say(plain_line(step, self._steps, metrics, left))

    def left_s(self, done: int) -> float:
        """Seconds to the end at the pace so far."""
        pace = (time.monotonic() - self._begun) / max(done - self._first, 1)
        return pace * (self._steps - done)

    def show(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Keep these samples in the live display."""
        self._samples = samples

    def say(self, text: str) -> None:
        """A line above the live display."""
        self._rich.print(Text(redacted(text)))

    def warn(self, text: str) -> None:
        """A warning, once however often it comes."""
        if text not in self._warned:
            self._warned.add(text)
            self._rich.print(Text(f"warning: {redacted(text)}", style="yellow"))

    def pause(self, paused: bool = True) -> None:
        """Leave the terminal alone, for a debugger; False takes it back."""
        if self._live is None:
            return
        if paused:
            self._live.stop()
        else:
            self._live.start()

    def stop(self) -> None:
        """The steps are over; lines still print."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Group:
        numbers = Table.grid(padding=(0, 2))
        for label, value in headline(self._metrics).items():
            numbers.add_row(label, Text(short(value), style="bold"))
        times = Table.grid(padding=(0, 2))
        whole = self._metrics.get("timing/all", 0.0)
        for name, value in phases(self._metrics).items():
            share = f"{value / whole:.0%}" if whole else ""
            times.add_row(name, f"{short(value)} s", Text(share, style="dim"))
        if whole:
            times.add_row("step", f"{short(whole)} s", "")
            overhead = self._metrics.get("timing/controller_overhead", 0.0)
            times.add_row("controller", "", Text(f"{overhead:.1%}", style="dim"))
        columns = Table.grid(padding=(0, 4))
        columns.add_row(numbers, times)
        shown = [
            Panel(
                Text(sample_text(sample)),
                title=f"reward {short(float(sample['reward']))}" if "reward" in sample else None,
                title_align="left",
            )
            for sample in self._samples[:2]
        ]
        return Group(self._progress, columns, *shown)


def sample_text(sample: Mapping[str, Any], most: int = 400) -> str:
    """Prompt and answer, shortened to fit a glance."""
    asked, said = (str(sample.get(name, "")) for name in ("prompt", "response"))
    return redacted(f"{shorten(asked, most)}\n-> {shorten(said, most)}", prose=True)


def shorten(text: str, most: int) -> str:
    """Beginning and end of a text of more than `most` characters."""
    text = text.strip()
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
