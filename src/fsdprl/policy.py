"""Models as the controller holds them: Policy, Reference, Critic, RewardModel. Each method is one verb to all ranks."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdprl.batch import Batch, Lease, asdict_ref
from fsdprl.checkpoint_files import find_checkpoint
from fsdprl.controller import current
from fsdprl.device import device_type
from fsdprl.dryrun import memory_estimate
from fsdprl.errors import NonFiniteError, UserError
from fsdprl.functions import positional_names
from fsdprl.metrics import ALSO, averaged
from fsdprl.options import DType, ShardingOptions
from fsdprl.run_saves import collect

MADE = {
    "policy": ("logp", "entropy", "collision", "balance", "logp_top"),
    "value": ("value",),
    "reward": ("score",),
}
"""Columns that a forward pass makes and a loss may ask for by name."""
UNTAKEN = "the update was not taken and no weight has changed"


class Network:
    """A Hugging Face checkpoint sharded over all ranks, under a name of its own. Use one of the classes below."""

    kind = "policy"
    trained = False
    steady = True
    """Only an optimizer step or follow() changes it, never sampling or reading: see Tracked.steady."""
    phase = "forward"
    update_phase = "update"
    metrics_prefix = "actor"

    def __init__(
        self,
        path: str,
        *,
        name: str,
        sharding: ShardingOptions | None = None,
        dtype: DType | None = None,
        optimizer: dict[str, Any] | None = None,
        seed: int = 0,
        flag: str = "--model",
    ) -> None:
        """path: a folder or hub name with safetensors. dtype: what is computed in (weights being trained are float32
        shards); None takes bfloat16 on an accelerator and float32 on CPU. optimizer: keywords of the optimizer,
        such as {"betas": (0.9, 0.95)}. seed: of a fresh head.

        Raises UserError where the checkpoint is missing or cannot be used, before any rank moves.
        """
        controller = current()
        self.name, self.path = name, path
        self.sharding = sharding or ShardingOptions()
        self.config = find_checkpoint(path, flag=flag).config
        device = device_type() if controller.flags.dry_run else controller.device_type
        self.dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        if controller.flags.dry_run:
            lines = memory_estimate(
                path, controller.world_size, self.dtype, self.sharding, trained=self.trained
            )
            controller.report.append((f"memory of {name}", lines))
            return
        payload = {
            "model": name,
            "path": path,
            "kind": self.kind,
            "sharding": asdict(self.sharding),
            "dtype": self.dtype,
            "seed": seed,
            "optimizer": (optimizer or {}) if self.trained else None,
        }
        controller.phases.train()
        built = controller.call("model.build", payload, phase="load").wait()
        controller.phases.add(name, trained=self.trained, sharding=self.sharding)
        self.parameters: int = built[0]["parameters"]

    def run(self, batch: Batch, out: dict[str, str], *, top: int = 0) -> Tensor | None:
        """Forward without gradient; out: what the model makes -> name of the token column it becomes.

        top: see Reference.top.
        """
        positions = batch.by_rank()
        plans = batch.microbatches(positions, self.sharding.tokens_per_microbatch)
        payload = [
            {
                "model": self.name,
                "rows": batch.row_ids[where],
                **plan,
                "temperature": batch["temperature"][where],
                "out": out,
            }
            | ({"top": top} if top else {})
            for where, plan in zip(positions, plans, strict=True)
        ]
        current().phases.train(self.name)
        replies = current().call("model.forward", payload, phase=self.phase).wait()
        batch.token_columns |= set(out.values())
        return batch.gather(positions, replies) if replies[0] is not None else None

    def begin_save(self, folder: Path | str, *, background: bool = True) -> None:
        """Have the ranks write what `save` writes; background: in threads, from a copy. `run_saves.collect` says how
        it went, and must be asked before the next one begins."""
        current().phases.train(self.name, optimizer=self.trained)
        out = str(Path(folder).resolve())
        payload = {"model": self.name, "out": out, "background": background}
        current().call("model.save", payload, phase="save").wait()

    def save(self, folder: Path | str) -> None:
        """Write a Hugging Face checkpoint, in the source's dtype, and the trainer state in its trainer/ folder.

        Raises OSError where the disk refuses.
        """
        self.begin_save(folder, background=False)
        written = collect(wait=True)
        if written and written.error:
            raise written.error

    def load(self, folder: Path | str) -> None:
        """Restore what save wrote."""
        self._load(folder, optimizer=self.trained)

    def load_weights(self, folder: Path | str) -> None:
        """Restore of what save wrote the weights alone (float32 masters, if there are any)."""
        self._load(folder, optimizer=False)

    def _load(self, folder: Path | str, *, optimizer: bool) -> None:
        current().phases.train(self.name, optimizer=optimizer, changes=True)
        payload = {"model": self.name, "path": str(folder), "optimizer": optimizer}
        current().call("model.load", payload, phase="load").wait()


class Trained(Network):
    """A network with an optimizer."""

    trained = True

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.learnt: list[Tensor] = []
        """Ids of the rows whose gradient has been accumulated since the last update."""
        self.nonfinite: list[int] = []
        """Those of them whose loss is not finite."""

    def forward_backward(
        self, batch: Batch, loss: Callable[..., Any] | Sequence[Callable[..., Any]]
    ) -> dict[str, float]:
        """Accumulate the gradient of sum(loss * weight) over the batch's loss tokens.

        loss: a module-level function (or partial with keywords) whose positional parameters name columns and which
        returns (loss_S, {name: metric_S}) unreduced, or a RowLoss; several are added up. `weight` is a sample
        column of the batch; rows with weight 0 are left out. Returns the loss and each metric averaged with the same
        weights, under `actor/` names; some under those of TRL and ms-swift as well (ALSO). Raises UserError for a
        column that does not exist.
        """
        replies = self.measure(batch, loss, phase=self.update_phase, train=True)
        return averaged(replies, self.metrics_prefix, ALSO)

    def evaluate(
        self, batch: Batch, loss: Callable[..., Any] | Sequence[Callable[..., Any]]
    ) -> dict[str, float]:
        """What forward_backward returns, under `val/` names, without a gradient."""
        return averaged(self.measure(batch, loss, phase="eval", train=False), "val")

    def measure(
        self,
        batch: Batch,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        phase: str,
        train: bool,
    ) -> list[dict[str, float]]:
        """Each rank's sums of the losses and their metrics; with train, their gradient as well."""
        losses = list(loss) if isinstance(loss, Sequence) else [loss]
        wanted = {"weight", "temperature", "unit"}
        for function in losses:
            names = positional_names(function)
            batch.check_columns(function, names, known=("segment", "ids", *MADE[self.kind]))
            if "logp_top" in names:
                batch.check_token_column("top_ids")
            wanted |= set(names)
        positions = batch.by_rank(keep=batch["weight"] != 0)
        plans = batch.microbatches(positions, self.sharding.tokens_per_microbatch)
        payload = [
            {
                "model": self.name,
                "rows": batch.row_ids[where],
                **plan,
                "losses": [asdict_ref(function) for function in losses],
                "samples": batch.sample_columns(sorted(wanted), where),
                "train": train,
                "log_entropy": self.kind == "policy" and train and current().log_entropy,
            }
            for where, plan in zip(positions, plans, strict=True)
        ]
        current().phases.train(self.name)
        replies = current().call("model.forward_backward", payload, phase=phase).wait()
        rows = [row for reply in replies for row in reply.pop("nonfinite_rows", ())]
        if train:
            self.learnt += [batch.row_ids[where] for where in positions]
            self.nonfinite += rows
        return replies

    def optim_step(
        self, *, lr: float, weight_decay: float = 0.0, max_grad_norm: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step from the accumulated gradient, which is cleared.

        max_grad_norm: clip the global norm to this (0: never). Returns {"actor/grad_norm", "actor/lr"}, in float16
        with "actor/loss_scale" (and no norm where the scaled gradient overflowed and the step was left out). Where
        the loss or the gradient is not finite no rank moves a weight: the update is left out and counted as
        actor/skipped_updates, or, if --run.skip-nonfinite has been reached, NonFiniteError names step and rows.
        """
        payload = {
            "model": self.name,
            "lr": lr,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        current().phases.train(self.name, optimizer=True, changes=True)
        learnt = [row for ids in self.learnt for row in ids.tolist()]
        nonfinite, self.learnt, self.nonfinite = self.nonfinite, [], []
        if nonfinite:
            drop = {"model": self.name}
            current().call("model.drop_gradient", drop, phase=self.update_phase).wait()
            return self.leave_out(f"the loss is not finite; {UNTAKEN}", nonfinite, lr)
        stepped = current().call("model.optim_step", payload, phase=self.update_phase).wait()[0]
        if "fault" in stepped:
            return self.leave_out(stepped["fault"], learnt, lr)
        return {f"{self.metrics_prefix}/{name}": value for name, value in stepped.items()} | {
            f"{self.metrics_prefix}/lr": lr
        }

    def leave_out(self, fault: str, row_ids: Sequence[int], lr: float) -> dict[str, float]:
        """What an update comes to that no rank has taken. NonFiniteError once too many were left out."""
        controller, rows = current(), sorted(set(row_ids))
        shown = ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if rows[8:] else "")
        what = f"step {controller.step}, {self.update_phase} of {self.name}, rows {shown}: {fault}"
        controller.skipped += 1
        if controller.skipped > controller.may_skip:
            remedy = "--run.skip-nonfinite N leaves up to N such updates out"
            if controller.may_skip:
                remedy = f"this is one more than --run.skip-nonfinite {controller.may_skip} allows"
            raise NonFiniteError(f"{what}; {remedy}")
        if controller.skipped == 1:
            print(f"fsdprl: {what}; left out, further ones are counted", file=sys.stderr)
        controller.timeline.count(f"{self.metrics_prefix}/skipped_updates", 1.0)
        return {f"{self.metrics_prefix}/lr": lr}


class Policy(Trained):
    """The model being trained. `logp`, `entropy` and `collision` (heads.py) are what a loss may ask it for."""

    phase = "old_log_p"

    def __init__(self, path: str, *, name: str = "policy", **options: Any) -> None:
        super().__init__(path, name=name, **options)

    def logprobs(self, batch: Batch, *, out: str = "logp_old", entropy: str | None = None) -> None:
        """Log-probability of every loss token at the row's temperature, into token column `out` (and its entropy)."""
        self.run(batch, {"logp": out} | ({"entropy": entropy} if entropy else {}))


class Reference(Network):
    """A frozen policy, which may follow the one being trained. Track it with the run if it does."""

    phase = "reference_model"

    def __init__(
        self,
        path: str,
        *,
        name: str = "reference",
        follow_every: int = 0,
        follow_share: float = 1.0,
        **options: Any,
    ) -> None:
        """follow_every: steps after which it moves towards the policy, 0 for never; follow_share: by how much.
        Raises UserError for a share outside (0, 1]."""
        if follow_every < 0 or not 0 < follow_share <= 1:
            raise UserError(
                "--follow-every must be at least 0, --follow-share above 0 and at most 1"
            )
        super().__init__(path, name=name, **options)
        self.follow_every, self.follow_share = follow_every, follow_share

    @property
    def constant(self) -> bool:
        """Whether it stays as its checkpoint is, so that a run need not save it."""
        return not self.follow_every

    def logprobs(self, batch: Batch, *, out: str = "logp_ref") -> None:
        """Log-probability of every loss token under the frozen model, into token column `out`."""
        self.run(batch, {"logp": out})

    def top(self, batch: Batch, count: int, *, out: str = "logp_teacher_top") -> None:
        """The `count` likeliest words at every loss token under the frozen model: which, into token column `top_ids`,
        and their log-probabilities. A loss may then ask a policy for `logp_top`, its own of the same words."""
        self.run(batch, {"top_ids": "top_ids", "logp_top": out}, top=count)

    def follow(self, policy: Policy, step: int) -> None:
        """At the end of a step: weights = share * the policy's + (1 - share) * its own, if it is time to."""
        if self.constant or (step + 1) % self.follow_every:
            return
        payload = {"model": self.name, "source": policy.name, "share": self.follow_share}
        current().phases.train(self.name, policy.name, changes=True)
        current().call("model.blend", payload, phase="update").wait()


def kl_reference(
    path: str, coef: float, follow_every: int, follow_share: float, **options: Any
) -> Reference | None:
    """The model that a KL with this coefficient is measured from: none where it is 0. options: of Reference.

    Raises UserError for --follow-every without a reference.
    """
    if coef:
        follow = {"follow_every": follow_every, "follow_share": follow_share}
        return Reference(path, **follow, **options)
    if follow_every:
        raise UserError(f"--follow-every {follow_every} has no effect without --kl-coef")
    return None


class Critic(Trained):
    """A value model: one number a token. A loss asks it for `value`."""

    kind = "value"
    phase = "critic_model"
    update_phase = "update_critic"
    metrics_prefix = "critic"

    def __init__(self, path: str, *, name: str = "critic", **options: Any) -> None:
        super().__init__(path, name=name, **options)

    def values(self, batch: Batch, *, out: str = "value_old") -> None:
        """The value of the state before each loss token, into token column `out`."""
        self.run(batch, {"value": out})

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Of advantages before they are whitened, returns and values, and how much of the returns' variance the
        values explain: 1 - var(returns - value_old) / var(returns)."""
        names = {"advantage": "advantages", "returns": "returns", "value_old": "values"}
        over = {column: batch.reduce(column) for column in names}
        metrics = {"critic/vf_explained_var": 0.0}
        if over["returns"].var > 0:  # GAE's returns - value_old are its advantages
            metrics["critic/vf_explained_var"] = 1 - over["advantage"].var / over["returns"].var
        for column, name in names.items():
            metrics |= over[column].summary(f"critic/{name}")
        return metrics


class RewardModel(Network):
    """A sequence-classification checkpoint that scores whole rows, in its own tokens if they are others."""

    kind = "reward"
    phase = "reward_model"

    def __init__(self, path: str, *, name: str = "reward_model", **options: Any) -> None:
        super().__init__(path, name=name, **options)
        self.reads_rows: bool | None = None
        """Whether the policy's tokens are its own; None until it is asked."""

    def score(self, batch: Batch) -> Tensor:
        """One score a row, float64 [N]. Where the checkpoint's tokenizer or chat template is not the policy's, the
        conversations are rendered and encoded anew, each on its rank."""
        if self.reads_rows is None:
            replies = current().call("rows.same_words", {"path": self.path}).wait()
            self.reads_rows = all(replies)
        scores = self.run(batch if self.reads_rows else self.reworded(batch), {})
        assert isinstance(scores, torch.Tensor)
        return scores

    def reworded(self, batch: Batch) -> Batch:
        """The same answers as rows of this model's tokens, on the same ranks and in the same order."""
        Lease.flush()
        lease = Lease(batch.ranks)
        positions = batch.by_rank()
        payload = [
            {"rows": batch.row_ids[where], "row_ids": lease.row_ids[where], "path": self.path}
            for where in positions
        ]
        lengths = batch.gather(
            positions, current().call("rows.reword", payload, phase=self.phase).wait()
        )
        return Batch.of(lease, {"tokens": lengths, "loss_tokens": torch.ones_like(lengths)})


def reward_models(paths: Sequence[str], **options: Any) -> list[RewardModel]:
    """Models for `Rewards`, one a path. options: of each RewardModel."""
    numbered = enumerate(paths, 1)
    return [RewardModel(path, name=f"reward_model_{i}", **options) for i, path in numbered]


class TrainedRewardModel(Trained):
    """A reward model being trained: one number a row. A loss asks it for `score`."""

    kind = "reward"
    phase = "reward_model"

    def __init__(self, path: str, *, name: str = "reward_model", **options: Any) -> None:
        super().__init__(path, name=name, **options)
