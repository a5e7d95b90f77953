"""Whose turn it is on the device: the trainer's or the engine's. One small state machine.

It moves at the first verb of the other kind, so that recipes never say anything about memory:

    train --pull--> weights --generate--> rollout --any verb to a model--> train

    train to weights: optimizer states and frozen models leave, the engine's weights wake
    weights to rollout: trained models leave (the pull has read them), the key-value cache wakes
    rollout to train: the engine sleeps, the model that is used comes back

Calls of one kind in a row change nothing. What does not sleep and is not offloaded stays where it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fsdprl.errors import UserError
from fsdprl.options import ShardingOptions

if TYPE_CHECKING:
    from fsdprl.controller import Controller

TO_INFER, TO_TRAIN = "resharding_to_infer", "resharding_to_train"


@dataclass
class Resident:
    """A model on all ranks: what of it may leave the device, and what is there."""

    trained: bool
    sharding: ShardingOptions
    weights: bool = True
    optimizer: bool = True

    def leaving(self, *parts: str) -> list[str]:
        """Which of these parts are there and may go."""
        sharding = self.sharding
        may = {
            "weights": self.weights and sharding.offload_model,
            "optimizer": self.optimizer and self.trained and sharding.offload_optimizer,
        }
        return [part for part in parts if may[part]]


class Phases:
    """What the controller knows of memory on the ranks, which all hold the same."""

    def __init__(self, controller: "Controller") -> None:
        self.controller = controller
        self.at: Literal["train", "weights", "rollout"] = "train"
        self.models: dict[str, Resident] = {}
        self.level = 0
        """Sleep level of the engine while models train."""
        self.asleep: set[str] = set()
        """What of the engine sleeps: "weights", "kv_cache"."""
        self.pulled = ""
        """The model whose weights the engine has got."""
        self.dropped = False
        """Whether sleep has taken them from it."""
        self.changed = False
        """Whether the model has changed since."""

    def add(self, name: str, *, trained: bool, sharding: ShardingOptions) -> None:
        """A model has been built."""
        self.models[name] = Resident(trained, sharding)

    def train(self, *names: str, optimizer: bool = False, changes: bool = False) -> None:
        """These models are about to be used, with their optimizers or without; changes: the first one's
        weights will not be the same. No name: one is built."""
        entering = self.at != "train"
        if self.at == "rollout" and self.level:  # an engine half awake cannot sleep: it stays so
            self._call("engine.sleep", {"level": self.level}, TO_TRAIN)
            self.asleep = {"weights", "kv_cache"}
            self.dropped = self.dropped or self.level == 2
        idle = [n for n, m in self.models.items() if not m.trained and n not in names]
        off = {name: self.models[name].leaving("weights") for name in idle}
        onto = {}
        for name in names:
            model = self.models[name]
            there = {"weights": model.weights, "optimizer": model.optimizer or not optimizer}
            onto[name] = [part for part, is_there in there.items() if not is_there]
        trained = {name: parts for name, parts in onto.items() if self.models[name].trained}
        frozen = {name: parts for name, parts in onto.items() if name not in trained}
        if entering:
            self._move(TO_TRAIN, off, trained, always=True)
        else:
            self._move("ref_offload", off, {})
            self._move(TO_TRAIN, {}, trained)
        self._move("ref_onload", {}, frozen)
        self.at = "train"
        self.changed = self.changed or (changes and names[0] == self.pulled)

    def build_engine(self, level: int, build: Callable[[], object]) -> None:
        """Build the engine where it will generate: without what leaves the device for a rollout, so
        that it finds the memory, and the size of its cache, that it will have."""
        off = {name: m.leaving("optimizer", "weights") for name, m in self.models.items()}
        self._move("engine", off, {})
        build()
        self.level, self.at = level, "rollout"

    def pull(self, model: str, stream: Callable[[], None]) -> None:
        """Send the model's weights to the engine: `stream` does. They are read wherever they lie."""
        self._wake_weights()
        stream()
        self.pulled, self.dropped, self.changed = model, False, False

    def generate(self, stream: Callable[[], None]) -> None:
        """The engine is about to generate. `stream` sends it the weights that it had, if sleep has
        dropped them. Raises UserError if they are no more."""
        self._wake_weights()
        if self.dropped and self.pulled:
            if self.changed:
                raise UserError(
                    f"--engine.sleep-level 2 dropped the engine's weights, and {self.pulled} has been "
                    f"trained since: call sampler.pull() before sampler.generate()"
                )
            stream()
            self.dropped = False
        if self.at == "weights":
            off = {name: m.leaving("weights") for name, m in self.models.items()}
            self._move(TO_INFER, off, {}, always=True)
            self._wake("kv_cache")
            self.at = "rollout"

    def note_peak(self) -> None:
        """Have the peak so far counted, at the end of a step."""
        if self.models:
            self._move("memory", {}, {}, always=True)

    def _wake_weights(self) -> None:
        if self.at == "train":
            off = {
                name: m.leaving("optimizer", *(() if m.trained else ("weights",)))
                for name, m in self.models.items()
            }
            self._move(TO_INFER, off, {}, always=True)
            self._wake("weights")
            self.at = "weights"

    def _wake(self, tag: str) -> None:
        if tag in self.asleep:
            self.asleep.remove(tag)
            self._call("engine.wake", {"tags": [tag]}, TO_INFER)

    def _move(
        self,
        phase: str,
        off: Mapping[str, Sequence[str]],
        onto: Mapping[str, Sequence[str]],
        *,
        always: bool = False,
    ) -> None:
        """Take parts of models off the device and put others onto it; count the peak until here.

        Nothing is sent where nothing moves, unless `always`: a turn ends.
        """
        off, onto = ({n: list(p) for n, p in moves.items() if p} for moves in (off, onto))
        if not (off or onto or always):
            return
        collect = any(self.models[name].sharding.gc_after_offload for name in off)
        release = bool(off) or (self.level > 0 and phase == TO_INFER)
        payload = {"off": off, "onto": onto, "collect": collect, "release": release}
        replies = self._call("memory.move", payload, phase)
        peak = max(reply["peak_bytes"] for reply in replies)
        self.controller.timeline.most(f"memory/{self.at}_peak_gb", peak / 1e9)
        for moves, is_there in ((off, False), (onto, True)):
            for name, parts in moves.items():
                for part in parts:
                    setattr(self.models[name], part, is_there)

    def _call(self, verb: str, payload: dict, phase: str) -> list:
        return self.controller.call(verb, payload, phase=phase).wait()
