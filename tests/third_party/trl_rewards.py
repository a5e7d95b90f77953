"""Reward functions as people write them for TRL's GRPOTrainer."""

import asyncio
import re


def format_reward(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content, re.DOTALL) else 0.0 for content in contents]


def correctness_reward(prompts, completions, solution, **kwargs):
    answers = [re.findall(r"(\d+)", c[0]["content"]) for c in completions]
    return [2.0 if found and found[-1] == gold else 0.0 for found, gold in zip(answers, solution)]


def token_length_reward(completion_ids, completions, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


def only_math(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]


async def slow_judge(prompts, completions, trainer_state=None, **kwargs):
    await asyncio.sleep(0.01)
    return [float(trainer_state.global_step)] * len(completions)


def logging_reward(completions, log_metric, log_extra, **kwargs):
    words = [len(completion[0]["content"].split()) for completion in completions]
    log_extra("words", words)
    log_metric("words/mean", sum(words) / len(words))
    return [1.0] * len(completions)


def logs_too_few(completions, log_extra, **kwargs):
    log_extra("words", [1])
    return [1.0] * len(completions)
