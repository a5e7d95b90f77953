"""References that need no second model: log-probs computed before training, or a uniform reference."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from fsdprl.batch import Batch
from fsdprl.policy import Policy
from fsdprl.preferences import Preferences
from fsdprl.segments import segment_position

FILE = "reference.safetensors"
AT_ONCE = 1024
"""Pairs that are resident together while their log-probs are computed."""


class PrecomputedReference:
    """The initial policy's log-prob of every completion, one number each. Track it with the run.

    Used like a Reference. A completion's sum stands on its first token and the others have 0, which is
    exact for losses of sums over completions, and for no others.
    """

    def __init__(self, policy: Policy, *sets: Preferences) -> None:
        self.policy, self.sets = policy, sets
        self.sums = torch.full(
            (max(s.offset + len(s.source) for s in sets),), float("nan")
        ).double()
        self.ready = False

    @property
    def steady(self) -> bool:
        """Once computed it stays, so that a signal need not wait for the end of a step."""
        return self.ready

    def prepare(self) -> None:
        """Compute them, if they are neither computed nor restored: before the first update."""
        for pairs in () if self.ready else self.sets:
            for part in range(0, len(pairs), AT_ONCE):
                batch = pairs.load(pairs.all()[part : part + AT_ONCE])
                self.policy.logprobs(batch, out="logp_ref")
                self.sums[batch["completion"]] = batch.row_sum("logp_ref")
        self.ready = True

    def logprobs(self, batch: Batch) -> None:
        """Their token column `logp_ref`."""
        assert self.ready, "prepare() first"
        batch["logp_ref_sum"] = self.sums[batch["completion"]]
        batch.apply(on_first_token, out="logp_ref")

    def follow(self, policy: Policy, step: int) -> None:
        """It stays."""

    def save(self, folder: Path) -> None:
        """Write the sums."""
        # Not save_file: what the disk refuses must be an OSError, after which the run tries again.
        (folder / FILE).write_bytes(save({"sums": self.sums}))

    def load(self, folder: Path) -> None:
        """Restore what save wrote."""
        self.sums, self.ready = load_file(folder / FILE)["sums"], True


class UniformReference:
    """The reference of reference-free losses: every completion is equally likely."""

    constant = True

    def logprobs(self, batch: Batch) -> None:
        """A token column `logp_ref` of zeros."""
        batch["logp_ref_sum"] = 0.0
        batch.apply(on_first_token, out="logp_ref")

    def follow(self, policy: Policy, step: int) -> None:
        """It stays."""


def on_first_token(logp_ref_sum: Tensor, segment: Tensor) -> Tensor:
    """A completion's number on its first token, 0 on the others: [S]."""
    return torch.where(segment_position(segment) == 0, logp_ref_sum, torch.zeros_like(logp_ref_sum))
