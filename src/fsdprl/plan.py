"""How many prompts, samples, minibatches and optimizer steps a run makes."""

import math
from dataclasses import dataclass

from fsdprl.errors import UserError


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run; UserError naming the flag where it does not work out.

    `steps` wins over `epochs`; 0 takes as many whole steps as `epochs` passes over the rows need.
    Rows left over by an epoch begin the next one, so no row is dropped.
    """

    rows: int
    """Prompts (or examples) to train on, after filtering."""
    prompts_per_step: int
    """P."""
    group_size: int = 1
    """G, samples of each prompt."""
    minibatches: int = 1
    """Optimizer steps of each pass over a step's samples."""
    steps: int = 0
    """Steps of the whole run; after construction always the resolved number."""
    epochs: float = 0.0
    """Passes over the rows; after construction always what the steps amount to."""
    flag: str = "--prompts-per-step"
    """What the recipe calls prompts_per_step, for messages."""
    passes: int = 1
    """Over the samples of a step."""

    def __post_init__(self) -> None:
        at_least = {
            self.flag: self.prompts_per_step,
            "--group-size": self.group_size,
            "--minibatches": self.minibatches,
            "--passes": self.passes,
        }
        for flag, value in at_least.items():
            if value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if self.steps < 0 or self.epochs < 0:
            raise UserError("--steps and --epochs must not be negative")
        if self.rows < 1:
            raise UserError("--data: no rows to train on")
        if self.prompts_per_step > self.rows:
            raise UserError(
                f"{self.flag} {self.prompts_per_step}: --data has only {self.rows} rows "
                f"to train on; a step takes each at most once"
            )
        if self.minibatches > self.samples:
            raise UserError(
                f"--minibatches {self.minibatches}: a step has only {self.samples} samples "
                f"({self.flag} {self.prompts_per_step} x --group-size {self.group_size})"
            )
        if not self.steps and not self.epochs:
            raise UserError("--steps or --epochs must say how long to train")
        steps = self.steps or math.floor(self.rows * self.epochs / self.prompts_per_step + 1e-9)
        if not steps:
            raise UserError(
                f"--epochs {self.epochs:g}: {self.rows} rows make less than one step of "
                f"{self.flag} {self.prompts_per_step}"
            )
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "epochs", steps * self.prompts_per_step / self.rows)

    @property
    def samples(self) -> int:
        """N = P * G, samples of a step."""
        return self.prompts_per_step * self.group_size

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.minibatches * self.passes

    def describe(self) -> list[str]:
        """The arithmetic in words, for the start of a run and for --dry-run."""
        low, rest = divmod(self.samples, self.minibatches)
        each = f"{low}" if not rest else f"{low} to {low + 1}"
        prompts = (
            ""
            if self.group_size == 1
            else f"{self.prompts_per_step:,} prompts x {self.group_size} = "
        )
        again = f", {self.passes} passes over them" if self.passes > 1 else ""
        return [
            f"a step: {prompts}{self.samples:,} samples, {self.minibatches} "
            f"minibatch{'es' if self.minibatches > 1 else ''} of {each} samples{again}",
            f"the run: {self.steps:,} steps, {self.steps * self.samples:,} samples, "
            f"{self.optimizer_steps:,} optimizer steps, {self.epochs:.3g} epochs of {self.rows:,} rows",
        ]
