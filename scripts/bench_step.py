#!/usr/bin/env python3
"""Seconds of one GRPO step of the quickstart: recipes/grpo.py against a plain single-file loop.

    scripts/quickstart && python scripts/bench_step.py

The plain loop is `PlainLoop` below: one process, transformers' model, a hand-written sampling loop
over its key-value cache, right-padded batches, torch.optim, the reward in line. It imports nothing
of fsdprl and does the same algorithm: 64 prompts x 8 answers of at most 10 tokens, groups that
agree left out, old log-probs, 2 minibatches. Everyone gets all cores, or --threads of them.

The loop and the recipe on one and on two ranks take turns, each in a process of its own; the
number is the median step after the first five. Ratios are taken within a round, minutes apart at
most, and their median over the rounds counts: machines drift by more than what is looked for.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, GROUP, MINIBATCHES, NEW_TOKENS = 64, 8, 2, 10
LR, CLIP_LOW, CLIP_HIGH, MAX_NORM = 3e-4, 0.2, 0.28, 1.0
SKIP = 5


class PlainLoop:
    """GRPO as one would write it for one process and one task."""

    def __init__(self, model: str, data: Path, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(seed)
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        self.end = self.tokenizer.eos_token_id
        self.rows = [json.loads(line) for line in data.read_text().splitlines()]
        self.draw = random.Random(seed)

    def step(self) -> float:
        """Sample, grade, learn; returns the mean reward."""
        torch = self.torch
        rows = [row for row in self.draw.sample(self.rows, PROMPTS) for _ in range(GROUP)]
        texts = [
            self.tokenizer.apply_chat_template(
                row["prompt"], tokenize=False, add_generation_prompt=True
            )
            for row in rows[::GROUP]
        ]
        prompts = torch.tensor(self.tokenizer(texts).input_ids)  # this task: all equally long
        prompts = prompts.repeat_interleave(GROUP, dim=0)
        answers = self.generate(prompts)
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        ended = (answers == self.end).any(1)
        reward = torch.tensor(
            [
                float(done and text.partition("#")[2] == row["answer"])
                for row, text, done in zip(rows, texts, ended.tolist(), strict=True)
            ]
        )
        grouped = reward.view(PROMPTS, GROUP)
        spread = grouped.std(1, keepdim=True)
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()
        kept = (spread > 0).expand_as(grouped).flatten()
        ids = torch.cat([prompts, answers], 1)[kept]
        # Up to and with the end token; without one, all of the answer.
        after_end = (answers == self.end).cumsum(1) - (answers == self.end).long()
        self.learn(ids, (after_end == 0)[kept], advantage[kept])
        return float(reward.mean())

    def generate(self, prompts: Any) -> Any:
        """Sampled answers [N, NEW_TOKENS], the end token repeated after the end."""
        torch = self.torch
        answers = torch.full((len(prompts), NEW_TOKENS), self.end)
        done = torch.zeros(len(prompts), dtype=torch.bool)
        fed, cache = prompts, None
        with torch.inference_mode():
            for i in range(NEW_TOKENS):
                out = self.model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                picked = torch.multinomial(out.logits[:, -1].softmax(-1), 1).squeeze(1)
                answers[:, i] = torch.where(done, self.end, picked)
                done |= picked == self.end
                fed = answers[:, i : i + 1]
                if done.all():
                    break
        return answers

    def logp(self, ids: Any) -> Any:
        """Log-probability [N, NEW_TOKENS] of each answer token; padding lies to the right."""
        logits = self.model(ids, use_cache=False, logits_to_keep=NEW_TOKENS + 1).logits[:, :-1]
        wanted = ids[:, -NEW_TOKENS:]
        return -self.torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), wanted, reduction="none"
        )

    def learn(self, ids: Any, mask: Any, advantage: Any) -> None:
        """Clipped surrogate, mean over tokens, one optimizer step a minibatch."""
        torch = self.torch
        if not len(ids):
            return
        with torch.no_grad():
            old = self.logp(ids)
        for part in torch.randperm(len(ids)).chunk(MINIBATCHES):
            ratio = (self.logp(ids[part]) - old[part]).exp()
            gain = advantage[part, None]
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -torch.minimum(ratio * gain, clipped * gain)
            ((loss * mask[part]).sum() / mask[part].sum()).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()


def plain_seconds(args: argparse.Namespace) -> list[float]:
    """Seconds of each step of the plain loop, in this process."""
    loop = PlainLoop(args.model, args.data, seed=0)
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def in_new_process(args: argparse.Namespace) -> list[float]:
    """plain_seconds in a process of its own."""
    command = [sys.executable, __file__, "--plain", "--model", args.model]
    command += ["--data", str(args.data), "--steps", str(args.steps)]
    return json.loads(run(command, args).splitlines()[-1])


def recipe_seconds(args: argparse.Namespace, ranks: int, *switches: str) -> list[float]:
    """timing/all of each step of recipes/grpo.py on so many ranks, with these flags more."""
    start = [sys.executable]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "model": args.model,
            "data": args.data,
            "rewards": "fsdprl.tasks.addition:reward",
            "steps": args.steps,
            "prompts-per-step": PROMPTS,
            "group-size": GROUP,
            "minibatches": MINIBATCHES,
            "max-prompt-length": 32,
            "max-new-tokens": NEW_TOKENS,
            "lr": LR,
            "clip-low": CLIP_LOW,
            "clip-high": CLIP_HIGH,
            "max-grad-norm": MAX_NORM,
            "eval-every": 0,
            "dtype": "float32",
            "engine.kind": "transformers",
            "run.out": Path(folder) / "run",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words += switches
        run([*start, str(ROOT / "recipes" / "grpo.py"), *words], args)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    if args.phases:
        names = [name for name in steps[-1] if name.startswith("timing/")]
        for name in names:
            print(f"    {name:32} {median([step.get(name, 0.0) for step in steps]):.4f}")
    return [step["timing/all"] for step in steps]


def run(command: list[str], args: argparse.Namespace) -> str:
    """Standard output of a command that must succeed."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if args.threads:
        env["OMP_NUM_THREADS"] = str(args.threads)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1800)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def cost_of_determinism(args: argparse.Namespace) -> None:
    """The recipe on one rank and on two, with and without --run.deterministic, by turns. Processor time, which other
    work on the machine hardly touches."""
    for ranks in (1, 2):
        without, with_it = [], []
        for _ in range(args.rounds):
            without.append(processor_seconds(args, ranks))
            with_it.append(processor_seconds(args, ranks, "--run.deterministic"))
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: {min(without):.3f} processor seconds a step, deterministic "
            f"{min(with_it):.3f}, ratio {ratio(with_it, without)}",
            flush=True,
        )


def processor_seconds(args: argparse.Namespace, ranks: int, *switches: str) -> float:
    """Of a step, in all processes: a run of all steps less one of the first few, with their start and end."""
    spent = []
    for steps in (args.steps, SKIP):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        recipe_seconds(args, ranks, *switches, "--steps", str(steps))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return (spent[0] - spent[1]) / (args.steps - SKIP)


def median(seconds: list[float]) -> float:
    """Without the first steps, which allocate and warm up, and the last, which saves."""
    return statistics.median(seconds[SKIP:-1])


def main() -> None:
    """Measure from the command line."""
    quickstart = ROOT / "runs" / "quickstart"
    parser = argparse.ArgumentParser(description="Seconds of one GRPO step.")
    parser.add_argument("--model", default=str(quickstart / "sft/checkpoints/step-000700"))
    parser.add_argument("--data", type=Path, default=quickstart / "data/train.jsonl")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of a process; 0: all cores")
    parser.add_argument("--phases", action="store_true", help="print the recipe's phases as well")
    parser.add_argument(
        "--deterministic", action="store_true", help="only: what --run.deterministic costs"
    )
    parser.add_argument("--plain", action="store_true", help="only the plain loop, as JSON")
    args = parser.parse_args()
    if not (Path(args.model).exists() and args.data.exists()):
        parser.error(f"{args.model} or {args.data} is missing: run scripts/quickstart first")
    if args.steps < SKIP + 2:
        parser.error(f"--steps {args.steps}: at least {SKIP + 2}, the first {SKIP} do not count")
    if args.plain:
        print(json.dumps(plain_seconds(args)))
        return
    if args.deterministic:
        cost_of_determinism(args)
        return
    plain, one, two = [], [], []
    for _ in range(args.rounds):
        plain.append(median(in_new_process(args)))
        one.append(median(recipe_seconds(args, 1)))
        two.append(median(recipe_seconds(args, 2)))
        print(f"plain {plain[-1]:.3f} s, one rank {one[-1]:.3f} s, two ranks {two[-1]:.3f} s")
    print(f"one rank / plain loop: {ratio(one, plain)} (wanted: at most 1.3)")
    print(f"two ranks / one rank: {ratio(two, one)} (wanted: below 1)")


def ratio(seconds: list[float], other: list[float]) -> str:
    """The median of the rounds' ratios, and the least and the most."""
    each = [a / b for a, b in zip(seconds, other, strict=True)]
    return f"{statistics.median(each):.2f}, {min(each):.2f} to {max(each):.2f}"


if __name__ == "__main__":
    main()
