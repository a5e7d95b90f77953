#!/usr/bin/env python3
"""Greedy answers of two checkpoints to the same held-out addition problems, side by side.

    python scripts/compare_checkpoints.py BEFORE AFTER heldout.jsonl

Uses nothing of fsdprl but the task: both folders are plain Hugging Face checkpoints.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from fsdprl.sample import Sample
from fsdprl.tasks.addition import reward


def greedy_answers(checkpoint: str, rows: list[dict[str, Any]]) -> list[str]:
    """The text a model ends each row's prompt with, at temperature 0."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        ids = model.generate(**prompts, do_sample=False, max_new_tokens=12)
    return tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Print the table and both checkpoints' share of right answers."""
    parser = argparse.ArgumentParser(description="Greedy answers before and after training.")
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("data", type=Path)
    parser.add_argument("--show", type=int, default=3, help="problems with a carry to print")
    parser.add_argument("--count", type=int, default=500, help="problems to answer")
    args = parser.parse_args()
    disable_progress_bar()
    rows = [json.loads(line) for line in args.data.read_text().splitlines()[: args.count]]
    answers = [greedy_answers(checkpoint, rows) for checkpoint in (args.before, args.after)]
    rewards = [
        [
            reward(Sample(prompt="", response=text, answer=row["answer"]))
            for text, row in zip(texts, rows, strict=True)
        ]
        for texts in answers
    ]
    table = Table("problem", "before", "after", "answer")
    carrying = [i for i, row in enumerate(rows) if row["carries"]]
    for i in carrying[: args.show]:
        question = rows[i]["prompt"][-1]["content"]
        table.add_row(question, answers[0][i], answers[1][i], rows[i]["answer"])
    console = Console()
    console.print(table)
    before, after = (100 * sum(found) / len(found) for found in rewards)
    console.print(
        f"right on {len(rows)} held-out problems: {before:.1f} % before, {after:.1f} % after"
    )


if __name__ == "__main__":
    main()
