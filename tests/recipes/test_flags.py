"""Every flag of every recipe does something: it changes metrics, weights or how a run ends, or reaches a verb."""

import dataclasses
import functools
import json
import shutil
from typing import Any

import pytest

import fsdprl as rl
from tests import tiny
from tests.recipes.stage import Played, play, recipe

GRADE = "tests.recipes.grades:"
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
VARIANTS = ("dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", *TALKING)
PAIRED = ("dpo", "reward_model")
ALL = (*PROMPTED, *PAIRED, "kto", "sft")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints and data that the flags name."""
    folder = tmp_path_factory.mktemp("flags")
    prompts = [
        {
            "prompt": f"ask {i} {'x' * (i % 7)}",
            "question": f"what is {i}?",
            "answer": str(i),
            "gold": str(i // 2),
            "completion": f"it is {i}",
            "said": f"so {i // 3}",
        }
        for i in range(40)
    ]
    pairs = [
        {
            "prompt": f"say {i}",
            "question": f"tell {i}",
            "chosen": f"yes {i}" + "!" * (i % 5),
            "rejected": f"no {i}",
            "better": f"good {i}",
            "worse": f"bad {i}",
            "gap": i % 3 - 1,
        }
        for i in range(40)
    ]
    labels = [
        {
            "prompt": f"say {i}",
            "question": f"tell {i}",
            "completion": f"yes {i}" + "!" * (i % 5),
            "said": f"oh {i}",
            "label": i % 3 != 0,
            "good": i % 2 == 0,
        }
        for i in range(40)
    ]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"hi {i}"},
                {"role": "assistant", "content": f"hello {i}"},
                {"role": "user", "content": "and"},
                {"role": "assistant", "content": "bye" + "." * (i % 4)},
            ],
            "turns": [
                {"role": "user", "content": f"why {i}"},
                {"role": "assistant", "content": "so"},
            ],
        }
        for i in range(40)
    ]
    texts = [
        {"prompt": f"hi {i}", "completion": f"hello {i}", "question": f"why {i}", "said": "so"}
        for i in range(40)
    ]
    found = {
        name: str(folder / name) for name in ("model", "other")
    }  # names that every session has
    for path in found.values():
        shutil.copytree(tiny.checkpoint("qwen3"), path)
    for name, rows in {
        "prompts": prompts,
        "pairs": pairs,
        "labels": labels,
        "chats": chats,
        "texts": texts,
    }.items():
        for kind, part in {"": rows[:30], "_more": rows[5:]}.items():
            path = folder / f"{name}{kind}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
            found[name + kind] = str(path)
    bodies = [{"text": row["prompt"], "body": row["question"]} for row in texts]
    (folder / "bodies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bodies))
    template = folder / "other.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return found | {"bodies": str(folder / "bodies.jsonl"), "template": str(template)}


def base(name: str, files: dict[str, str]) -> dict[str, Any]:
    """A run of two steps in which the weight moves visibly."""
    fields: dict[str, Any] = {
        "model": files["model"],
        "steps": 2,
        "lr": 1.0,
        "eval_every": 0,
        "eval_share": 0.2,
    }
    if name in PROMPTED:
        fields |= {
            "data": files["prompts"],
            "rewards": (f"{GRADE}begins", f"{GRADE}letters"),
            "prompts_per_step": 6,
            "group_size": 4,
            "max_new_tokens": 8,
            "max_prompt_length": 60,
            "minibatches": 2,
            "eval_prompts": 4,
        }
        if name == "dapo":
            fields |= {
                "prompts_per_round": 4,
                "when_short": "train",
                "max_rounds": 3,
                "warmup_steps": 0,
            }
        if name == "grpo_self_correct":
            fields |= {"max_new_tokens": 70, "question": "sure?"}
        if name in ("distill", "gkd"):
            fields |= {"teacher": files["other"]}
        if name == "gkd":
            del fields["group_size"], fields["minibatches"]
            fields |= {"top_k": 4}
        if name == "ppo":
            fields |= {"critic_lr": 0.2}
    else:
        data = {"kto": "labels", "sft": "chats"}.get(name, "pairs")
        fields |= {"data": files[data], "max_length": 120, "batch_size": 6, "warmup_steps": 0}
        if name == "kto":
            fields |= {"lr": 3.0}
    return fields


SAMPLED = {
    "eval_prompts": (2, {"eval_every": 2}),
    "eval_samples": (2, {"eval_every": 2}),
    "answer_key": ("gold", {"rewards": (f"{GRADE}matches",)}),
    "prompts_per_step": 5,
    "group_size": 3,
    "temperature": 0.7,
    "correction": rl.CorrectionOptions(kind="tis", cap=0.5),
    "max_prompt_length": 30,
    "long_prompts": ("drop", {"max_prompt_length": 30}),
    "max_new_tokens": 7,
    "reward_weights": (1.0, 0.5),
    "rewards": (f"{GRADE}letters",),
    "minibatches": 3,
    "passes": 2,
    "schedule": "linear",
    "clip_low": 0.02,
    "clip_high": 0.02,
    "kl_coef": 0.3,
    "entropy_coef": 0.3,
    "dual_clip": (1.3, {"lr": 3.0}),
    "follow_every": (1, {"kl_coef": 0.3}),
    "follow_share": (0.5, {"kl_coef": 0.3, "follow_every": 1}),
}
CHANGED: dict[str, Any] = {
    "eval_share": 0.3,
    "prompt_key": "question",
    "prompt_format": "raw",
    "system": "be kind",
    "steps": 3,
    "epochs": (0.5, {"steps": 0}),
    "seed": 1,
    "lr": 0.1,
    "warmup_steps": 5,
    "weight_decay": 0.5,
    "max_grad_norm": 1e-3,
    "eval_every": 1,
    "batch_size": 5,
    "schedule": "constant",
    "max_length": 34,
    "over_length": ("drop", {"max_length": 34}),
    "chosen_key": "better",
    "rejected_key": "worse",
}
OWN: dict[str, dict[str, Any]] = {
    "grpo_self_correct": {"question": "why?", "gain": 0.2, "dual_clip": (1.11, {"lr": 9.0, "clip_high": 0.1})},
    "gspo": {"clip_low": 1e-5, "clip_high": 1e-5, "dual_clip": (1.001, {"lr": 3.0})},
    "cispo": {"ratio_low": 0.99, "ratio_high": 1.01},
    "rloo": {"minibatches": (3, {}), "clip_low": (0.02, {"minibatches": 3}), "clip_high": (0.02, {"minibatches": 3})},
    "reinforce_pp": {"gamma": 0.5, "baseline": "group"},
    "distill": {
        "rewards": ((), {"eval_every": 2}), "reward_weights": ((1.0, 0.5), {"eval_every": 2}),
        "answer_key": ("gold", {"rewards": (f"{GRADE}matches",), "eval_every": 2}),
    },
    "gkd": {
        "rewards": ((), {"eval_every": 2}), "reward_weights": ((1.0, 0.5), {"eval_every": 2}),
        "answer_key": ("gold", {"rewards": (f"{GRADE}matches",), "eval_every": 2, "answer_key": "answer"}),
        "student_share": 0.0, "beta": 0.1, "top_k": 2, "completion_key": ("said", {"student_share": 0.0}),
        "sft_alpha": (0.5, {"student_share": 0.0}),
    },
    "dapo": {
        "filter_metric": f"{GRADE}letters", "pass_low": 0.6, "pass_high": 0.4, "prompts_per_round": 3,
        "max_rounds": 1, "when_short": ("error", {"max_rounds": 1}), "overlong_filter": True, "overlong_buffer": 3,
        "overlong_penalty": (0.5, {"overlong_buffer": 3}), "rollout_splits": 2,
    },
    "ppo": {
        "critic_lr": 0.1, "critic_schedule": "linear", "critic_warmup_steps": 4, "critic_only_steps": 2,
        "dual_clip": (1.25, {"lr": 3.0}), "value_clip": 1e-3, "gamma": 0.5, "lam": 0.2, "schedule": "linear",
        "kl_in": ("loss", {"kl_coef": 0.3}), "kl_target": (0.01, {"kl_coef": 0.3}),
        "kl_horizon": (20, {"kl_coef": 0.3, "kl_target": 0.01}),
    },
    "dpo": {
        "losses": ("ipo",), "loss_weights": ((0.5, 2.0), {"losses": ("sigmoid", "sft")}), "beta": 0.5,
        "label_smoothing": 0.2, "rpo_alpha": 1.0, "ld_alpha": 0.5, "f_divergence": "forward_kl",
        "f_alpha": (0.2, {"f_divergence": "alpha_divergence"}), "discopop_tau": (0.5, {"losses": ("discopop",)}),
        "bco_shift": (True, {"losses": ("bco_pair",)}), "wpo": True, "router_aux_coef": 0.5,
        "reference": "uniform", "follow_every": 1,
        "follow_share": (0.9, {"follow_every": 1}),
    },
    "reward_model": {"margin_key": "gap", "center": 0.2},
    "kto": {
        "loss": "apo_zero", "beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 2.0,
        "completion_key": "said", "label_key": "good", "follow_every": 1, "follow_share": (0.9, {"follow_every": 1}),
    },
    "sft": {
        "assistant_turns": "last", "eval_rows": (2, {"eval_every": 2}), "eval_share": (0.4, {"eval_every": 2}),
        "max_length": 62, "over_length": ("drop", {"max_length": 62}),
    },
}  # fmt: skip
REACH_A_VERB = {
    "dtype": "float32", "sharding": rl.ShardingOptions(tokens_per_microbatch=30),
    "engine": rl.EngineOptions(max_num_seqs=3), "run": rl.RunOptions(out="elsewhere"),
    "reward": rl.RewardOptions(timeout_s=5.0), "beta2": 0.5, "tools": ("python",), "max_calls": 2, "data_workers": 1,
    "turns": rl.TurnOptions(timeout_s=3.0),
}  # fmt: skip
"""Flags for the ranks and the run folder, which their own tests follow further."""


def change(name: str, field: str, files: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """Another value for a field, and what else must hold for it to matter."""
    others = {
        "model": (files["other"], {}), "teacher": (files["model"], {}), "critic": (files["other"], {}),
        "reference_model": (files["other"], {}), "reward_model": ((files["other"],), {}),
        "chat_template": (files["template"], {}),
        "data": (files["prompts_more"], {}), "eval_data": (files["prompts_more"], {"eval_every": 2}),
    }  # fmt: skip
    if name not in PROMPTED:
        data = base(name, files)["data"].replace(".jsonl", "_more.jsonl")
        others |= {"data": (data, {}), "eval_data": (data, {"eval_every": 2})}
    if name == "kto":
        pairs = {"data": files["pairs"]}
        others |= {"chosen_key": ("better", pairs), "rejected_key": ("worse", pairs)}
    if name == "sft":
        texts, bodies = {"data": files["texts"]}, {"data": files["bodies"]}
        others |= {
            "messages_key": ("turns", {}), "prompt_key": ("question", texts), "text_key": ("body", bodies),
            "completion_key": ("said", texts), "prompt_format": ("raw", texts),
        }  # fmt: skip
    known = (
        CHANGED | (SAMPLED if name in PROMPTED else {}) | REACH_A_VERB | OWN.get(name, {}) | others
    )
    value = known[field]
    listed = field in ("rewards", "losses", "reward_weights", "tools") and not (
        value and isinstance(value[-1], dict)
    )
    return (value, {}) if listed or not isinstance(value, tuple) else value


@functools.cache
def fields(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(recipe(name).Config)]


played: dict[str, Played] = {}


def cases() -> list[Any]:
    """Every field of every recipe; what a variant of GRPO has in common with it is a slow test."""
    shared = set(fields("grpo")) - {
        "minibatches",
        "clip_low",
        "clip_high",
        "dual_clip",
        "kl_coef",
        "follow_every",
        "entropy_coef",
        "group_size",
    }
    found = []
    for name in ALL:
        for field in fields(name):
            again = name in VARIANTS and field in shared
            found.append(pytest.param(name, field, marks=[pytest.mark.slow] if again else []))
    return found


@pytest.mark.parametrize(("name", "field"), cases())
def test_a_flag_does_something(
    name: str, field: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    value, context = change(name, field, files)
    plain = base(name, files) | context
    key = f"{name} {context}"
    if key not in played:
        played[key] = play(name, monkeypatch, **plain)
    before, after = played[key], play(name, monkeypatch, **(plain | {field: value}))
    if field in REACH_A_VERB:
        assert before.calls != after.calls and not after.error
    else:
        assert before.outcome != after.outcome, after.error
    assert not (before.error and after.error)


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_repeats_itself_on_any_number_of_ranks(
    name: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    fields = base(name, files) | {"eval_every": 1}
    once, again = (play(name, monkeypatch, **fields) for _ in range(2))
    assert once.outcome == again.outcome and not once.error
    assert max(abs(weight - 0.1) for weight in once.weights.values()) > 1e-3  # something was learnt
    three = play(name, monkeypatch, ranks=3, **fields)
    assert three.weights == pytest.approx(once.weights, rel=1e-6)
    assert [entry[:2] for entry in three.logged] == [entry[:2] for entry in once.logged]
    for (_, metric, value), (_, _, expected) in zip(three.logged, once.logged, strict=True):
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-6), metric
