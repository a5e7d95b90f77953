"""Preferences: pairs of completions, or labelled ones, as batches of rows. The controller knows them by number."""

import copy
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fsdprl.batch import Batch
from fsdprl.controller import current
from fsdprl.data import order
from fsdprl.data.preference_rows import PreferenceFormat, PreferenceRows
from fsdprl.errors import UserError
from fsdprl.examples import Examples


class Preferences:
    """What a step trains on, a pure function of (seed, step), counted in pairs or in single completions.

    A batch has two rows a pair, the chosen one first, with sample columns `chosen` (bool), `unit` (the same for
    both) and `margin`; or one row a completion, with `desirable` (bool). `completion` numbers them across files.

    Attributes: `examples`, the completions of the file; `paired`; `offset`, number of its first completion.
    """

    def __init__(
        self,
        form: PreferenceFormat,
        *,
        paired: bool,
        seed: int = 0,
        workers: int = 0,
        flag: str = "--data",
    ) -> None:
        """paired: whether pairs stay together; single completions can come from a file of pairs, too. workers: of
        `Examples`.

        Raises UserError with file:line, field and value for the first row that is none.
        """
        self.examples = Examples(form, seed=seed, workers=workers, flag=flag)
        assert isinstance(self.examples.source, PreferenceRows)
        self.source = self.examples.source
        if paired and not self.source.paired:
            raise UserError(
                f"{flag} {form.path}: needs pairs, but its rows have one completion each: "
                f"recipes/kto.py learns from those"
            )
        self.paired, self.seed, self.offset = paired, seed, 0
        self._kept = np.arange(len(self.source) // (2 if paired else 1), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._kept)

    def measure(self) -> "Preferences":
        """Have the ranks measure every completion, and leave out what is too long, pairs as a whole."""
        kept = copy.copy(self)
        kept.examples = self.examples.measure()
        if current().flags.dry_run:
            return kept
        there = kept.examples.indices
        kept._kept = there
        if self.paired:
            pairs, count = np.unique(there // 2, return_counts=True)
            kept._kept = pairs[count == 2]
        if not len(kept):
            raise UserError(f"{self.examples.name}: --max-length leaves no pair of completions")
        return kept

    def split(self, share: float) -> tuple["Preferences", "Preferences"]:
        """(to train on, held out), drawn by seed alone. Raises UserError for an impossible share."""
        try:
            parts = order.split(self._kept, share, self.seed)
        except ValueError as error:
            raise UserError(f"--eval-share: {error}") from None
        train, held_out = copy.copy(self), copy.copy(self)
        train._kept, held_out._kept = parts
        return train, held_out

    def at(self, step: int, count: int) -> npt.NDArray[np.int64]:
        """Pairs (or completions) [count] of a step when every step takes `count`; passes are reshuffled."""
        return self._kept[order.window(len(self), self.seed, step * count, count)]

    def all(self) -> npt.NDArray[np.int64]:
        """Every one of them, in the order of the file."""
        return self._kept

    def batch(self, step: int, count: int) -> Batch:
        """The rows of a step, resident and spread evenly over the ranks by tokens, pairs together."""
        fed = self.examples.feed(self._kept, step, count, per=2 if self.paired else 1)
        batch = self.load(self.at(step, count), fed)
        current().timeline.count("tokens", float(batch["tokens"].sum()))
        return batch

    def load(self, wanted: npt.NDArray[np.int64], fed: dict[str, Any] | None = None) -> Batch:
        """These pairs (or completions) as a batch, in this order. fed: see `Examples.load`."""
        if not self.paired:
            batch = self.examples.load(wanted, fed=fed)
            batch["completion"] = batch["example"] + self.offset
            batch["desirable"] = torch.tensor([self.source.better(i) for i in wanted.tolist()])
            return batch
        rows = np.stack((2 * wanted, 2 * wanted + 1), axis=1).reshape(-1)
        units = (np.arange(len(rows)) // 2).tolist()
        batch = self.examples.load(rows, units=units, fed=fed)
        batch["completion"] = batch["example"] + self.offset
        batch["unit"] = batch.row_ids[::2].repeat_interleave(2)
        batch["chosen"] = torch.arange(len(rows)) % 2 == 0
        batch["margin"] = torch.tensor([self.source.margin(i) for i in rows.tolist()]).double()
        return batch

    def mismatched(self, wanted: npt.NDArray[np.int64]) -> Batch:
        """Each completion's prompt with the next one's completion: what KTO's baseline is estimated on."""
        assert not self.paired
        return self.examples.load(wanted, answers=np.roll(wanted, -1))


def preference_sets(
    form: PreferenceFormat,
    eval_data: str,
    eval_share: float,
    *,
    paired: bool,
    seed: int,
    workers: int = 0,
) -> tuple[Preferences, Preferences]:
    """(to train on, held out): from eval_data if there is one, else a share. Measured on the ranks."""
    train = Preferences(form, paired=paired, seed=seed, workers=workers).measure()
    if eval_data:
        form = dataclasses.replace(form, path=eval_data)
        held_out = Preferences(form, paired=paired, flag="--eval-data").measure()
        held_out.offset = len(train.source)
        return train, held_out
    return train.split(eval_share)
