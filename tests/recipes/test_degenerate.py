"""Batches that teach nothing, or nearly: every recipe ends finitely, counts them, and learns only from what is left."""

import math
from typing import Any

import pytest
import torch

from fsdprl.engines import Completion
from tests.recipes import stage
from tests.recipes.stage import Played, play, recipe
from tests.recipes.test_algorithms import updates
from tests.recipes.test_flags import GRADE, PROMPTED, base, files

__all__ = ["files"]  # a fixture


@pytest.fixture
def act(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """Play a recipe with its base fields and others; nothing it logs may be infinite or NaN."""

    def run(name: str, *, ranks: int = 2, **fields: Any) -> Played:
        if name == "dapo":
            fields = {"filter_metric": fields.get("rewards", (f"{GRADE}begins",))[0]} | fields
        known = recipe(name).Config.__dataclass_fields__
        fields = {field: value for field, value in fields.items() if field in known}
        played = play(name, monkeypatch, ranks=ranks, **(base(name, files) | fields))
        assert not played.error, played.error
        assert all(math.isfinite(value) for _, _, value in played.logged), played.logged
        assert all(math.isfinite(weight) for weight in played.weights.values())
        return played

    return run


GRADED = [name for name in PROMPTED if name not in ("distill", "gkd")]
BASELINED = [name for name in GRADED if name not in ("ppo", "reinforce_pp")]
"""Recipes in which a group that agrees has no advantage."""


@pytest.mark.parametrize("name", GRADED)
def test_all_rewards_equal(act, name: str):
    played = act(name, rewards=(f"{GRADE}always",))
    assert set(played.values("frac_reward_zero_std")) == {1.0}
    assert set(played.values("reward_std")) == {0.0}
    if name in BASELINED:
        assert played.weights["policy"] == pytest.approx(0.1) and not updates(played)


@pytest.mark.parametrize("name", [name for name in PROMPTED if name != "dapo"])  # which refuses it
def test_groups_of_one(act, name: str):
    played = act(name, group_size=1, minibatches=2)
    if name in GRADED:
        assert set(played.values("frac_reward_zero_std")) == {1.0}
    if name in BASELINED:
        assert played.weights["policy"] == pytest.approx(0.1) and not updates(played)


@pytest.mark.parametrize("name", PROMPTED)
def test_every_answer_truncated(act, name: str):
    more = {"overlong_filter": True, "weight_decay": 0.0} if name == "dapo" else {}
    played = act(name, max_new_tokens=1, **more)
    assert set(played.values("response_length/truncated")) == {1.0}
    if name == "dapo":
        assert played.weights["policy"] == pytest.approx(0.1)


class Mute(stage.Engine):
    """Every third answer has no token, or all of them."""

    every = 3

    def generate(self, requests: Any, sampling: Any, progress: Any) -> list[Completion]:
        said = super().generate(requests, sampling, progress)
        nothing = Completion(torch.zeros(0, dtype=torch.int32), torch.zeros(0), "stop")
        return [
            nothing if request.seed % self.every == 0 else one
            for request, one in zip(requests, said, strict=True)
        ]


class Silent(Mute):
    every = 1


@pytest.mark.parametrize("engine", [Mute, Silent])
@pytest.mark.parametrize("name", PROMPTED)
def test_empty_answers(act, name: str, engine: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage, "Engine", engine)
    played = act(name, weight_decay=0.0)
    if name in GRADED:
        shares = played.values("empty")
        assert min(shares) == 1.0 if engine is Silent else 0.0 < min(shares) <= max(shares) < 1.0
    if engine is Silent:
        assert played.weights["policy"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", PROMPTED)
def test_more_ranks_than_answers(act, name: str):
    few = {"prompts_per_step": 2, "group_size": 2, "minibatches": 1}
    if name == "dapo":
        few["prompts_per_round"] = 2
    many, one = act(name, ranks=7, **few), act(name, ranks=1, **few)
    for payload in updates(many):
        assert any(not len(rank["rows"]) for rank in payload)  # a rank has nothing to train on
    assert many.weights == pytest.approx(one.weights, rel=1e-6)
