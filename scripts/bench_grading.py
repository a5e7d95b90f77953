"""Throughput of math-verify in reward processes, and whether they agree with grading in this process.

    python scripts/bench_grading.py ../shared/data/deepmath_sample.jsonl

Answers are the file's gold answers and mutations of them: the same in other words (boxed, in a sentence, after ####)
and wrong ones (another row's answer, one more). Each is graded by 1 and by 2 processes and here; scores must be equal,
none may be missing, and the memory of the reward processes must not grow with what they have graded. Answers on which
math-verify itself does not come to an end (a power with a million digits, say) are lost in a reward process to its
deadline, listed, and not graded here, where nothing would end them.
"""

import argparse
import contextlib
import time
from pathlib import Path

from fsdprl.data.mixture import read_as
from fsdprl.data.rows import open_rows
from fsdprl.functions import function_ref
from fsdprl.grading import Grader
from fsdprl.options import RewardOptions
from fsdprl.rewards import math_accuracy
from fsdprl.sample import Sample

FORMS = {
    "boxed": "So the answer is \\boxed{{{gold}}}.",
    "sentence": "Thinking done.</think> The answer is ${gold}$.",
    "marked": "Work.\n#### {gold}",
    "another": "\\boxed{{{other}}}",
    "one more": "\\boxed{{{gold} + 1}}",
}


def answers(path: str) -> list[Sample]:
    """Every form of every row's gold answer, for that row."""
    rows = read_as(open_rows(path), "prompt")
    golds = [str(rows[index]["answer"]).strip("$ ") for index in range(len(rows))]
    made = []
    for index, gold in enumerate(golds):
        other = golds[(index + 1) % len(golds)]
        for name, form in FORMS.items():
            text = form.format(gold=gold, other=other)
            made.append(Sample("", text, gold, meta={"form": name}, row=len(made)))
    return made


def resident_mb(grader: Grader) -> list[int]:
    """Resident memory of each reward process."""
    found = []
    for child in grader._children:
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
            found.append(pages * 4096 >> 20)
    return found


def graded(
    samples: list[Sample], workers: int
) -> tuple[list[float | None], list[int], float, list[list[int]]]:
    """Scores, ordinals of overdue answers, answers a second, and the processes' memory after each half."""
    ref = function_ref(math_accuracy)
    with Grader(RewardOptions(workers=workers, timeout_s=10.0)) as grader:
        grader.warm_up(ref)
        began = time.perf_counter()
        half = len(samples) // 2
        first = grader.grade(ref, samples[:half])
        memory = [resident_mb(grader)]
        second = grader.grade(ref, samples[half:])
        memory.append(resident_mb(grader))
        seconds = time.perf_counter() - began
    overdue = [f.index for f in first.failures] + [half + f.index for f in second.failures]
    return first.scores + second.scores, overdue, len(samples) / seconds, memory


def graded_here(samples: list[Sample], without: set[int]) -> list[float | None]:
    """Scores of this process; None for the ordinals in `without`."""
    kept = [index for index in range(len(samples)) if index not in without]
    scores: list[float | None] = [None] * len(samples)
    with Grader(RewardOptions(), debug=True) as grader:
        found = grader.grade(function_ref(math_accuracy), [samples[index] for index in kept]).scores
    for index, score in zip(kept, found, strict=True):
        scores[index] = score
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", help="rows with prompts and gold answers; FILE#n takes n of them")
    samples = answers(parser.parse_args().data)
    print(f"{len(samples)} answers")
    by_workers, lost = {}, set()
    for workers in (1, 2):
        scores, overdue, rate, memory = graded(samples, workers)
        by_workers[workers] = scores
        lost.update(overdue)
        print(f"{workers} process(es): {rate:.0f} answers/s, resident MB {memory}")
        for index in overdue:
            print(f"  overdue: {samples[index].response!r} for {samples[index].answer!r}")
    began = time.perf_counter()
    here = graded_here(samples, lost)
    print(f"in this process: {len(samples) / (time.perf_counter() - began):.0f} answers/s")
    for workers, scores in by_workers.items():
        pairs = enumerate(zip(scores, here, strict=True))
        differ = [i for i, (a, b) in pairs if a != b and i not in lost]
        print(f"{workers} process(es) and this one differ on {len(differ)} answers {differ[:5]}")
    for name in FORMS:
        some = [
            score
            for sample, score in zip(samples, here, strict=True)
            if sample.meta["form"] == name
        ]
        read = [score for score in some if score is not None]
        print(
            f"{name:9} right {sum(read) / max(1, len(read)):.4f} of {len(read)}, unreadable gold {some.count(None)}"
        )


if __name__ == "__main__":
    main()
