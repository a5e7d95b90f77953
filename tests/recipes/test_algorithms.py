"""What sets a recipe apart: who is sampled, trained on, weighed and compared, on a model of one weight."""

from typing import Any

import pytest

from fsdprl.batch import Lease
from tests.recipes.stage import Played, play
from tests.recipes.test_flags import GRADE, base, files

__all__ = ["files"]  # a fixture


@pytest.fixture
def act(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """Play a recipe with its base fields and others."""

    def run(name: str, *, ranks: int = 1, **fields: Any) -> Played:
        return play(name, monkeypatch, ranks=ranks, **(base(name, files) | fields))

    return run


def updates(played: Played, model: str = "policy") -> list[list[dict]]:
    """Each training pass: one payload a rank."""
    passes = [payload for verb, payload in played.calls if verb == "model.forward_backward"]
    return [each for each in passes if each[0]["train"] and each[0]["model"] == model]


def verbs(played: Played, verb: str) -> list[Any]:
    return [payload for called, payload in played.calls if called == verb]


# ---- DAPO --------------------------------------------------------------------------------------


def test_dapo_judges_groups_by_the_metric_and_not_by_the_total(act):
    """`begins` is 0 or 1; with letters beside it the total always differs inside a group."""
    played = act("dapo", filter_metric=f"{GRADE}begins", max_rounds=1, group_size=2)
    by_total = act("dapo", filter_metric=f"{GRADE}letters", max_rounds=1, group_size=2)
    assert played.values("train/filtered_share")[0] > by_total.values("train/filtered_share")[0]
    for payload in updates(played):
        for rank in payload:
            assert all(advantage != 0 for advantage in rank["samples"]["advantage"])


def test_dapo_samples_until_there_are_enough_groups_and_carries_the_others_over(act):
    played = act(
        "dapo", prompts_per_step=4, prompts_per_round=5, max_rounds=0, steps=4, minibatches=1
    )
    rounds, carried = played.values("train/num_gen_batches"), played.values("train/carried_groups")
    assert [len(payload[0]["rows"]) for payload in updates(played)] == [16] * 4
    assert len(verbs(played, "engine.generate")) == sum(rounds) and max(carried) > 0
    # Prompts go on from where the last round stood, and none is sampled twice in a pass over them.
    asked = [tuple(p["ids"]) for call in verbs(played, "engine.generate") for p in call]
    assert len(asked) == len(set(asked))
    # What is carried over keeps the log-probs of the weights that sampled it.
    seen = [row for call in verbs(played, "model.forward") for rank in call for row in rank["rows"]]
    assert len(seen) == len(set(seen))


def test_dapo_ends_as_told_when_rounds_run_out(act):
    short = {"max_rounds": 1, "prompts_per_round": 3, "pass_low": 0.3, "pass_high": 0.6}
    assert (
        "groups differ in --filter-metric after the last round"
        in act("dapo", when_short="error", **short).error
    )
    fewer = act("dapo", when_short="train", **short)
    assert not fewer.error
    assert all(len(p[0]["rows"]) < 6 * 4 / 2 for p in updates(fewer))
    none = act("dapo", when_short="train", pass_low=2.0, max_rounds=2)
    assert (
        not none.error and not updates(none) and none.values("train/filtered_share") == [1.0, 1.0]
    )
    endless = act("dapo", max_rounds=0, pass_low=2.0)
    assert "a whole pass over --data" in endless.error


def test_dapo_leaves_truncated_answers_out_of_the_loss_but_not_of_their_group(act):
    all_in, without = (
        act("dapo", steps=1, minibatches=1),
        act("dapo", steps=1, minibatches=1, overlong_filter=True),
    )
    (full,), (part,) = updates(all_in), updates(without)
    first = [verbs(played, "engine.generate")[0][0]["first_row"][0] for played in (all_in, without)]
    rows = all_in.stage.workers[0].store.rows
    cut = [row for row in full[0]["rows"] if rows[row].info["truncated"]]
    assert cut and {row - first[0] for row in full[0]["rows"]} - {
        row - first[0] for row in cut
    } == {row - first[1] for row in part[0]["rows"]}
    advantage = dict(zip(full[0]["rows"], full[0]["samples"]["advantage"], strict=True))
    for row, value in zip(part[0]["rows"], part[0]["samples"]["advantage"], strict=True):
        assert value == advantage[row - first[1] + first[0]]  # of the whole group
    tokens = sum(len(rows[row].columns["logp_old"]) for row in set(full[0]["rows"]) - set(cut))
    assert set(part[0]["samples"]["weight"]) == {1 / tokens}


def test_dapo_penalises_length_linearly_over_the_buffer(act):
    plain = act("dapo", steps=1, rewards=(f"{GRADE}begins",), filter_metric="")
    penalised = act(
        "dapo", steps=1, rewards=(f"{GRADE}begins",), overlong_buffer=4, overlong_penalty=2.0
    )
    assert plain.values("reward/min")[0] == 0.0 and penalised.values("reward/min")[0] == -2.0
    assert plain.values("begins_rewards/mean") == penalised.values("begins_rewards/mean")
    assert "--overlong-buffer" in act("dapo", overlong_buffer=8, max_new_tokens=8).error


SLICED = {"rollout_splits": 4, "prompts_per_round": 8, "max_rounds": 0, "steps": 5}


def test_dapo_grades_and_trains_on_complete_answers_only(act, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Lease, "flush", lambda: None)  # rows that are gone stay to be looked at
    played = act("dapo", **SLICED)
    assert not played.error and not verbs(played, "engine.generate")
    rows = played.stage.workers[0].store.rows
    calls = [
        (verb, each[0]) for verb, each in played.calls if verb in ("engine.slice", "rows.grade")
    ]
    ends: dict[int, int] = {}
    for number, (verb, payload) in enumerate(calls):
        if verb == "engine.slice":
            new = [row + i for row in payload["first_row"] for i in range(payload["n"])]
            assert not set(payload["begun"]) & set(new)
            ends |= dict.fromkeys([*new, *payload["begun"]], number)
    for number, (verb, payload) in enumerate(calls):  # a row that was graded never goes on
        assert verb == "engine.slice" or all(ends[row] < number for row in payload["rows"])
    trained = [payload["rows"] for (payload,) in updates(played)]
    assert all(len(part) == 12 for part in trained) and len(trained) == 10
    learnt = [rows[row] for part in trained for row in part]
    assert all(len(row.columns["logp_old"]) == row.loss_tokens for row in learnt)
    lengths = {row.loss_tokens for row in learnt}
    assert len(lengths) > 4 and max(lengths) == 8
    assert max(played.values("partial/age")) > 1.2 and max(played.values("partial/waiting")) > 0
    assert sum(played.values("partial/continued")) == sum(
        len(payload["begun"]) for verb, payload in calls if verb == "engine.slice"
    )
    # What is counted is what was newly sampled, and each prompt once for each of its answers.
    assert played.stage.timeline.drain()[1]["tokens"] == sum(len(row.ids) for row in rows.values())


def test_dapo_in_slices_is_the_same_on_any_number_of_ranks(act):
    once, three = act("dapo", **SLICED), act("dapo", ranks=3, **SLICED)
    assert three.weights == pytest.approx(once.weights, rel=1e-6) and len(once.logged) > 100
    for (_, metric, value), (_, name, expected) in zip(three.logged, once.logged, strict=True):
        assert metric == name and value == pytest.approx(expected, rel=1e-4, abs=1e-6), metric
    held = max(len(worker.store.rows) for worker in three.stage.workers)
    assert held <= 3 * 8 * 4  # rows of steps long past are forgotten


def test_dapo_in_slices_ends_as_told_when_rounds_run_out(act):
    short = {"rollout_splits": 4, "max_rounds": 1, "prompts_per_round": 3}
    fewer = act("dapo", when_short="train", **short)
    assert not fewer.error and fewer.values("partial/waiting") == [0.0, 0.0]
    assert all(0 < len(p[0]["rows"]) < 6 * 4 / 2 for p in updates(fewer))
    assert "groups differ in --filter-metric" in act("dapo", when_short="error", **short).error
    assert "--rollout-splits 9" in act("dapo", rollout_splits=9).error
    assert "--rollout-splits 0" in act("dapo", rollout_splits=0).error


def test_dapo_wants_a_metric_that_is_a_reward_and_groups_that_can_differ(act):
    assert "--filter-metric accuracy: not among" in act("dapo", filter_metric="accuracy").error
    assert "--group-size 1" in act("dapo", group_size=1).error


# ---- weights of the variants -------------------------------------------------------------------


def test_weights_are_what_each_paper_says(act):
    fixed = updates(act("dr_grpo", minibatches=1))
    assert {w for p in fixed for w in p[0]["samples"]["weight"]} == {1 / (6 * 4 * 8)}
    mean = updates(act("rloo", minibatches=2, lr=0.0))
    assert {w for p in mean for w in p[0]["samples"]["weight"]} == {2 / (6 * 4)}
    rows = updates(act("gspo", minibatches=1))[0][0]["samples"]
    tokens = [round(1 / (weight * len(rows["weight"])), 6) for weight in rows["weight"]]
    assert all(1 <= count <= 8 and count == int(count) for count in tokens) and len(set(tokens)) > 1
    for name in ("grpo", "cispo", "dapo", "ppo", "distill", "reinforce_pp"):
        for payload in updates(
            act(name, minibatches=1, **({"passes": 1} if name == "ppo" else {}))
        ):
            assert len(set(payload[0]["samples"]["weight"])) == 1


def test_kl_in_the_reward_reaches_advantages(act):
    for name in ("rloo", "reinforce_pp"):
        without, with_kl = act(name, kl_coef=0.0), act(name, kl_coef=5.0)
        assert not verbs(without, "model.build")[1:] and len(verbs(with_kl, "model.build")) == 2
        first = [
            u[0]["samples"].get("advantage") for u in (updates(without)[-1], updates(with_kl)[-1])
        ]
        assert name == "reinforce_pp" or first[0] != first[1]
    assert act("rloo", kl_coef=0.5).values("actor/kl")[0] == pytest.approx(0.0)


def test_reinforce_pp_whitens_over_all_tokens(act):
    played = act(
        "reinforce_pp", steps=1, minibatches=1, group_size=1, prompts_per_step=12, kl_coef=0.0
    )
    worker = played.stage.workers[0]
    (payload,) = updates(played)
    values = [
        x
        for row in payload[0]["rows"]
        for x in worker.store.rows[row].columns["advantage"].tolist()
    ]
    mean = sum(values) / len(values)
    assert mean == pytest.approx(0, abs=1e-6)
    assert sum(v * v for v in values) / (len(values) - 1) == pytest.approx(1, rel=1e-4)


def test_passes_go_over_the_same_answers_in_another_order(act):
    played = act("grpo", steps=1, minibatches=2, passes=3)
    rows = [sorted(payload[0]["rows"]) for payload in updates(played)]
    assert len(rows) == 6 and len(verbs(played, "engine.generate")) == 1
    whole = [sorted(one + two) for one, two in zip(rows[::2], rows[1::2], strict=True)]
    assert whole[0] == whole[1] == whole[2] and len({tuple(one) for one in rows[::2]}) > 1
    drift = played.values("actor/ppo_kl")
    assert drift[0] == pytest.approx(0) and abs(drift[-1]) > 1e-6  # the old log-probs stay


def test_grpo_reference_follows_the_policy(act):
    still = act("grpo", kl_coef=0.1, steps=3)
    moved = act("grpo", kl_coef=0.1, steps=3, follow_every=2, follow_share=1.0)
    assert still.weights["reference"] == 0.1 and "reference" not in still.stage.run.tracked
    assert (
        moved.weights["reference"] != pytest.approx(0.1) and len(verbs(moved, "model.blend")) == 1
    )
    assert "reference" in moved.stage.run.tracked  # what it became is saved
    averaged = act("grpo", kl_coef=0.1, steps=2, follow_every=2, follow_share=0.25)
    share = (averaged.weights["reference"] - 0.1) / (averaged.weights["policy"] - 0.1)
    assert share == pytest.approx(0.25)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"]
)
def test_a_reference_follows_where_there_is_one(act, name):
    moved = act(name, kl_coef=0.1, steps=2, follow_every=1, follow_share=0.5)
    assert not moved.error and len(verbs(moved, "model.blend")) == 2
    assert "reference" in moved.stage.run.tracked
    assert (
        "--follow-every 1 has no effect without --kl-coef"
        in act(name, kl_coef=0.0, follow_every=1).error
    )
    assert "--follow-share" in act(name, kl_coef=0.1, follow_every=1, follow_share=1.5).error


def test_a_bound_of_the_ratio_is_checked_before_anything_is_sampled(act):
    for name in ("grpo", "dr_grpo", "dapo", "ppo"):
        wrong = act(name, dual_clip=1.1)
        assert "--dual-clip 1.1" in wrong.error and not verbs(wrong, "engine.generate")
    assert "--clip-low" in act("grpo", clip_low=1.5).error


# ---- PPO ---------------------------------------------------------------------------------------


def test_ppo_trains_the_critic_first_alone(act):
    played = act("ppo", steps=3, critic_only_steps=2, minibatches=2, passes=3)
    assert len(updates(played, "critic")) == 3 * 2 * 3 and len(updates(played)) == 1 * 2 * 3
    steps = [step for step, name, _ in played.logged if name == "actor/lr"]
    assert set(steps) == {2}


def test_ppo_critic_may_be_another_checkpoint(act, files):
    built = {
        p["model"]: p for p in verbs(act("ppo", critic=files["other"], kl_coef=0.1), "model.build")
    }
    assert (built["critic"]["path"], built["critic"]["kind"]) == (files["other"], "value")
    assert built["policy"]["path"] == built["reference"]["path"] == files["model"]
    assert built["reference"]["optimizer"] is None and built["critic"]["optimizer"] is not None


def test_ppo_sums_rules_and_a_reward_model_named_last(act, files):
    model = {"reward_model": (files["other"],)}
    both = act("ppo", rewards=(f"{GRADE}begins",), reward_weights=(1.0, 2.0), **model)
    alone = act("ppo", rewards=(), **model)
    rules = act("ppo", rewards=(f"{GRADE}begins",))
    first = {
        name: played.values("critic/score/mean")[0]
        for name, played in {"both": both, "alone": alone, "rules": rules}.items()
    }
    assert first["both"] == pytest.approx(first["rules"] + 2 * first["alone"])
    assert alone.values("reward_model_rewards/mean")[0] == pytest.approx(first["alone"])
    assert (
        "one each" in act("ppo", rewards=(f"{GRADE}begins",), reward_weights=(1.0,), **model).error
    )
    assert "at least one reward" in act("ppo", rewards=()).error
    two = {"reward_model": (files["other"], files["model"]), "reward_weights": (1.0, 2.0, 0.5)}
    summed = act("ppo", rewards=(f"{GRADE}begins",), **two)
    second = summed.values("reward_model_2_rewards/mean")[0]
    assert second != pytest.approx(first["alone"])
    assert summed.values("critic/score/mean")[0] == pytest.approx(first["both"] + 0.5 * second)


def test_ppo_steers_its_kl_on_the_controller(act):
    fixed = act("ppo", kl_coef=0.2, steps=4)
    assert fixed.values("actor/kl_coef") == [0.2] * 4
    steered = act("ppo", kl_coef=0.2, kl_target=1e-6, kl_horizon=100, steps=4)
    kl, coef = steered.values("actor/kl"), steered.values("actor/kl_coef")
    for seen, now, then in zip(kl, coef, coef[1:], strict=False):
        error = min(max(seen / 1e-6 - 1, -0.2), 0.2)
        assert then == pytest.approx(now * (1 + error * 24 / 100))
    assert steered.stage.run.tracked["kl"].state_dict()["coef"] != coef[-1]
    assert len({round(c, 9) for c in coef}) > 1


def test_ppo_kl_in_the_reward_or_in_the_loss(act):
    names = [
        loss["qualname"] for loss in updates(act("ppo", kl_coef=0.2, kl_in="loss"))[0][0]["losses"]
    ]
    assert names == ["clipped_surrogate", "kl_penalty"]
    inside = act("ppo", kl_coef=0.2, kl_in="reward")
    assert [loss["qualname"] for loss in updates(inside)[0][0]["losses"]] == ["clipped_surrogate"]
    scores, paid = inside.values("critic/score/mean"), inside.values("critic/rewards/mean")
    assert paid[1] == pytest.approx(scores[1] - 0.2 * inside.values("actor/kl")[1])
    free = act("ppo", kl_coef=0.0)
    assert free.values("critic/score/mean") == free.values("critic/rewards/mean")
    assert len(verbs(free, "model.build")) == 2


def test_ppo_whitens_after_returns_are_made(act):
    played = act("ppo", steps=1, minibatches=1)
    worker, (payload,) = played.stage.workers[0], updates(played)
    rows = [worker.store.rows[row].columns for row in payload[0]["rows"]]
    raw = [x for row in rows for x in (row["returns"] - row["value_old"]).tolist()]
    white = [x for row in rows for x in row["advantage"].tolist()]
    mean = sum(raw) / len(raw)
    variance = sum((x - mean) ** 2 for x in raw) / (len(raw) - 1)
    expected = [(x - mean) / (variance + 1e-8) ** 0.5 for x in raw]
    assert white == pytest.approx(expected, abs=1e-4)
    assert played.values("critic/advantages/mean")[0] == pytest.approx(mean, abs=1e-6)
    returns = [x for row in rows for x in row["returns"].tolist()]
    spread = sum((x - sum(returns) / len(returns)) ** 2 for x in returns) / (len(returns) - 1)
    assert played.values("critic/vf_explained_var")[0] == pytest.approx(
        1 - variance / spread, rel=1e-4
    )


# ---- pairs and labels --------------------------------------------------------------------------


def test_a_batch_is_counted_in_pairs_which_stay_together(act):
    played = act("dpo", ranks=3, batch_size=5)
    for payload in updates(played):
        units = [rank["samples"]["unit"] for rank in payload]
        assert sum(map(len, units)) == 10
        assert all(sorted(u[::2]) == sorted(u[1::2]) for u in map(sorted, units))
        assert {w for rank in payload for w in rank["samples"]["weight"]} == {1 / 10}


def test_a_precomputed_reference_equals_a_reference_model(act):
    model, computed = act("dpo", eval_every=1), act("dpo", eval_every=1, reference="precomputed")
    assert len(verbs(model, "model.build")) == 2 and len(verbs(computed, "model.build")) == 1
    assert computed.weights["policy"] == pytest.approx(model.weights["policy"], rel=1e-6)
    assert [entry[:2] for entry in model.logged] == [entry[:2] for entry in computed.logged]
    for (_, name, value), (_, _, expected) in zip(computed.logged, model.logged, strict=True):
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_references_that_exclude_each_other(act):
    assert "--reference model" in act("dpo", reference="precomputed", follow_every=2).error
    assert "--reference model" in act("dpo", reference="uniform", reference_model="x").error
    assert "--ld-alpha" in act("dpo", reference="precomputed", ld_alpha=0.5).error
    assert len(verbs(act("dpo", reference="uniform"), "model.build")) == 1


def test_a_reference_follows_the_policy(act):
    played = act("dpo", follow_every=2, follow_share=1.0, steps=3)
    assert len(verbs(played, "model.blend")) == 1
    assert played.weights["reference"] != pytest.approx(0.1) != played.weights["policy"]
    assert "reference" in played.stage.run.tracked
    assert "reference" not in act("dpo").stage.run.tracked


LOSSES = (
    "sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "ipo_sum", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop", "aot", "aot_unpaired", "sft",
)  # fmt: skip


def test_every_loss_trains_and_no_two_alike(act, files):
    moved = {}
    for loss in LOSSES:
        smooth = 0.1 if loss in ("robust", "exo_pair") else 0.0
        other = files["other"]  # equal to the policy, a reference leaves aot's order as it is
        played = act("dpo", losses=(loss,), label_smoothing=smooth, ranks=2, reference_model=other)
        assert not played.error, played.error
        moved[loss] = round(played.weights["policy"], 12)
    assert len(set(moved.values())) == len(moved), moved


def test_losses_that_cannot_be_are_named(act):
    assert "'nonsense' is not among" in act("dpo", losses=("nonsense",)).error
    assert "--loss-weights" in act("dpo", losses=("aot",), loss_weights=(1.0,)).error
    assert "--wpo has no effect on aot" in act("dpo", losses=("aot",), wpo=True).error
    assert "--rpo-alpha has no effect" in act("dpo", losses=("aot",), rpo_alpha=1.0).error
    assert (
        "label_smoothing 0.1 has no effect on hinge"
        in act("dpo", losses=("hinge",), label_smoothing=0.1).error
    )
    assert "2 weights for 1 losses" in act("dpo", loss_weights=(1.0, 2.0)).error
    assert "--f-alpha" in act("dpo", f_alpha=0.3).error
    assert "--bco-shift" in act("dpo", bco_shift=True).error
    assert "aot has a loss of its own" in act("dpo", losses=("aot", "sigmoid")).error


def test_evaluation_is_over_the_whole_held_out_set(act):
    played = act("dpo", eval_every=1, eval_share=0.5, batch_size=4)
    passes = [
        p for verb, p in played.calls if verb == "model.forward_backward" and not p[0]["train"]
    ]
    assert [len(p[0]["rows"]) for p in passes] == [2 * 15] * 3
    names = {name for _, name, _ in played.logged if name.startswith("val/")}
    assert {"val/loss", "val/acc", "val/margin", "val/chosen_reward", "val/reject_reward"} <= names


def test_bco_shift_is_the_running_mean_reward(act):
    played = act("dpo", losses=("bco_pair",), bco_shift=True, steps=3)
    shifts = [p[0]["losses"][0]["kwargs"]["shift"] for p in updates(played)]
    rewards = [
        (c + r) / 2
        for c, r in zip(
            played.values("actor/chosen_reward"), played.values("actor/reject_reward"), strict=True
        )
    ]
    for step in range(3):
        assert shifts[step] == pytest.approx(sum(rewards[: step + 1]) / (step + 1), abs=1e-6)
    assert played.stage.run.tracked["loss"].state_dict()["count"] == 3 * 2 * 6


def test_kto_estimates_its_baseline_from_other_prompts_completions(act):
    played = act("kto", steps=4, lr=30.0)
    baselines = played.values("actor/baseline")
    kwargs = [p[0]["losses"][0]["kwargs"]["baseline"] for p in updates(played)]
    assert (
        kwargs == baselines and baselines[0] == 0.0 and min(baselines) >= 0 and max(baselines) > 0
    )
    loads = verbs(played, "examples.load")
    mixed = [p[0] for p in loads if "answers" in p[0]]
    assert len(mixed) == 4
    assert all(m["answers"] == m["indices"][1:] + m["indices"][:1] for m in mixed)
    assert not [p for p in verbs(act("kto", loss="apo_zero"), "examples.load") if "answers" in p[0]]


def test_kto_takes_pairs_and_pairs_are_not_made_of_labels(act, files):
    played = act("kto", data=files["pairs"], batch_size=7)
    assert not played.error and [len(p[0]["rows"]) for p in updates(played)] == [7, 7]
    assert "needs pairs" in act("dpo", data=files["labels"]).error


# ---- distillation ------------------------------------------------------------------------------


def rows_of(played):
    return played.stage.workers[0].store.rows.values()


LENGTHS = ("response_length", "prompt_length")


def test_distillation_moves_towards_the_teacher(act, files):
    """The token weight is the gap between teacher and student; a student that is the teacher stays."""
    still = act("distill", teacher=files["model"])
    assert still.values("actor/reverse_kl")[0] == 0.0 and still.weights["policy"] == pytest.approx(
        0.1
    )
    moved = act("distill", steps=1, minibatches=1)
    worker, (payload,) = moved.stage.workers[0], updates(moved)
    rows = [worker.store.rows[row].columns for row in payload[0]["rows"]]
    gap = [x for row in rows for x in (row["logp_teacher"] - row["logp_old"]).tolist()]
    assert [x for row in rows for x in row["advantage"].tolist()] == pytest.approx(gap)
    assert moved.values("actor/reverse_kl")[0] == pytest.approx(-sum(gap) / len(gap), rel=1e-5)


def test_gkd_on_the_students_answers_and_on_the_datas(act, files):
    """In a share of the steps each; both are to the same prompts, and the teacher's words are told to the student."""
    made = {share: act("gkd", student_share=share, steps=1) for share in (0.0, 1.0)}
    for share, played in made.items():
        (payload,) = updates(played)[0]
        rows = [played.stage.workers[0].store.rows[row] for row in payload["rows"]]
        assert [loss["qualname"] for loss in payload["losses"]] == ["gkd_loss"]
        assert all(row.columns["top_ids"].shape == (row.loss_tokens, 4) for row in rows)
        assert ("logp_sampler" in rows[0].columns) == (share == 1.0)
        (weight,) = set(payload["samples"]["weight"])
        assert weight == pytest.approx(1 / sum(row.loss_tokens for row in rows))
    asked = [
        {tuple(row.ids[: row.mask.int().argmax()].tolist()) for row in rows_of(played)}
        for played in made.values()
    ]
    assert asked[0] == asked[1] and len(asked[0]) == 6
    kinds = [
        len(act("gkd", student_share=0.5, steps=20).values(f"{what}/mean")) for what in LENGTHS
    ]
    assert kinds[0] == kinds[1] and 4 <= kinds[0] <= 16
    temperatures = {
        row
        for p in updates(act("gkd", temperature=0.7, student_share=0.0))
        for row in p[0]["samples"]["temperature"]
    }
    assert temperatures == {0.7}


def test_gkd_lowers_the_divergence_from_its_teacher(act, files):
    still = act("gkd", teacher=files["model"])
    assert still.values("actor/divergence")[0] == pytest.approx(0.0, abs=1e-12)
    assert still.weights["policy"] == pytest.approx(0.1)
    for share in (0.0, 1.0):
        found = act("gkd", student_share=share, steps=12, lr=0.3, beta=0.2).values(
            "actor/divergence"
        )
        assert found[-1] < found[0]


def test_gkd_imitates_the_datas_answers_beside_the_divergence_and_never_its_own(act):
    written = {
        alpha: act("gkd", sft_alpha=alpha, student_share=0.0, steps=1) for alpha in (0.0, 0.3)
    }
    plain, beside = (played.values("actor/loss")[0] for played in written.values())
    (nll,) = written[0.3].values("actor/nll")
    assert nll > 0 and beside == pytest.approx(plain + 0.3 * nll)
    sampled = {alpha: act("gkd", sft_alpha=alpha, student_share=0.9999) for alpha in (0.0, 0.3)}
    assert sampled[0.0].outcome == sampled[0.3].outcome and not sampled[0.3].values("actor/nll")
    for mistake in ({"sft_alpha": -1.0}, {"sft_alpha": 0.5, "student_share": 1.0}):
        assert f"--sft-alpha {mistake['sft_alpha']}" in act("gkd", **mistake).error


@pytest.mark.parametrize("mistake", [{"beta": 1.5}, {"student_share": -0.1}, {"top_k": 0}])
def test_gkd_refuses_what_cannot_be(act, mistake):
    assert "--beta and --student-share" in act("gkd", **mistake).error


def test_a_teacher_with_another_tokenizer_is_refused(act, files, tmp_path):
    import json
    import shutil

    shutil.copytree(files["other"], tmp_path / "teacher")
    path = tmp_path / "teacher" / "tokenizer.json"
    words = json.loads(path.read_text())
    words["model"]["vocab"]["zz"] = 999
    path.write_text(json.dumps(words))
    assert "--teacher" in act("distill", teacher=str(tmp_path / "teacher")).error
