"""Every recipe learns: on a tiny untrained model its reward, accuracy or loss moves further than chance can."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.make_tiny_model import write_tiny_model
from tests.recipes.processes import GRADE, RECIPES, TALKING, run, series, task

pytestmark = [pytest.mark.learn, pytest.mark.timeout(600)]

SAMPLING = {"steps": 20, "prompts-per-step": 16, "group-size": 8, "lr": 3e-3, "eval-every": 0}
GROUPED = ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return task(tmp_path_factory.mktemp("task"))


def test_every_recipe_has_a_learning_test():
    assert {
        *GROUPED,
        "dapo",
        "ppo",
        "distill",
        "gkd",
        "sft",
        "dpo",
        "kto",
        "reward_model",
        *TALKING,
    } == set(RECIPES)


def figures(what: str, *series: list[float]) -> None:
    """First and last of each series, for `pytest -s`."""
    print(what, *(f"{values[0]:.3f} -> {values[-1]:.3f}" for values in series), sep="  ")


def rises(rewards: list[float], least: float) -> None:
    """An untrained model answers with digits about 1 time in 5."""
    figures("reward", rewards)
    assert rewards[0] < 0.35, rewards
    assert sum(rewards[-3:]) / 3 > least, rewards


OWN: dict[str, dict[str, Any]] = {
    "gspo": {"clip-low": 0.02, "clip-high": 0.02},
    "reinforce_pp": {"prompts-per-step": 128, "group-size": 1},
    "dr_grpo": {"lr": 5e-3},
}


SLOW = pytest.mark.slow
"""Learning tests outside scripts/test, which runs GRPO's, PPO's and DPO's; `just learn` runs all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "grpo" else SLOW) for name in GROUPED]
)
def test_reward_rises(name: str, files: dict[str, str], tmp_path: Path):
    metrics = run(name, files, tmp_path / "run", **(SAMPLING | OWN.get(name, {})))
    rises(series(metrics, "reward/mean"), 0.7)


@SLOW
def test_dapo_with_dynamic_sampling(files: dict[str, str], tmp_path: Path):
    """Judged by the first character: groups that agree are replaced, more of them as the model learns."""
    metrics = run(
        "dapo", files, tmp_path / "run", **SAMPLING, rewards=f"{GRADE}begins_with_a_digit", minibatches=2,
        warmup_steps=0, max_rounds=4, overlong_buffer=2, overlong_penalty=0.2, overlong_filter="False",
    )  # fmt: skip
    rises(series(metrics, "begins_with_a_digit_rewards/mean"), 0.7)
    filtered = series(metrics, "train/filtered_share")
    rounds = series(metrics, "train/num_gen_batches")
    figures("share filtered, rounds of generation", filtered, rounds)
    assert len(filtered) == len(rounds) == 20 and all(0 <= share <= 1 for share in filtered)
    assert filtered[-1] > filtered[0] and max(rounds) > 1 and max(rounds) <= 4


def test_ppo_and_its_critic(files: dict[str, str], tmp_path: Path):
    """The first character decides: behind it a critic can know the return. One that learns nothing explains nothing."""
    flags = SAMPLING | {
        "group-size": 4, "prompts-per-step": 32, "minibatches": 4, "passes": 2, "value-clip": 0.0, "lam": 1.0,
        "rewards": f"{GRADE}begins_with_a_digit", "critic-only-steps": 8, "kl-coef": 0.01,
    }  # fmt: skip
    metrics = run("ppo", files, tmp_path / "run", **flags | {"critic-lr": 2e-3})
    without = run("ppo", files, tmp_path / "without", **flags | {"steps": 12, "critic-lr": 0.0})
    scores = series(metrics, "critic/score/mean")
    answered = series(without, "critic/score/mean")
    assert answered[:8] == scores[:8]  # the actor does not move yet
    rises([max(scores[:8]), *scores[8:]], 0.7)
    learnt, ablated = (series(m, "critic/vf_explained_var") for m in (metrics, without))
    figures("explained variance, and without a critic that learns", learnt, ablated)
    assert max(ablated) < 0.1 and max(learnt[4:]) > 0.3, (learnt, ablated)
    assert learnt[0] == ablated[0]
    assert all(whole >= sum(parts) for whole, *parts in map(colocated, metrics))


def colocated(step: dict[str, float]) -> list[float]:
    """timing/all, and what it must at least be the sum of where all models share the devices."""
    phases = (
        "rollout", "old_log_p", "update", "reference_model", "resharding_to_train", "resharding_to_infer",
        "critic_model", "update_critic",
    )  # fmt: skip
    assert step["timing/rollout"] > 0 and step["timing/reference_model"] > 0
    beside = [step[f"timing/non_overlap_{name}"] for name in ("rule_reward", "reference_model")]
    return [step["timing/all"], *(step.get(f"timing/{name}", 0.0) for name in phases), max(beside)]


@pytest.mark.parametrize("name", ["dpo", pytest.param("reward_model", marks=SLOW)])
def test_preference_accuracy_rises(name: str, files: dict[str, str], tmp_path: Path):
    metrics = run(
        name,
        files,
        tmp_path / "run",
        steps=15,
        lr=1e-3,
        warmup_steps=0,
        eval_every=15,
        eval_share=0.2,
    )
    before, after = metrics[0], metrics[-1]
    figures("accuracy, margin", *(series(metrics, f"val/{it}") for it in ("acc", "margin")))
    assert after["val/acc"] > 0.95 and after["val/loss"] < before["val/loss"] - 0.2
    assert after["val/margin"] > before["val/margin"] + 0.5


@SLOW
def test_kto_accuracy_rises(files: dict[str, str], tmp_path: Path):
    metrics = run(
        "kto",
        files,
        tmp_path / "run",
        steps=15,
        lr=1e-3,
        warmup_steps=0,
        eval_every=15,
        eval_share=0.2,
    )
    figures("accuracy, loss", *(series(metrics, f"val/{it}") for it in ("acc", "loss")))
    assert metrics[-1]["val/acc"] > 0.95 and metrics[-1]["val/loss"] < metrics[0]["val/loss"] - 0.1


@SLOW
def test_sft_loss_falls(files: dict[str, str], tmp_path: Path):
    metrics = run(
        "sft",
        files,
        tmp_path / "run",
        steps=25,
        lr=3e-3,
        warmup_steps=2,
        eval_every=25,
        eval_share=0.2,
    )
    figures("held-out loss", series(metrics, "val/loss"))
    assert metrics[-1]["val/loss"] < metrics[0]["val/loss"] - 1.0


@SLOW
def test_distillation_lowers_the_kl_to_its_teacher(files: dict[str, str], tmp_path: Path):
    teach(files["other"], tmp_path / "teacher")
    flags = SAMPLING | {"group-size": 4, "eval-every": 20, "teacher": tmp_path / "teacher"}
    metrics = run("distill", files, tmp_path / "run", **flags)
    before, after = metrics[0]["eval/reverse_kl"], metrics[-1]["eval/reverse_kl"]
    figures("reverse KL", series(metrics, "eval/reverse_kl"))
    assert before > 1.0 and after < 0.6 * before
    assert (
        metrics[-1]["eval/reward"] > metrics[0]["eval/reward"] + 0.3
    )  # the teacher answers in digits


@SLOW
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_gkd_lowers_the_divergence_from_its_teacher(
    share: float, files: dict[str, str], tmp_path: Path
):
    """On the data's answers alone and on the student's alone; the teacher answers in digits."""
    teach(files["other"], tmp_path / "teacher")
    flags = {
        "steps": 30, "prompts-per-step": 64, "lr": 3e-3, "eval-every": 30, "teacher": tmp_path / "teacher",
        "student-share": share, "top-k": 8,
    }  # fmt: skip
    metrics = run("gkd", files, tmp_path / "run", **flags)
    before, after = metrics[0], metrics[-1]
    figures(
        "divergence, reward", *(series(metrics, f"eval/{it}") for it in ("divergence", "reward"))
    )
    assert after["eval/divergence"] < 0.5 * before["eval/divergence"]
    assert after["eval/reward"] > before["eval/reward"] + 0.3


def teach(path: str, out: Path) -> None:
    """A teacher that has seen three digits and the end, from the untrained model at `path`."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(40):
        texts = [
            tokenizer.apply_chat_template(
                [
                    {"role": "user", "content": f"{i}+{step}="},
                    {"role": "assistant", "content": f"{i * 7 % 1000:03d}"},
                ],
                tokenize=False,
            )
            for i in range(step, step + 160, 10)
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


@SLOW
def test_a_second_answer_is_corrected(files: dict[str, str], tmp_path: Path):
    metrics = run(
        "grpo_self_correct",
        files,
        tmp_path / "run",
        **SAMPLING | {"max-new-tokens": 60, "gain": 0.5},
    )
    assert min(series(metrics, "turns/mean")) > 1.0, series(metrics, "turns/mean")
    rises(series(metrics, "second/mean"), 0.7)


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'


@SLOW
def test_the_calculator_is_used(tmp_path: Path):
    """A model that has seen tools used now and then, and guesses made as often as not, learns to use them always."""
    draw = random.Random(0)
    asked = [f"{draw.randrange(10, 100)}+{draw.randrange(10, 100)}" for _ in range(3000)]
    sums = [str(sum(map(int, question.split("+")))) for question in asked]
    rows = []
    for question, answer in zip(asked, sums, strict=True):
        if draw.random() < 0.4:
            said = [("assistant", question.join(CALL)), ("tool", answer), ("assistant", answer)]
        else:
            said = [("assistant", str(draw.randrange(20, 199)))]
        turns = [("user", question), *said]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": q, "answer": a} for q, a in zip(asked, sums, strict=True)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    write_tiny_model(tmp_path / "model", words=CALL)
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("texts", "prompts")} | {
        "model": str(tmp_path / "model")
    }
    shown = run(
        "sft", files, tmp_path / "sft", steps=350, batch_size=64, lr=3e-3, warmup_steps=20, eval_every=0,
        eval_share=0.0, max_length=128,
    )  # fmt: skip
    files["model"] = str(next((tmp_path / "sft" / "checkpoints").glob("step-*")))
    flags = SAMPLING | {"steps": 12, "lr": 5e-4, "max-new-tokens": 60, "rewards": "numeric"}
    metrics = run("grpo_tools", files, tmp_path / "run", **flags)
    reward, calls = series(metrics, "reward/mean"), series(metrics, "tool_call_num/mean")
    figures("calls of the calculator, then reward", calls, reward)
    assert calls[0] < 0.65 and reward[0] < 0.6, (reward, calls, shown[-1])
    assert sum(reward[-3:]) / 3 > 0.85 and sum(calls[-3:]) / 3 > 0.85, (reward, calls)
