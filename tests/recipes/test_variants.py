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
VARIANTS = dict(re.findall(r"^\*\*([\w. +]+)\*\*.*?```diff\n(.*?)```", TEXT, re.M | re.S))
SURROGATES = {
    "SAPO": {"sapo_loss"},
    "TOPR": {"topr_loss"},
    "RAFT++": {"surrogate"},
    "Kimi k1.5": {"mirror_descent_loss"},
    "FIPO": {"fipo_surrogate"},
    "REAL": {"real_loss"},
    "CHORD": {"surrogate", "chord_loss"},
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
    path.write_text(changed((stage.ROOT / "recipes" / "grpo.py").read_text(), VARIANTS[name]))
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
        more: dict[str, Any] = {"expert_data": files["chats"]} if name == "CHORD" else {}
        return stage.play("grpo", monkeypatch, **(base("grpo", files) | more | fields))

    return run


def updates(played: Played) -> list[dict[str, Any]]:
    """What the only rank got in each training pass."""
    passes = [payload for verb, payload in played.calls if verb == "model.forward_backward"]
    return [each[0] for each in passes if each[0]["train"]]


def test_every_variant_is_known():
    assert VARIANTS.keys() == SURROGATES.keys()


@pytest.mark.parametrize("name", SURROGATES)
def test_it_trains_with_its_own_loss(act, name: str):
    plain = act("grpo").weights["policy"]
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
    kimi = updates(act("Kimi k1.5", minibatches=1))[0]["samples"]["advantage"]
    assert max(map(abs, kimi)) < max(
        map(abs, updates(act("SAPO", minibatches=1))[0]["samples"]["advantage"])
    )
