"""The algorithms that recipes/README.md gives as changed lines of grpo.py: each is made so, and runs."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.recipes import stage
from tests.recipes.stage import Played, recipe
from tests.recipes.test_flags import base, files

__all__ = ["files"]  # a fixture
TEXT = (stage.ROOT / "recipes" / "README.md").read_text()
VARIANTS = dict(re.findall(r"^\*\*([\w. +-]+)\*\*.*?```diff\n(.*?)```", TEXT, re.M | re.S))
SOURCE = dict.fromkeys(VARIANTS, "grpo") | {"GiGPO": "grpo_tools"}
SURROGATES = {
    "SAPO": {"sapo_loss"},
    "TOPR": {"topr_loss"},
    "RAFT++": {"surrogate"},
    "Kimi k1.5": {"mirror_descent_loss"},
    "FIPO": {"fipo_surrogate"},
    "REAL": {"real_loss"},
    "CHORD": {"surrogate", "chord_loss"},
    "GiGPO": {"surrogate"},
    "Lite PPO": {"surrogate"},
    "Forking tokens": {"surrogate"},
    "OPD-RL": {"surrogate"},
    "RLSD": {"surrogate"},
    "SDAR": {"surrogate", "sdar_loss"},
    "GDPO": {"surrogate"},
}


def changed(source: str, diff: str) -> str:
    """The source with the lines of a diff; those that go must be there exactly once."""
    old: list[str] = []
    new: list[str] = []

    def flush(source: str) -> str:
        if not old and not new:
            return source
        text = "".join(line + "\n" for line in old)
        if source.count(text) == 1:
            return source.replace(text, "".join(line + "\n" for line in new))
        for line in old[:-1]:  # they need not be neighbours
            assert source.count(line + "\n") == 1, line
            source = source.replace(line + "\n", "")
        assert source.count(old[-1] + "\n") == 1, old[-1]
        return source.replace(old[-1] + "\n", "".join(line + "\n" for line in new))

    for line in diff.splitlines():
        if line[0] == "-" and new:
            source = flush(source)
            old, new = [], []
        (old if line[0] == "-" else new).append(line[1:])
    return flush(source)


def module(name: str, folder: Path) -> ModuleType:
    """The variant as a recipe of its own."""
    path = folder / f"{re.sub(r'[^a-z]', '', name.lower())}.py"
    source = (stage.ROOT / "recipes" / f"{SOURCE[name]}.py").read_text()
    path.write_text(changed(source, VARIANTS[name]))
    spec = importlib.util.spec_from_file_location(f"variant_{path.stem}", path)
    assert spec and spec.loader
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def act(files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def run(name: str, **fields: Any) -> Played:
        made = module(name, tmp_path) if name in VARIANTS else recipe(name)
        monkeypatch.setattr(stage, "recipe", lambda _: made)
        own = {"CHORD": {"expert_data": files["chats"]}, "OPD-RL": {"teacher": files["other"]}}
        more: dict[str, Any] = own.get(name, {})
        of = SOURCE.get(name, name)
        return stage.play(of, monkeypatch, **(base(of, files) | more | fields))

    return run


def updates(played: Played) -> list[dict[str, Any]]:
    """What the only rank got in each training pass."""
    passes = [payload for verb, payload in played.calls if verb == "model.forward_backward"]
    return [each[0] for each in passes if each[0]["train"]]


def test_every_variant_is_known():
    assert VARIANTS.keys() == SURROGATES.keys()


@pytest.mark.parametrize("name", SURROGATES)
def test_it_trains_with_its_own_loss(act, name: str):
    plain = act(SOURCE[name]).weights["policy"]
    played = act(name)
    assert played.error == "" and updates(played)
    sent = [loss["qualname"] for payload in updates(played) for loss in payload["losses"]]
    assert set(sent) == SURROGATES[name]
    assert played.weights["policy"] not in (plain, 0.1)


def test_weights_are_what_each_paper_says(act):
    first = {name: updates(act(name, minibatches=1))[0] for name in SURROGATES}
    for name in ("TOPR", "Kimi k1.5", "REAL"):
        weight = first[name]["samples"]["weight"]
        assert set(weight) == {1 / len(weight)}, name
    tokens = [
        round(1 / (w * len(first["SAPO"]["rows"])), 6) for w in first["SAPO"]["samples"]["weight"]
    ]
    assert all(1 <= count <= 8 and count == int(count) for count in tokens) and len(set(tokens)) > 1
    assert len(set(first["FIPO"]["samples"]["weight"])) == 1
    own, expert = updates(act("CHORD", minibatches=1))[:2]
    assert expert["losses"][0]["qualname"] == "chord_loss" and len(expert["rows"]) == 6
    mean = {
        name: payload["samples"]["weight"][0]
        for name, payload in (("own", own), ("expert", expert))
    }
    plain = updates(act("grpo", minibatches=1))[0]["samples"]["weight"][0]
    assert mean["own"] == pytest.approx(0.9 * plain) and mean["expert"] > 0


def test_advantages_are_what_each_paper_says(act):
    raft = updates(act("RAFT++", minibatches=1))[0]["samples"]
    assert set(raft["advantage"]) == {1.0}
    real = updates(act("REAL", minibatches=1))[0]["samples"]
    assert len(set(real["unit"])) == 6 and len(real["unit"]) == 24 and "advantage" not in real
    assert set(real["correct"]) == {True, False}
    gdpo = torch.tensor(
        updates(act("GDPO", minibatches=1))[0]["samples"]["advantage"], dtype=torch.float64
    )
    assert len(gdpo) == 24 and abs(float(gdpo.mean())) < 1e-9
    assert float(gdpo.std()) == pytest.approx(1.0, abs=1e-3)
    lite, played = updates(act("Lite PPO", minibatches=1))[0]["samples"], act("grpo", minibatches=1)
    grouped = torch.tensor(lite["advantage"], dtype=torch.float64).view(-1, 4)
    plain = torch.tensor(updates(played)[0]["samples"]["advantage"], dtype=torch.float64).view(
        -1, 4
    )
    assert grouped.mean(1).abs().max() < 1e-9
    ratio = grouped / plain
    assert (ratio.std(1) < 1e-6).all() and ratio.mean(1).std() > 0.01
    kimi = updates(act("Kimi k1.5", minibatches=1))[0]["samples"]["advantage"]
    assert max(map(abs, kimi)) < max(
        map(abs, updates(act("SAPO", minibatches=1))[0]["samples"]["advantage"])
    )


def test_a_teacher_grades_every_token_beside_the_reward(act):
    played = act("OPD-RL", minibatches=1, steps=1, teacher_coef=0.3)
    payload, store = updates(played)[0], played.stage.workers[0].store.rows
    assert len(payload["rows"]) == 24 and "advantage" not in payload["samples"]
    found = [store[row].columns for row in payload["rows"]]
    bases = set()
    for columns in found:
        base = columns["advantage"] - 0.3 * (columns["logp_teacher"] - columns["logp_old"])
        assert base.max() - base.min() < 1e-6
        bases.add(round(float(base[0]), 6))
    assert len(bases) > 3


def test_turns_are_compared_beside_their_conversations(act):
    """Where every conversation is one turn, the turn's advantage is its conversation's: both add up."""
    once = act("GiGPO", minibatches=1, steps=1)
    (payload,), store = updates(once), once.stage.workers[0].store.rows
    assert "advantage" not in payload["samples"] and once.values("turns/shared") == [1.0]
    plain = act("grpo_tools", minibatches=1, steps=1)
    first, other = min(store), min(plain.stage.workers[0].store.rows)
    (asked,) = updates(plain)
    said = dict(zip(asked["rows"], asked["samples"]["advantage"], strict=True))
    assert 0 < len(said) <= len(payload["rows"])
    for row in payload["rows"]:
        twice = 2 * said.get(row - first + other, 0.0)
        assert store[row].columns["advantage"].tolist() == pytest.approx(
            [twice] * store[row].loss_tokens, abs=1e-5
        )


def test_the_policy_says_how_far_once_it_was_told_the_solution(act):
    """Every token's advantage is its answer's, by up to a tenth more or less; told nothing new, it is the answer's."""
    played = act("RLSD", minibatches=1, steps=1)
    payload, store = updates(played)[0], played.stage.workers[0].store.rows
    (plain,) = updates(act("grpo", minibatches=1, steps=1))
    answers, moved = plain["samples"]["advantage"], 0.0
    for row, answer in zip(payload["rows"], answers, strict=True):
        columns = store[row].columns
        weight = columns["advantage"] / answer
        gain = (columns["logp_told"] - columns["logp_old"]).exp()
        expected = 0.5 + 0.5 * (gain if answer > 0 else 1 / gain).clamp(0.8, 1.2)
        assert weight.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        moved = max(moved, float((weight - 1).abs().max()))
    assert 0.01 < moved <= 0.1 + 1e-6


def test_the_policy_follows_itself_once_it_was_told_more(act):
    """Also in groups that agree, which teach GRPO nothing; every token has the log-prob of the policy that was told."""
    played = act("SDAR", minibatches=1, steps=1, rewards=("tests.recipes.grades:always",))
    (payload,), store = updates(played), played.stage.workers[0].store.rows
    assert len(payload["rows"]) == 24 and set(payload["samples"]["advantage"]) == {0.0}
    assert played.weights["policy"] != 0.1
    told = {loss["qualname"]: loss["kwargs"] for loss in payload["losses"]}
    assert told["sdar_loss"] == {"coef": 0.1, "gate_beta": 5.0}
    rows = [store[row].columns for row in payload["rows"]]
    gaps = torch.cat([columns["logp_teacher"] - columns["logp_old"] for columns in rows]).double()
    assert gaps.min() < -0.01 < 0.01 < gaps.max()
    expected = {"teacher_gap": gaps, "teacher_gate": torch.sigmoid(5 * gaps)}
    for name, values in expected.items():
        assert played.values(f"actor/{name}")[0] == pytest.approx(float(values.mean()), rel=1e-5)
