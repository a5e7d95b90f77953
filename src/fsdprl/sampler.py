"""Sampler: the engine on every rank as the controller holds it."""

import hashlib
import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdprl.batch import Batch, Lease, asdict_ref
from fsdprl.controller import current
from fsdprl.data.prompt import Prompt
from fsdprl.device import device_type
from fsdprl.dryrun import engine_estimate
from fsdprl.engine_choice import choose_engine
from fsdprl.errors import UserError
from fsdprl.functions import function_ref
from fsdprl.options import EngineOptions, TurnOptions
from fsdprl.packing import attention_cost
from fsdprl.policy import Policy

ROLLOUT_PHASES = ("rollout", "eval")
COUNTED = ("prompt_tokens", "cached_prompt_tokens", "preemptions")
"""Of `Engine.stats`: what a step sums up."""
TURN_COLUMNS = (
    "length", "loss_tokens", "truncated", "turns", "out_of_turns", "rewritten", "env_failed", "env_reward",
)  # fmt: skip
"""What the ranks tell of each conversation."""
OTHER_COLUMNS = (
    "prompt_length", "tokens", "group", "prompt", "temperature", "version", "cost", "reward", "advantage", "weight",
    "unit", "masked",
)  # fmt: skip
"""Names that environments must not count under, either."""


def sample_seed(seed: int, step: int, call: int, prompt: int, sample: int) -> int:
    """The seed of one answer: a pure function of where it stands in the run, below 2^62."""
    digest = hashlib.blake2b(
        struct.pack("<5q", seed, step, call, prompt, sample), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 2


class Sampler:
    """Samples answers with the policy's current weights, which `pull` streams into the engine."""

    def __init__(
        self,
        policy: Policy,
        *,
        engine: EngineOptions | None = None,
        max_prompt_length: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        chat_template: str = "",
        seed: int = 0,
    ) -> None:
        """Lengths in tokens. top_p, top_k, min_p: 1, -1 and 0 are off, as the log-probs of training assume.

        The engine holds max_prompt_length + max_new_tokens tokens a sequence.
        """
        controller = current()
        self.policy, self.seed, self.version = policy, seed, -1
        self.pulled = policy.name
        self.calls: tuple[int, dict[str, int]] = (-1, {})
        self.sampling = {
            "max_new_tokens": torch.tensor(
                max_new_tokens
            ),  # fixed width on the wire, whatever its size
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "stop": list(stop),
        }
        warn_of_filters(self.sampling)
        options = engine or EngineOptions()
        device = device_type() if controller.flags.dry_run else controller.device_type
        self.kind = choose_engine(options, device, controller.world_size)
        dtype = policy.dtype if options.dtype == "auto" else options.dtype
        if controller.flags.dry_run:
            lines = engine_estimate(policy.path, dtype, options, self.kind)
            controller.report.append(("memory of the engine", lines))
            return
        controller.facts["engine"] = self.kind
        payload = {
            "kind": self.kind,
            "path": policy.path,
            "options": asdict(options),
            "dtype": dtype,
            "max_model_len": max_prompt_length + max_new_tokens,
            "seed": seed,
            "chat_template": chat_template,
        }
        controller.phases.build_engine(
            options.sleep_level,
            lambda: controller.call("engine.build", payload, phase="engine").wait(),
        )

    def pull(self, policy: Policy | None = None) -> None:
        """Stream the policy's weights into every engine, which confirms version and checksums."""
        # The step, as far as it goes: a resumed run gives its rows the versions they would have had.
        self.version = max(self.version + 1, current().step)
        self.pulled = (policy or self.policy).name
        current().phases.pull(self.pulled, self._stream)

    def _stream(self) -> None:
        payload = {"model": self.pulled, "version": self.version}
        current().call("engine.pull", payload, phase="resharding_to_infer").wait()

    def generate(
        self, prompts: Sequence[Prompt], *, n: int = 1, phase: str = "rollout", **sampling: Any
    ) -> Batch:
        """n answers to each prompt. Rows are group-major: a column [N] views as [P, n].

        phase: "rollout" or "eval", for timings and seeds. sampling: overrides of this sampler's settings, such as
        temperature=0.0. A prompt's answers live on one rank; prompts are spread evenly in order.
        """
        settings = self.sampling | sampling
        lease, lengths, payload = self._placed(prompts, n, phase, settings)
        replies = self._asked("engine.generate", payload, phase)
        length = torch.cat([reply["length"] for reply in replies])
        columns = {
            "length": length,
            "loss_tokens": length.clone(),
            "truncated": torch.cat([reply["truncated"] for reply in replies]),
        }
        return self._batch(lease, prompts, lengths, n, settings, phase, columns)

    def slice(
        self, prompts: Sequence[Prompt], begun: Batch | None = None, *, n: int, splits: int
    ) -> Batch:
        """The next slice of the answers in `begun`, if there are any, then the first of n new ones to each prompt.

        A slice ends where the answer does, and otherwise where the next of `splits` even parts of max_new_tokens does.
        Each is drawn with the weights pulled last, and logp_sampler has theirs. Columns beside those of `generate`:
        `unfinished`, and `slices`, how many the answer has had. Rows of `begun` that are finished stay as they are;
        group counts the prompts of the batch returned, whose rows must come in whole groups.

        Raises UserError for stop strings, which the end of a slice could cut in two.
        """
        settings, world = self.sampling, current().world_size
        if settings["stop"]:
            raise UserError(
                "stop strings and answers in slices do not go together: one could be cut in two"
            )
        lease, lengths, payload = self._placed(prompts, n, "rollout", settings)
        none = torch.zeros(0, dtype=torch.int64)
        where = begun.by_rank(begun["unfinished"]) if begun else [none] * world
        for part, places in zip(payload, where, strict=True):
            part |= {"begun": begun.row_ids[places] if begun else none, "splits": splits}
        replies = self._asked("engine.slice", payload, "rollout")
        sizes = [len(part["seeds"]) for part in payload]
        told = {
            name: [
                reply[name].tensor_split([size]) for reply, size in zip(replies, sizes, strict=True)
            ]
            for name in ("length", "truncated", "unfinished")
        }
        fresh = {name: torch.cat([new for new, _ in parts]) for name, parts in told.items()}
        fresh |= {"loss_tokens": fresh["length"], "slices": torch.ones_like(fresh["length"])}
        batch = self._batch(lease, prompts, lengths, n, settings, "rollout", fresh)
        if begun:
            later = {name: torch.cat([old for _, old in parts]) for name, parts in told.items()}
            batch = Batch.concat([self._longer(begun, torch.cat(where), later), batch])
        batch["group"] = torch.arange(len(batch) // n).repeat_interleave(n)
        return batch

    def _longer(self, begun: Batch, places: Tensor, told: dict[str, Tensor]) -> Batch:
        """A batch of which the ranks told new numbers for the rows at these places."""
        before, longer = begun["length"], begun[:]
        for name, values in told.items():
            longer[name] = begun[name].index_copy(0, places, values)
        longer["slices"] = begun["slices"].index_add(0, places, torch.ones_like(places))
        longer["loss_tokens"] = longer["length"]
        longer["tokens"] = longer["prompt_length"] + longer["length"]
        longer["cost"] = self._costs(longer["tokens"])
        current().timeline.count("tokens", float((longer["length"] - before).sum()))
        return longer

    def rollout(
        self,
        env: Callable[..., Any],
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        turns: TurnOptions | None = None,
        phase: str = "rollout",
        **sampling: Any,
    ) -> Batch:
        """n conversations from each prompt. Rows as `generate` gives them; loss tokens are the model's alone.

        env: a module-level function, plain or async, or a class, of which each conversation gets an object of its
        own; settings are bound with `functools.partial`. After each turn of the model it is called on the rank with
        the `Conversation` and returns messages (a dict or a list of them, role `tool`, `user` or `system`) to go on,
        a number to end with this reward, or None to end. It may raise UnscoredError, which masks the conversation.
        max_new_tokens bounds all that comes behind the prompt.

        Columns beside those of `generate`: `turns`; `env_reward`, NaN where env gave none; `env_failed`, no answer
        within turns.timeout_s; `out_of_turns`; `rewritten`, the template would have shown earlier turns otherwise;
        `tool_calls`, `tool_errors` and whatever else env counts. The reward named `env` is `env_reward`.

        Raises UserError for what env does wrong, for a chat template that cannot go on with what was said (see
        `data.turns`), and where more than turns.max_failed_share of the conversations failed (one is always allowed,
        unless the share is 0).
        """
        options, settings = turns or TurnOptions(), self.sampling | sampling
        if options.max_turns < 1 or options.concurrency < 1 or options.timeout_s <= 0:
            raise UserError(
                f"--turns.max-turns {options.max_turns} and --turns.concurrency {options.concurrency} must be at "
                f"least 1, --turns.timeout-s {options.timeout_s:g} above 0"
            )
        ref = function_ref(env)
        lease, lengths, payload = self._placed(prompts, n, phase, settings)
        tools = next((prompt.tools for prompt in prompts if prompt.tools), [])
        for part in payload:
            part |= {"env": asdict_ref(env), "turns": asdict(options), "tools": tools}
        replies = self._asked("engine.rollout", payload, phase)
        lost = [line for reply in replies for line in reply["lost"]]
        if len(lost) > max(
            int(options.max_failed_share * len(prompts) * n), options.max_failed_share > 0
        ):
            raise UserError(
                f"environment {ref} failed in {len(lost)} of {len(prompts) * n} conversations, more than "
                f"--turns.max-failed-share {options.max_failed_share:g}; the first was row {lost[0][0]}: {lost[0][1]}"
            )
        current().timeline.count("reward/env_failed", len(lost))
        columns = {name: torch.cat([reply[name] for reply in replies]) for name in TURN_COLUMNS}
        return self._batch(
            lease, prompts, lengths, n, settings, phase, columns | counts_of(replies)
        )

    def _placed(
        self, prompts: Sequence[Prompt], n: int, phase: str, settings: dict[str, Any]
    ) -> tuple[Lease, Tensor, list[dict[str, Any]]]:
        """Rows for n answers to each prompt, lengths of the prompts, and what each rank is to answer."""
        Lease.flush()
        world, count = current().world_size, len(prompts)
        bounds = [rank * count // world for rank in range(world + 1)]
        owner = torch.zeros(count, dtype=torch.int64)
        for rank in range(world):
            owner[bounds[rank] : bounds[rank + 1]] = rank
        lease = Lease(owner.repeat_interleave(n))
        seeds = self.seeds(prompts, n, phase)
        lengths = torch.tensor([len(prompt.ids) for prompt in prompts], dtype=torch.int64)
        payload = []
        for start, stop in itertools.pairwise(bounds):
            mine = prompts[start:stop]
            ids = (
                np.concatenate([prompt.ids for prompt in mine])
                if mine
                else np.zeros(0, dtype=np.int32)
            )
            payload.append(
                {
                    "first_row": [lease.start + i * n for i in range(start, stop)],
                    "lengths": lengths[start:stop],
                    "ids": torch.from_numpy(ids.astype(np.int32, copy=False)),
                    "infos": [info_of(prompt) for prompt in mine],
                    "seeds": seeds[start * n : stop * n],
                    "n": n,
                    "sampling": settings,
                    "version": self.version,
                }
            )
        return lease, lengths, payload

    def _asked(self, verb: str, payload: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
        """The ranks' replies, their statistics counted."""
        controller = current()
        controller.phases.generate(self._stream)
        replies = controller.call(verb, payload, phase=phase).wait()
        if phase == "rollout":
            for name in COUNTED:
                amount = sum(reply["stats"].get(name, 0.0) for reply in replies)
                controller.timeline.count(f"rollout/{name}", amount)
        return replies

    def _batch(
        self,
        lease: Lease,
        prompts: Sequence[Prompt],
        lengths: Tensor,
        n: int,
        settings: dict[str, Any],
        phase: str,
        columns: dict[str, Tensor],
    ) -> Batch:
        """The rows as a batch: the ranks' columns, and those that follow from them and the prompts."""
        count = len(prompts)
        prompt_length = lengths.repeat_interleave(n)
        tokens = prompt_length + columns["length"]
        indices = torch.tensor([p.index for p in prompts], dtype=torch.int64)
        temperature = settings["temperature"] or 1.0
        if phase == "rollout":
            current().timeline.count("tokens", float(tokens.sum()))
        return Batch.of(
            lease,
            columns
            | {
                "prompt_length": prompt_length,
                "tokens": tokens,
                "group": torch.arange(count).repeat_interleave(n),
                "prompt": indices.repeat_interleave(n),
                "temperature": torch.full((count * n,), temperature, dtype=torch.float64),
                "version": torch.full((count * n,), self.version),
                "cost": self._costs(tokens),
            },
            ["logp_sampler"],
        )

    def _costs(self, tokens: Tensor) -> Tensor:
        """What rows of these lengths cost to train, float64 [N]."""
        config = self.policy.config
        hidden, layers = config.get("hidden_size", 1), config.get("num_hidden_layers", 1)
        cost = [attention_cost(t, hidden, layers) for t in tokens.tolist()]
        return torch.tensor(cost, dtype=torch.float64)

    def seeds(self, prompts: Sequence[Prompt], n: int, phase: str) -> Tensor:
        """Seeds [P * n], a pure function of (run seed, step, call of this phase in the step, prompt, sample)."""
        step, seed = current().step, self.seed + (current().redrawn << 32)
        if self.calls[0] != step:
            self.calls = (step, {})
        call = self.calls[1][phase] = self.calls[1].get(phase, -1) + 1
        ordinal = 2 * call + ROLLOUT_PHASES.index(phase)
        seeds = [sample_seed(seed, step, ordinal, p.index, i) for p in prompts for i in range(n)]
        return torch.tensor(seeds, dtype=torch.int64)


OFF = {"top_p": (1.0,), "top_k": (-1, 0), "min_p": (0.0,), "repetition_penalty": (1.0,)}
"""Values of what changes the distribution that answers are drawn from, at which it does not."""


def counts_of(replies: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Columns of what environments counted; ranks on which nobody counted a thing have 0 of it."""
    names = {name for reply in replies for name in reply["counts"]} | {"tool_calls", "tool_errors"}
    if taken := names & {*TURN_COLUMNS, *OTHER_COLUMNS}:
        raise UserError(
            f"an environment counts {sorted(taken)[0]!r}: there is such a column already"
        )
    return {
        name: torch.cat(
            [
                reply["counts"].get(name, torch.zeros(len(reply["turns"]), dtype=torch.float64))
                for reply in replies
            ]
        )
        for name in sorted(names)
    }


def warn_of_filters(sampling: dict[str, Any]) -> None:
    """Say that the trainer's log-probs, which respect the temperature, do not know of filters."""
    on = [f"{name} {sampling[name]}" for name, off in OFF.items() if sampling[name] not in off]
    if on:
        print(
            f"fsdprl: {', '.join(on)}: answers are drawn from a part of the distribution, but trained in "
            f"the whole: no mask of the vocabulary is kept for the trainer. rollout/kl and "
            f"importance weights include that difference; filter in evaluation only, with "
            f"sampler.generate(..., phase='eval', top_p=...)",
            file=sys.stderr,
        )


def info_of(prompt: Prompt) -> dict[str, Any]:
    """What travels with a prompt for rewards and people."""
    return {
        "prompt": prompt.text,
        "messages": prompt.messages,
        "answer": prompt.answer,
        "meta": prompt.meta,
        "rewards": prompt.rewards,
    }
