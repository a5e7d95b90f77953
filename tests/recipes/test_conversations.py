"""sampler.rollout as recipes call it: seeds, masks, columns and rewards on any number of ranks."""

from functools import partial
from typing import Any

import pytest

import fsdprl as rl
from fsdprl import controller as controller_module
from fsdprl.batch import Batch
from tests.recipes.stage import Stage, play
from tests.recipes.test_flags import GRADE, base, files

__all__ = ["files"]  # a fixture


def asks(conversation, *, most: int = 3):
    """A question after each turn, and a reward for the third."""
    if conversation.turn == most:
        return 2.0
    conversation.counts["tool_calls"] += conversation.turn
    conversation.counts["asked"] += 1
    return {"role": "user", "content": "and?"}


def gives_up_on_some(conversation):
    if conversation.answer == "1":
        raise rl.UnscoredError("down")
    return 1.0


def counts(conversation, *, name: str):
    conversation.counts[name] += 1


@pytest.fixture
def roll(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """Conversations of 2 for each of 5 prompts."""

    def run(env: Any, ranks: int = 1, **options: Any) -> tuple[Batch, Stage]:
        stage = Stage("grpo", ranks)
        monkeypatch.setattr(controller_module, "_current", stage)
        policy = rl.Policy(files["model"])
        sampler = rl.Sampler(policy, max_prompt_length=60, max_new_tokens=150)
        sampler.pull()
        prompts = rl.Prompts(files["prompts"], tokenizer_path=files["model"], answer_key="answer")
        return sampler.rollout(env, prompts.first(5), n=2, **options), stage

    return run


def shown(batch: Batch) -> dict[str, list[float]]:
    return {
        name: values.nan_to_num(-1).tolist()
        for name, values in batch.columns.items()
        if name != "unit"
    }


def test_the_same_on_any_number_of_ranks(roll):
    one, _ = roll(asks)
    for ranks in (2, 3):
        assert shown(roll(asks, ranks)[0]) == shown(one)
    assert one["turns"].max() == 3 and (one["loss_tokens"] < one["length"]).any()
    assert one["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for turns, calls, asked, reward in zip(
        *(one[name].tolist() for name in ("turns", "tool_calls", "asked", "env_reward")),
        strict=True,
    ):
        heard = turns if turns < 3 else 2
        assert asked == heard and calls == sum(range(heard + 1)) and (reward == 2.0) == (turns == 3)


def test_the_reward_of_the_environment(roll):
    batch, _ = roll(partial(asks, most=1), 2)
    rewards = rl.Rewards(("env", f"{GRADE}always"), (0.5, 1.0))
    assert rewards(batch).tolist() == pytest.approx([1.1] * 10)
    means = {k: v for k, v in rewards.metrics(batch).items() if not k.startswith("completions/")}
    expected = {"env_rewards/mean": 2.0, "always_rewards/mean": 0.1}
    expected |= {"rewards/env/mean": 2.0, "rewards/always/mean": 0.1}
    assert means == pytest.approx(expected | {"rewards/env/std": 0.0, "rewards/always/std": 0.0})
    with pytest.raises(rl.UserError, match="had no environment"):
        del batch.columns["env_reward"]
        rewards(batch)


def test_a_turn_is_judged_by_itself(roll):
    batch, _ = roll(asks, 2)
    rewards = rl.Rewards((f"{GRADE}letters",))
    first, last = rewards(batch, turn=0), rewards(batch)
    several = batch["turns"] > 1
    assert (first != last)[several].any() and (first == last)[~several].all()


def test_conversations_that_lost_their_environment_are_masked(roll):
    with pytest.raises(
        rl.UserError, match=r"failed in 2 of 10 .*--turns.max-failed-share 0.05.*down"
    ):
        roll(gives_up_on_some, 2)
    batch, stage = roll(gives_up_on_some, 2, turns=rl.TurnOptions(max_failed_share=0.3))
    rewards = rl.Rewards(("env",), (), rl.RewardOptions(max_failed_share=0.3))
    assert rewards(batch).tolist() == [1.0] * 10
    assert batch["masked"].tolist() == [False, False, True, True, *[False] * 6]
    assert stage.timeline.drain()[1]["reward/env_failed"] == 2
    rules = rl.Rewards((f"{GRADE}letters",), (), rl.RewardOptions(max_failed_share=0.3))
    rules(batch)  # which could judge what was said, but not what it is worth
    assert batch["masked"].tolist() == [False, False, True, True, *[False] * 6]


def test_held_out_prompts_are_answered_in_conversations(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    played = play(
        "grpo_self_correct", monkeypatch, **base("grpo_self_correct", files) | {"eval_every": 2}
    )
    assert played.values("eval/turns") and min(played.values("eval/turns")) > 1


def test_prompts_know_of_the_recipes_tools(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    played = play("grpo_tools", monkeypatch, **base("grpo_tools", files), tools=("calculator",))
    (first, *_) = [payload for verb, payload in played.calls if verb == "engine.rollout"]
    (part,) = first
    assert [tool["function"]["name"] for tool in part["tools"]] == ["calculator"]


def test_mistakes(roll):
    for name in [*roll(asks)[0].columns, "reward", "weight"]:
        if name not in ("asked", "tool_calls", "tool_errors"):
            with pytest.raises(rl.UserError, match=f"counts '{name}': there is such a column"):
                roll(partial(counts, name=name))
    with pytest.raises(rl.UserError, match=r"--turns\.max-turns 0"):
        roll(asks, turns=rl.TurnOptions(max_turns=0))
    with pytest.raises(rl.UserError, match="cannot travel by name"):
        roll(lambda conversation: None)
