"""plots/*.png from metrics.jsonl, drawn by a child process. Run as `python -m fsdprl.plots`, this is that child."""

import queue
import re
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdprl.records import read_lines
from fsdprl.sidecar import Sidecar, messages

# File, title, unit of the axis, which metrics. The first file with data is the one shown to the user.
FIGURES: tuple[tuple[str, str, str], ...] = (
    (
        "reward",
        "reward",
        r"(critic/(score|rewards)/mean|reward/mean|reward|eval/.*|.*_rewards/mean|val/(?!loss).*)",
    ),
    ("loss", "loss", r"((actor|critic)/(\w*loss|acc)|loss|val/loss)"),
    ("length", "tokens", r"(response_length|prompt_length)/(mean|max)"),
    ("policy", "", r"actor/(entropy|ppo_kl|kl_loss|pg_clipfrac|grad_norm)"),
    ("timing", "seconds", r"timing/(?!controller_overhead|non_overlap).*"),
    ("throughput", "tokens per second and rank", r".*_tps"),
)


class Plots:
    """The plots of a run folder. Never blocks, never raises."""

    def __init__(self, folder: Path, warn: Callable[[str], None], *, wanted: bool = True) -> None:
        """wanted: as --run.plots; else `draw` does nothing."""
        self.folder, self._warn, self._wanted = folder, warn, wanted
        self._sidecar: Sidecar | None = None

    def draw(self) -> None:
        """Ask for all plots anew."""
        if not self._wanted:
            return
        if self._sidecar is None:
            log = self.folder / "plots.log"
            self._sidecar = Sidecar("plots", "fsdprl.plots", log, self._warn)
        self._sidecar.send({"folder": str(self.folder.resolve())})

    def close(self, timeout_s: float = 60.0) -> Path | None:
        """Wait for the drawing; the plot to look at first, if there is one."""
        if self._sidecar is not None:
            self._sidecar.close(timeout_s)
        drawn = (self.folder / "plots" / f"{name}.png" for name, _, _ in FIGURES)
        return next((path for path in drawn if path.exists()), None)

    def kill(self) -> None:
        """The run has failed: no more drawing."""
        if self._sidecar is not None:
            self._sidecar.kill()


def draw(folder: Path) -> list[Path]:
    """Draw every figure that has at least two points. Returns the files."""
    figures: Any = import_module("matplotlib.figure")  # an extra
    rows = read_lines(folder / "metrics.jsonl")
    names = list(dict.fromkeys(name for row in rows for name in row))
    (folder / "plots").mkdir(exist_ok=True)
    drawn: list[Path] = []
    for title, unit, pattern in FIGURES:
        curves = {name: curve(rows, name) for name in names if re.fullmatch(pattern, name)}
        curves = distinct({name: it for name, it in curves.items() if len(it[0]) > 1})
        if not curves:
            continue
        figure = figures.Figure(figsize=(7, 4))
        figure.subplots_adjust(left=0.11, right=0.98, top=0.97, bottom=0.12)
        axes = figure.subplots()
        for name, (steps, values) in curves.items():
            marker = "o" if len(steps) < len(rows) / 2 else None
            axes.plot(steps, values, label=name, marker=marker, linewidth=1.2, markersize=3)
        axes.set_xlabel("step")
        axes.set_ylabel(unit or title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        target = folder / "plots" / f"{title}.png"
        part = target.with_name(f".{title}.part.png")
        figure.savefig(part, dpi=120)
        part.replace(target)
        drawn.append(target)
    return drawn


def curve(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps that have a metric, and its values."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def distinct(curves: dict[str, Any]) -> dict[str, Any]:
    """The curves without those that are another one's, number by number, under a second name."""
    first: dict[str, str] = {}
    for name, points in curves.items():
        first.setdefault(repr(points), name)
    return {name: curves[name] for name in first.values()}


def main() -> None:
    """Redraw when asked to; requests that came in during a drawing are one redraw."""
    asked: queue.Queue[str | None] = queue.Queue()

    def listen() -> None:
        for message in messages():
            asked.put(message["folder"])
        asked.put(None)

    threading.Thread(target=listen, daemon=True).start()
    waiting: list[str | None] = [""]
    while waiting[-1] is not None:
        waiting = [asked.get()]
        while not asked.empty():
            waiting.append(asked.get())
        if folder := waiting[0]:
            try:
                draw(Path(folder))
            except ImportError:
                sys.exit("matplotlib is not installed: pip install 'fsdprl[plots]'")


if __name__ == "__main__":
    main()
