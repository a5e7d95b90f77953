"""Recipes as people start them, on a task small enough for a CPU: what a run leaves in its folder."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from fsdprl.records import read_lines
from fsdprl.tasks.addition import problems
from scripts.make_tiny_model import write_tiny_model
from tests.ranks.jobs import Job
from tests.warm import WarmJob

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
GRADE = "tests.recipes.grades:"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
TALKING = ("grpo_tools", "grpo_self_correct")
PROMPTED = (
    "grpo",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "dapo",
    "ppo",
    "distill",
    "gkd",
    *TALKING,
)


@cache
def task(folder: Path) -> dict[str, str]:
    """An untrained model, questions, pairs in which digits are better than letters, and their labels."""
    asked = [problem.prompt for problem in problems(2, 240, seed=0)]
    better = [f"{17 * i % 1000}" for i in range(240)]
    worse = ["abcdefghijkl"[i % 9 :][:3] for i in range(240)]
    rows: dict[str, list[dict[str, Any]]] = {
        "prompts": [
            {"prompt": p, "answer": str(i), "completion": c}
            for i, (p, c) in enumerate(zip(asked, better, strict=True))
        ],
        "pairs": [
            {"prompt": p, "chosen": c, "rejected": r}
            for p, c, r in zip(asked, better, worse, strict=True)
        ],
        "labels": [
            {"prompt": p, "completion": (worse, better)[i % 2][i], "label": i % 2}
            for i, p in enumerate(asked)
        ],
        "texts": [{"prompt": p, "completion": c} for p, c in zip(asked, better, strict=True)],
    }
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    write_tiny_model(folder / "model")
    write_tiny_model(folder / "other", seed=1)
    return {name: str(folder / f"{name}.jsonl") for name in rows} | {
        name: str(folder / name) for name in ("model", "other")
    }


def words(name: str, files: dict[str, str], out: Path, **flags: Any) -> list[str]:
    """The command line of a recipe on the task."""
    fields: dict[str, Any] = {"model": files["model"], "run.out": out, "steps": 2}
    fields["run.plots"] = "False"  # twice the work of such a run
    if name in PROMPTED:
        fields |= {
            "data": files["prompts"], "rewards": f"{GRADE}digits", "prompts-per-step": 8, "group-size": 4,
            "max-new-tokens": 6, "max-prompt-length": 40, "eval-prompts": 8, "eval-every": 2,
        }  # fmt: skip
    else:
        data = {"kto": "labels", "sft": "texts"}.get(name, "pairs")
        fields |= {"data": files[data], "max-length": 64, "batch-size": 8, "eval-every": 2}
    fields |= {"teacher": files["other"]} if name in ("distill", "gkd") else {}
    if name == "gkd":
        del fields["group-size"]
    fields |= {"max-new-tokens": 50, "question": "sure?"} if name == "grpo_self_correct" else {}
    fields |= {"when-short": "train", "max-rounds": 2} if name == "dapo" else {}
    typed = [str(ROOT / "recipes" / f"{name}.py")]
    for flag, value in (fields | {k.replace("_", "-"): v for k, v in flags.items()}).items():
        many = isinstance(value, tuple)
        typed += [f"--{flag}", *map(str, value if many else (value,))]
    return typed


def start(typed: list[str], ranks: int = 0) -> Job:
    return Job(typed, ranks=ranks, PYTHONPATH=PATHS, HF_HUB_OFFLINE="1")


def run(
    name: str,
    files: dict[str, str],
    out: Path,
    *,
    ranks: int = 0,
    timeout_s: float = 280.0,
    **flags: Any,
) -> list[dict[str, Any]]:
    """Run a recipe to its end and return its metrics, one dict a step. With vLLM it starts as people start it."""
    typed = words(name, files, out, **flags)
    cold = flags.get("engine.kind") == "vllm"
    end = (start(typed, ranks) if cold else WarmJob(typed, ranks=ranks)).end(timeout_s)
    assert end.code == 0, end.err[-3000:]
    return read_lines(out / "metrics.jsonl")


def series(metrics: list[dict[str, Any]], name: str) -> list[float]:
    """A metric over the steps that have it."""
    return [step[name] for step in metrics if name in step]
