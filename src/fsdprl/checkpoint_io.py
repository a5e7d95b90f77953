"""Hugging Face checkpoints into DTensor shards and back, never a whole model in one place.

Every rank reads the slices it owns, and writes the byte ranges it owns into files whose layout all
ranks compute alike: no gather and no collective, so a snapshot can be written behind the training's
back. All ranks of a model must see the same folders; where hosts share no disk, `ferry.py` sees to that.
This file reads; checkpoint_save.py writes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fsdprl.checkpoint_files import find_checkpoint
from fsdprl.checkpoint_save import (
    SavePlan,
    Snapshot,
    narrowed_tensors,
    save_checkpoint,
    save_plan,
    save_tensors,
    stream_snapshot,
    take_snapshot,
    tensors_plan,
    write_snapshot,
)
from fsdprl.errors import UserError
from fsdprl.hf_layout import HfLayout, Item, class_name, hf_items, layout_of
from fsdprl.safetensors_file import Stored, open_file, read_stored, stored_files
from fsdprl.shards import LocalShard, tensor_shards

__all__ = [
    "SavePlan",
    "Snapshot",
    "hf_items",
    "load_tensors",
    "load_weights",
    "narrowed_tensors",
    "save_checkpoint",
    "save_plan",
    "save_tensors",
    "stream_snapshot",
    "take_snapshot",
    "tensors_plan",
    "write_snapshot",
]

READ_BYTES = 16 << 20
ANY_TENSORS = TypeVar("ANY_TENSORS", bound=Mapping[str, Tensor])


def load_weights(model: Any, path: str | Path) -> list[str]:
    """Fill the shards of `model.hf` from the safetensors of `path`, cast to each parameter's dtype.

    Returns the parameters that the checkpoint does not have and that keep what they hold: only a
    score or value head (`model.kind` "reward" or "value") may be among them; the language model's
    own head is then not read. Local: every rank reads its slices, at most 16 MB at a time.

    Raises UserError for missing, unexpected or wrongly shaped tensors (up to five of them, with
    the file), for damaged files, and for what is no safetensors checkpoint.
    """
    folder = find_checkpoint(str(path)).folder
    stored = read_stored(stored_files(folder))
    layout = layout_of(model)
    shards = layout.shards
    matched = {param: layout.present(param, stored) for param in shards}
    fresh = [param for param, found in matched.items() if not found]
    items = [item for found in matched.values() for items in found for item in items]
    new_head = getattr(model, "kind", "policy") != "policy"
    _check_missing(layout, folder, stored, fresh, new_head)
    _check_unexpected(layout, folder, stored, items, new_head)
    _check_shapes(items, stored)
    first = [item for found in matched.values() if found for item in found[0]]
    for item, values in _local_parts(first, shards, stored):
        item.copy_(values)
    again = [found[k][0] for found in matched.values() for k in range(1, len(found))]
    for mine, values in _local_parts(again, shards, stored):
        if not mine.equal(values.to(mine.device, mine.dtype)):
            names = ", ".join(item.name for item in again)
            raise UserError(
                f"{folder}: {names} must equal the weight that config.json ties it to, and does "
                f"not; set tie_word_embeddings to false in config.json"
            )
    return fresh


def load_tensors(tensors: ANY_TENSORS, path: str | Path, *, stem: str = "optimizer") -> ANY_TENSORS:
    """Fill `tensors` (DTensors or plain ones) in place from what `save_tensors` wrote; returns them.

    The number of ranks may have changed since. Local, no communication. Raises UserError if a
    tensor is missing, unexpected or of another shape, or a file is damaged.
    """
    folder = Path(path)
    files = sorted(folder.glob(f"{stem}.safetensors")) + sorted(folder.glob(f"{stem}-*-of-*"))
    if not files:
        raise UserError(f"{folder}: no {stem}.safetensors there")
    stored = read_stored(files)
    shards = tensor_shards(tensors)
    for one, other, verb in ((shards, stored, "lacks"), (stored, shards, "has unexpected")):
        names = [name for name in one if name not in other]
        if names:
            raise UserError(f"{folder}/{stem} {verb} {_few(names)}; is it of another model?")
    items = [Item(name, shard.shape, name, 0) for name, shard in shards.items()]
    _check_shapes(items, stored)
    for mine, values in _local_parts(items, shards, stored):
        mine.copy_(values)
    return tensors


def _check_missing(
    layout: HfLayout,
    folder: Path,
    stored: Mapping[str, Stored],
    fresh: list[str],
    new_head: bool,
) -> None:
    ignored = _matcher(getattr(layout.hf, "_keys_to_ignore_on_load_missing", None))
    missing = [
        item.name
        for param in fresh
        if not ignored(param) and not (new_head and layout.is_head(param))
        for item in layout.canonical(param)
        if item.name not in stored
    ]
    if missing:
        raise UserError(
            f"{folder} lacks {_few(missing)} (it has {len(stored)} tensors, and its config.json "
            f"describes a {class_name(layout.hf)}); do config.json and the weights belong together?"
        )


def _check_unexpected(
    layout: HfLayout,
    folder: Path,
    stored: Mapping[str, Stored],
    items: list[Item],
    new_head: bool,
) -> None:
    used = {item.name for item in items}
    declared = getattr(layout.hf, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = _matcher([*declared, r"rotary_emb\.inv_freq$"])
    unexpected = [
        f"{name} ({where.file.name})"
        for name, where in stored.items()
        if name not in used and not ignored(name) and not (new_head and layout.is_head(name))
    ]
    if unexpected:
        raise UserError(
            f"{folder} holds tensors that a {class_name(layout.hf)} does not have: "
            f"{_few(unexpected)}; do config.json and the weights belong together?"
        )


def _check_shapes(items: Iterable[Item], stored: Mapping[str, Stored]) -> None:
    wrong = [
        f"{item.name} is {list(stored[item.name].shape)} in {stored[item.name].file} where the "
        f"model has {list(item.shape)}"
        for item in items
        if item.shape != stored[item.name].shape
    ]
    if wrong:
        raise UserError(f"{_few(wrong)}; do config.json and the weights belong together?")


def _local_parts(
    items: Iterable[Item], shards: Mapping[str, LocalShard], stored: Mapping[str, Stored]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(flat view of this rank's elements, their values on disk) of every item, in bounded pieces.

    In the order of the bytes on disk, each file opened once.
    """
    order = {name: position for position, name in enumerate(stored)}
    items = sorted(items, key=lambda item: order[item.name])
    for file, of_file in groupby(items, key=lambda item: stored[item.name].file):
        with open_file(file) as handle:
            for item in of_file:
                shard = shards[item.param]
                a, b = shard.overlap(item.start, item.numel)
                if a == b:
                    continue
                for position, values in _read(handle, item, stored[item.name], a, b):
                    yield shard.view(item.start + position, values.numel()), values


def _read(handle: Any, item: Item, where: Stored, a: int, b: int) -> Iterator[tuple[int, Tensor]]:
    """Flat elements [a, b) of a stored tensor as (position in it, values), rows at a time."""
    if not item.shape:
        yield 0, handle.get_tensor(item.name).view(-1)
        return
    width = item.numel // item.shape[0]
    rows = max(1, READ_BYTES // (width * where.dtype.itemsize))
    assert a % width == 0 and b % width == 0, f"{item.name}: a shard ends inside a row"
    part = handle.get_slice(item.name)
    for row in range(a // width, b // width, rows):
        yield row * width, part[row : min(row + rows, b // width)].reshape(-1)


def _matcher(expressions: Iterable[str] | None) -> Callable[[str], bool]:
    compiled = [re.compile(text) for text in expressions or ()]
    return lambda name: any(expression.search(name) for expression in compiled)


def _few(texts: list[str]) -> str:
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return ", ".join(texts[:5]) + more
