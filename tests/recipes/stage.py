"""Recipes without processes or transformers: `main(cfg)` runs on a model of one weight.

Rows, rewards, data and losses are the real ones, on pretended ranks. Log-probs, values and scores are smooth
functions of the tokens, the checkpoint's name and one weight, whose gradient is real; the optimizer is plain gradient
descent. So whatever a flag changes in an algorithm shows in the metrics or in the weight.
"""

import dataclasses
import functools
import importlib.util
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdprl
from fsdprl import controller as controller_module
from fsdprl import conversing, feeding, learn, prompts, rewording, rollout, row_files, rows, slicing
from fsdprl.config import Flags
from fsdprl.data import chat, example_rows, preference_rows
from fsdprl.data.feed import Course, Source
from fsdprl.engines import Completion
from fsdprl.errors import UserError
from fsdprl.models import Packed
from fsdprl.run_checkpoints import Tracked
from tests import fake

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def recipe(name: str) -> ModuleType:
    """A recipe as a module, once."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", ROOT / "recipes" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Network(nn.Module):
    """One weight. Every number of a token depends on it, on the token and on the checkpoint."""

    def __init__(self, path: str, kind: str, seed: int) -> None:
        super().__init__()
        self.kind = kind
        self.salt = (
            zlib.crc32(f"{Path(path).name} {seed if kind != 'policy' else ''}".encode()) % 997 / 100
        )
        self.weight = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def forward(
        self,
        packed: Packed,
        *,
        also: Collection[str] = (),
        choices_SK: Tensor | None = None,
        top: int = 0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        where = packed.ids.double() * (1.3 + self.salt / 10) + packed.positions / 7
        wave = torch.sin(where + 3 * self.weight)
        if self.kind == "reward":
            ends = torch.tensor(packed.lengths).cumsum(0)[: packed.rows]
            means = [part.mean() for part in wave.split(list(packed.lengths))[: packed.rows]]
            return torch.stack(means) if len(ends) else wave[:0], {}
        wave = wave[packed.target]
        if top:
            near = (packed.ids[packed.target, None] + torch.arange(top)) % 64
            return self.of_words(near, packed), {"top_ids": near.int()}
        if self.kind == "value":
            return wave * self.weight, {}
        others = {
            "entropy": 1 + 0.3 * wave,
            "collision": -0.7 + 0.2 * wave.detach(),
            "balance": 2 + 0.1 * wave,
        }
        made = {name: others[name] for name in also}
        if choices_SK is not None:
            made["logp_top"] = self.of_words(choices_SK, packed)
        return -1 - 0.5 * wave / packed.temperature, made

    def of_words(self, ids_SK: Tensor, packed: Packed) -> Tensor:
        """Log-probs of up to five words of each token: they add up to less than 1."""
        wave = torch.sin(ids_SK.double() * (1.3 + self.salt / 10) + 3 * self.weight)
        return -2.2 - 0.5 * wave / packed.temperature[:, None]


class Engine:
    """Letters and digits drawn from each answer's own seed and the temperature; some reach the limit."""

    version = -1
    max_model_len = 1000

    def generate(self, requests: Any, sampling: Any, progress: Any) -> list[Completion]:
        made = []
        for request in requests:
            draw = torch.Generator().manual_seed(request.seed % 2**31)
            count = int(torch.randint(1, sampling.max_new_tokens + 1, (), generator=draw))
            ids = torch.randint(4, 60, (count,), generator=draw, dtype=torch.int32)
            ids = (ids * (1 if sampling.temperature == 1.0 else 3)) % 60 + 4
            finish = "length" if count == sampling.max_new_tokens else "stop"
            made.append(Completion(ids, -torch.ones(count), finish))
        return made

    def session(self, lanes: int, sampling: Any, progress: Any) -> Any:
        return Session(self, sampling)

    def stats(self) -> dict[str, float]:
        return {}


class Session:
    """Every turn ends at once."""

    def __init__(self, engine: Engine, sampling: Any) -> None:
        self.engine, self.sampling, self.new, self.over = engine, sampling, [], False

    @property
    def busy(self) -> bool:
        return bool(self.new)

    def add(self, lane: int, request: Any, limit: int) -> None:
        self.new.append((lane, request, dataclasses.replace(self.sampling, max_new_tokens=limit)))

    def step(self, waiting: bool) -> list[Any]:
        self.over = not (self.new or waiting)
        new, self.new = self.new, []
        return [(lane, *self.engine.generate([r], sampling, None)) for lane, r, sampling in new]


class Stage(fake.FakeController):
    """The controller, and the ranks' models and engine."""

    def __init__(self, name: str, ranks: int) -> None:
        super().__init__(ranks)
        self.flags, self.facts, self.report = Flags(), {}, []
        self.device_type, self.step, self.config = "cpu", 0, {}
        self.recipe = ROOT / "recipes" / f"{name}.py"
        self.calls: list[tuple[str, Any]] = []
        self.logged: list[tuple[int, str, float]] = []
        self.verbs = {
            **rows.VERBS,
            **row_files.VERBS,
            **feeding.VERBS,
            "examples.feed": self.feed,
            **rewording.VERBS,
            "memory.move": lambda worker, **_: {"peak_bytes": 0},
            "engine.sleep": lambda worker, **_: None,
            "engine.wake": lambda worker, **_: None,
            "model.build": self.build,
            "model.forward": learn.forward,
            "model.forward_backward": learn.forward_backward,
            "engine.build": self.build_engine,
            "engine.generate": rollout.generate,
            "engine.rollout": conversing.rollout,
            "engine.slice": slicing.generate_slice,
        }
        for worker in self.workers:
            worker.models, worker.grader, worker.device = {}, None, torch.device("cpu")

    def feed(self, worker: Any, *, course: str, form: dict, flag: str, **rest: Any) -> None:
        """Data processes, without processes."""
        kept, tokens = (rest[name].numpy() for name in ("kept", "tokens"))
        rows = Course(kept, tokens, rest["seed"], rest["count"], rest["per"])
        world, source = worker.world, Source(form, flag)
        worker.state.setdefault("feeds", {})[course] = SimpleNamespace(
            take=lambda step: source.__getitems__(rows.of_rank(step, world.rank, world.size))
        )

    def call(self, verb: str, payload: dict | Sequence[dict], **rest: Any) -> Any:
        self.calls.append((verb, plain(payload)))
        if verb == "model.optim_step":
            assert isinstance(payload, dict)
            return SimpleNamespace(wait=lambda: self.optim_step(**payload))
        if verb in ("engine.pull", "model.blend"):
            assert isinstance(payload, dict)
            return SimpleNamespace(wait=lambda: getattr(self, verb.partition(".")[2])(**payload))
        return super().call(verb, payload, **rest)

    def build(
        self, worker: Any, *, model: str, path: str, kind: str, seed: int, **rest: Any
    ) -> dict:
        network: Any = Network(path, kind, seed)
        trained = rest["optimizer"] is not None
        optimizer: Any = SimpleNamespace(loss_scale=1.0) if trained else None
        worker.models[model] = learn.Model(network, path, None, optimizer)
        return {"parameters": 1, "device": "cpu"}

    def optim_step(
        self, *, model: str, lr: float, weight_decay: float, max_grad_norm: float
    ) -> list:
        """The gradient is summed over ranks, as FSDP does."""
        weights = [worker.models[model].network.weight for worker in self.workers]
        total = sum(float(w.grad) for w in weights if w.grad is not None)
        step = total * min(1.0, max_grad_norm / (abs(total) + 1e-6)) if max_grad_norm else total
        with torch.no_grad():
            for weight in weights:
                weight.copy_(weight * (1 - lr * weight_decay) - lr * step)
                weight.grad = None
        return [{"grad_norm": abs(total)}] * self.world_size

    def pull(self, *, model: str, version: int) -> list[None]:
        for worker in self.workers:
            worker.engine.version = version
        return [None] * self.world_size

    def blend(self, *, model: str, source: str, share: float) -> list[None]:
        for worker in self.workers:
            mine, its = (worker.models[name].network.weight for name in (model, source))
            mine.data.lerp_(its.data, share)
        return [None] * self.world_size

    def build_engine(self, worker: Any, *, path: str, chat_template: str, **_: Any) -> None:
        worker.state["tokenizer"] = load_tokenizer(path, chat_template=chat_template or None)
        worker.engine = Engine()


class Run:
    """A run that keeps what it is told in memory."""

    def __init__(self, options: Any) -> None:
        self.stage: Any = controller_module.current()
        self.stage.calls.append(("run", plain(dataclasses.asdict(options))))
        self.step, self.tracked = 0, {}
        self.stage.run, self.stage.log_entropy = self, options.log_entropy

    def track(self, **things: Any) -> None:
        kept = Tracked()
        for name, thing in things.items():
            kept.add(name, thing)
        self.tracked |= kept.models | kept.states

    def steps(self, plan: Any) -> Iterator[int]:
        for self.step in range(plan.steps):
            self.stage.step = self.step
            yield self.step
        self.step = plan.steps

    def log(self, metrics: Any) -> None:
        self.stage.logged += [(self.step, name, float(value)) for name, value in metrics.items()]

    def record(self, batch: Any) -> None:
        pass

    def show(self, samples: Any) -> None:
        pass


@dataclasses.dataclass
class Played:
    """What a run of a recipe did."""

    error: str
    """The UserError that ended it, or ""."""
    logged: list[tuple[int, str, float]]
    calls: list[tuple[str, Any]]
    weights: dict[str, float]
    stage: Stage

    @property
    def outcome(self) -> Any:
        """All that an algorithm is: metrics, weights, and how it ended."""
        return self.error, self.logged, self.weights

    def values(self, name: str) -> list[float]:
        """A metric over the run."""
        return [value for _, logged, value in self.logged if logged == name]


@functools.cache
def load_tokenizer(path: str, **options: Any) -> Any:
    return real_load_tokenizer(path, **options)


real_load_tokenizer = chat.load_tokenizer


def play(name: str, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 1, **fields: Any) -> Played:
    """Run a recipe's main with these fields of its Config."""
    stage = Stage(name, ranks)
    monkeypatch.setattr(controller_module, "_current", stage)
    monkeypatch.setattr(fsdprl, "Run", Run, raising=False)
    for module in (prompts, example_rows, preference_rows):
        monkeypatch.setattr(module, "load_tokenizer", load_tokenizer)
    module, error = recipe(name), ""
    try:
        module.main(module.Config(**fields))
    except UserError as mistake:
        error = str(mistake)
    networks = {name: model.network for name, model in stage.workers[0].models.items()}
    weights = {name: float(network.weight.detach()) for name, network in networks.items()}
    return Played(error, stage.logged, stage.calls, weights, stage)


def plain(value: Any) -> Any:
    """A payload as something to compare."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value
