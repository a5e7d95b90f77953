"""The order in which trainer and engine take turns on the device, against sequences written by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from fsdprl.controller import Timeline
from fsdprl.errors import UserError
from fsdprl.options import ShardingOptions
from fsdprl.phases import Phases

OFFLOAD = ShardingOptions(offload_model=True, offload_optimizer=True)


class Recorder:
    """A controller that only writes down what it would tell two ranks."""

    def __init__(self, level: int, **models: tuple[bool, ShardingOptions]) -> None:
        self.timeline, self.told, self.peaks = Timeline(), [], [(1, 2)]
        self.payloads: list[tuple[str, dict[str, Any]]] = []
        self.phases = Phases(self)  # type: ignore[arg-type]
        for name, (trained, sharding) in models.items():
            self.phases.train()
            self.phases.add(name, trained=trained, sharding=sharding)
        self.phases.build_engine(level, lambda: self.told.append("build"))

    def call(self, verb: str, payload: dict[str, Any], *, phase: str) -> Any:
        self.payloads.append((phase, payload))
        if verb == "memory.move":
            parts = {
                way: [f"{name}.{part}" for name, parts in payload[way].items() for part in parts]
                for way in ("off", "onto")
            }
            self.told += [f"{way} {part}" for way, names in parts.items() for part in names]
        else:
            self.told.append(f"{verb.partition('.')[2]} {next(iter(payload.values()))}")
        peaks = self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0]
        return SimpleNamespace(wait=lambda: [{"peak_bytes": peak} for peak in peaks])

    def heard(self) -> list[str]:
        told, self.told = self.told, []
        return told

    def pull(self) -> None:
        self.phases.pull("policy", self.stream)

    def generate(self) -> None:
        self.phases.generate(self.stream)
        self.told.append("generate")

    def stream(self) -> None:
        self.told.append("pull")

    def step(self, name: str = "policy") -> None:
        self.phases.train(name)
        self.told.append(f"update {name}")
        self.phases.train(name, optimizer=True, changes=True)
        self.told.append(f"step {name}")


def test_a_reference_comes_and_goes_under_names_of_its_own():
    """Whether it is the first to be used after a rollout or not; a trained model's return is resharding_to_train."""
    job = Recorder(1, policy=(True, OFFLOAD), reference=(False, OFFLOAD))
    job.generate()
    job.payloads.clear()
    for name in ("reference", "policy", "reference"):
        job.phases.train(name)
    moves = [(phase, payload) for phase, payload in job.payloads if "onto" in payload]
    assert [(phase, list(p["off"]), list(p["onto"])) for phase, p in moves] == [
        ("resharding_to_train", [], []),
        ("ref_onload", [], ["reference"]),
        ("ref_offload", ["reference"], []),
        ("resharding_to_train", [], ["policy"]),
        ("ref_onload", [], ["reference"]),
    ]


def test_a_step_of_everything_in_the_recommended_order():
    """Weights wake, the pull reads the shards, only then they leave and the cache wakes; back: the engine
    sleeps before the trainer takes the memory."""
    job = Recorder(2, policy=(True, OFFLOAD), reference=(False, OFFLOAD))
    assert job.heard() == ["off policy.optimizer", "off policy.weights", "off reference.weights", "build"]  # fmt: skip
    job.pull()
    job.generate()
    assert job.heard() == ["pull", "generate"]  # awake since it was built
    job.phases.train("policy")
    assert job.heard() == ["sleep 2", "onto policy.weights"]
    job.phases.train("reference")
    assert job.heard() == ["onto reference.weights"]
    job.step()
    assert job.heard() == [
        "off reference.weights", "update policy", "onto policy.optimizer", "step policy"
    ]  # fmt: skip
    job.pull()
    assert job.heard() == ["off policy.optimizer", "wake ['weights']", "pull"]
    job.generate()
    assert job.heard() == ["off policy.weights", "wake ['kv_cache']", "generate"]


def test_a_pull_that_nothing_was_sampled_with():
    """vLLM cannot put to sleep what sleeps already: the weights stay awake, the cache stays asleep."""
    job = Recorder(1, policy=(True, OFFLOAD))
    job.pull()
    job.generate()
    job.step()
    job.pull()
    job.heard()
    job.step()
    assert job.heard() == ["update policy", "onto policy.optimizer", "step policy"]
    job.pull()
    job.generate()
    assert job.heard() == [
        "off policy.optimizer", "pull", "off policy.weights", "wake ['kv_cache']", "generate"
    ]  # fmt: skip


def test_phases_are_those_of_the_timings():
    job = Recorder(1, policy=(True, OFFLOAD), reference=(False, OFFLOAD))
    job.pull()
    job.generate()
    job.payloads.clear()
    for name in ("policy", "reference", "policy"):
        job.phases.train(name)
    job.pull()
    job.generate()
    phases = [phase for phase, _ in job.payloads]
    assert phases == [
        *["resharding_to_train"] * 2, "ref_onload", "ref_offload", *["resharding_to_infer"] * 4
    ]  # fmt: skip


def test_generates_in_a_row_never_sleep():
    job = Recorder(2, policy=(True, OFFLOAD))
    job.pull()
    job.heard()
    for _ in range(3):
        job.generate()
    assert job.heard() == ["generate"] * 3


@pytest.mark.parametrize(("level", "again"), [(1, []), (2, ["pull"])])
def test_a_reward_model_between_two_generates(level: int, again: list[str]):
    """What sleep has dropped is pulled again, from shards that are in host memory; what it has only
    parked is not."""
    job = Recorder(level, policy=(True, OFFLOAD), judge=(False, OFFLOAD))
    job.pull()
    job.generate()
    job.heard()
    job.phases.train("judge")
    job.generate()
    assert job.heard() == [
        f"sleep {level}", "onto judge.weights", "off judge.weights", "wake ['weights']", *again,
        "wake ['kv_cache']", "generate",
    ]  # fmt: skip


def test_dropped_weights_that_are_no_more_are_an_error():
    job = Recorder(2, policy=(True, OFFLOAD), critic=(True, OFFLOAD))
    job.pull()
    job.generate()
    job.step("critic")
    job.generate()  # the policy is what it was
    job.step()
    with pytest.raises(UserError, match=r"sleep-level 2.*policy.*call sampler.pull\(\)"):
        job.generate()
    parked = Recorder(1, policy=(True, OFFLOAD))
    parked.pull()
    parked.step()
    parked.heard()
    parked.generate()  # off-policy by a step, as the recipe asked
    assert parked.heard()[-2:] == ["wake ['kv_cache']", "generate"]


def test_nothing_moves_that_nobody_asked_for():
    job = Recorder(0, policy=(True, ShardingOptions()), reference=(False, ShardingOptions()))
    job.pull()
    job.generate()
    job.phases.train("reference")
    job.step()
    job.pull()
    job.generate()
    told = ["build", "pull", "generate", "update policy", "step policy", "pull", "generate"]
    assert job.heard() == told
    assert not any(payload["release"] or payload["collect"] for _, payload in job.payloads)


def test_each_flag_moves_its_own_part():
    job = Recorder(0, policy=(True, ShardingOptions(offload_optimizer=True)))
    assert job.heard() == ["off policy.optimizer", "build"]
    job = Recorder(0, policy=(True, ShardingOptions(offload_model=True)))
    assert job.heard() == ["off policy.weights", "build"]
    assert job.payloads[-1][1]["release"] and not job.payloads[-1][1]["collect"]
    job = Recorder(0, policy=(True, ShardingOptions(offload_model=True, gc_after_offload=True)))
    assert job.payloads[-1][1]["collect"]


def test_the_engine_sleeps_while_another_model_is_built():
    job = Recorder(1, policy=(True, OFFLOAD))
    job.heard()
    job.phases.train()
    assert job.heard() == ["sleep 1"]


def test_peaks_are_counted_for_the_phase_that_ends():
    """The highest of all ranks, and of all turns in a step."""
    job = Recorder(0, policy=(True, ShardingOptions()))
    job.pull()
    job.generate()
    job.timeline.drain()
    job.peaks = [(3e9, 4e9), (7e9, 2e9), (6e9, 1e9), (5e9, 8e9), (1e9, 0)]
    job.phases.train("policy")  # ends the rollout
    job.pull()  # ends training
    job.generate()  # ends the pull
    job.phases.train("policy")
    job.phases.note_peak()
    assert job.timeline.drain()[1] == {
        "memory/rollout_peak_gb": 8.0, "memory/train_peak_gb": 7.0, "memory/weights_peak_gb": 6.0
    }  # fmt: skip
