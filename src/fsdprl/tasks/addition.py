"""Addition with the working written out, and demonstrations that forget to carry.

    python -m fsdprl.tasks.addition --out runs/addition

A prompt is `49+97=`, its gold answer `16,14#146`: the column sums, lowest digit first, each with
the carry it received, then the result. The demonstrations drop each carry with some probability
(`16,13#36` drops both), so a model fine-tuned on them knows the format and is right only where
nothing carries: 30 % of two-digit problems. Reinforcement learning has to discover the carry.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdprl.sample import Sample


@dataclass(frozen=True)
class Problem:
    """One sum of two numbers of at most `digits` digits."""

    first: int
    second: int
    digits: int = 2

    @property
    def prompt(self) -> str:
        """The question with zero-padded operands, as `07+95=`."""
        return f"{self.first:0{self.digits}d}+{self.second:0{self.digits}d}="

    @property
    def answer(self) -> str:
        """The sum, without padding."""
        return str(self.first + self.second)

    def carries(self) -> int:
        """How many columns sum to ten or more when every carry is kept."""
        return sum(len(column) == 2 for column in self.working().partition("#")[0].split(","))

    def working(self, keep: Iterable[bool] | None = None) -> str:
        """Column sums, lowest digit first, then `#` and the result.

        `keep` says of each carry in turn whether it is kept (default: all of them). A dropped
        carry is missing from the next column, or from the front of the result.
        """
        kept = iter(keep) if keep is not None else None
        sums: list[int] = []
        carry = 0
        for place in range(self.digits):
            column = self.first // 10**place % 10 + self.second // 10**place % 10 + carry
            sums.append(column)
            carry = int(column >= 10 and (kept is None or next(kept)))
        digits = [carry, *(column % 10 for column in reversed(sums))]
        return f"{','.join(map(str, sums))}#{int(''.join(map(str, digits)))}"


def problems(digits: int, count: int, seed: int) -> list[Problem]:
    """`count` different problems (fewer if there are not as many) in an order drawn from `seed`."""
    scale = 10**digits
    picks = random.Random(seed).sample(range(scale * scale), min(count, scale * scale))
    return [Problem(pick // scale, pick % scale, digits) for pick in picks]


def demonstrations(
    chosen: Sequence[Problem], *, drop: float, count: int, seed: int
) -> Iterator[tuple[str, str]]:
    """`count` pairs (prompt, completion), each carry dropped with probability `drop`.

    Every pass over the problems draws the dropped carries anew and shuffles the order.
    """
    draw = random.Random(f"demonstrations {seed}")
    order: list[Problem] = []
    for _ in range(count):
        if not order:
            order = draw.sample(chosen, len(chosen))
        problem = order.pop()
        yield problem.prompt, problem.working(draw.random() >= drop for _ in range(problem.digits))


def reward(sample: Sample) -> float:
    """1.0 if the text after the first `#` is the answer and the model ended by itself."""
    result = sample.response.partition("#")[2]
    return float(not sample.truncated and result == str(sample.answer))


def write_dataset(
    out: Path,
    *,
    digits: int = 2,
    drop: float = 0.8,
    count: int = 10_000,
    demonstration_count: int = 9_000,
    seed: int = 0,
) -> dict[str, Path]:
    """Write `sft.jsonl`, `train.jsonl` and `heldout.jsonl` into `out`; returns their paths.

    A tenth of the problems is held out of both phases. Prompts and completions are chat messages.
    """
    chosen = problems(digits, count, seed)
    heldout, train = chosen[: len(chosen) // 10], chosen[len(chosen) // 10 :]
    demonstrated = demonstrations(train, drop=drop, count=demonstration_count, seed=seed)
    rows: dict[str, Iterable[dict[str, Any]]] = {
        "sft": (
            {"prompt": _message("user", prompt), "completion": _message("assistant", completion)}
            for prompt, completion in demonstrated
        ),
        "train": map(_question, train),
        "heldout": map(_question, heldout),
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = {name: out / f"{name}.jsonl" for name in rows}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return paths


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _question(problem: Problem) -> dict[str, Any]:
    return {
        "prompt": _message("user", problem.prompt),
        "answer": problem.answer,
        "carries": problem.carries(),
    }


def main() -> None:
    """Write the three files from the command line."""
    parser = argparse.ArgumentParser(description="Write the addition task as jsonl files.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--digits", type=int, default=2, help="digits of an operand")
    parser.add_argument("--drop", type=float, default=0.8, help="probability of a dropped carry")
    parser.add_argument("--demonstrations", type=int, default=9_000, help="rows of sft.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    paths = write_dataset(
        args.out,
        digits=args.digits,
        drop=args.drop,
        demonstration_count=args.demonstrations,
        seed=args.seed,
    )
    for path in paths.values():
        print(path)


if __name__ == "__main__":
    main()
