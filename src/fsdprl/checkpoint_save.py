"""Writing checkpoints: a plan (pure), a snapshot of this rank's shards on the host, and its bytes.

`save_plan` fixes every byte's place from the source checkpoint's headers and the model's shapes, the
same on all ranks. `take_snapshot` copies this rank's ranges to host memory. `write_snapshot` touches
files only, so it can run in a thread while training goes on.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdprl.checkpoint_files import find_checkpoint
from fsdprl.hf_layout import HfLayout, Item, class_name, layout_of
from fsdprl.safetensors_file import (
    INDEX,
    SINGLE,
    Entry,
    FileLayout,
    Stored,
    Tally,
    read_stored,
    split_by_size,
    stored_files,
    sync_folder,
    write_header,
    write_ranges,
    write_whole,
)
from fsdprl.shards import LocalShard, as_dtype, clean_name, is_lead, model_shards, tensor_shards

Put = Callable[[Path, Iterable[tuple[int, Tensor]], Tally], None]
"""Writes (byte position, contiguous CPU tensor) chunks into a file."""
FILE_BYTES = 5_000_000_000
# What a checkpoint has beside its weights, as transformers and vLLM read it.
SIDE_FILES = (
    "generation_config.json",
    "*token*.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
)


@dataclass(frozen=True)
class SavePlan:
    """Where every byte of a checkpoint goes. The same on all ranks, and good for every later save."""

    layouts: tuple[FileLayout, ...]
    texts: dict[str, bytes]
    """Small files the lead rank writes: config.json and the index."""
    side_files: dict[str, Path]
    """Files the lead rank copies as they are: tokenizer, chat template, generation config."""


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint, in host memory."""

    plan: SavePlan
    chunks: list[tuple[int, int, Tensor]]
    """(number of the file, byte position in it, contiguous CPU tensor)"""
    lead: bool
    """Whether this rank writes headers and small files."""


def save_plan(
    model: Any, source: str | Path | None, *, dtype: str | torch.dtype | None = None
) -> SavePlan:
    """Lay out the checkpoint of `model.hf`: tensor names, files, order and dtypes of `source`.

    source: the checkpoint the model was loaded from; None writes published names in files of at
    most 5 GB with the model's own config. dtype: of all floating-point tensors; None keeps the
    source's (the model's where there is no source).
    A head that the source lacks is added to its last file, and config.json then names the model's
    class; otherwise config.json is the source's to the byte, unless `dtype` changes it. Tensors of
    the source that the model does not have (a language model's head under a value head, extra
    prediction layers) are left out.
    Raises UserError if the source is no safetensors checkpoint.
    """
    layout = layout_of(model)
    wanted = as_dtype(dtype) if dtype is not None else None
    if source is None:
        entries = [
            _entry(item, wanted or layout.shards[item.param].local.dtype) for item in layout.items()
        ]
        layouts = split_by_size(SINGLE.removesuffix(".safetensors"), entries, FILE_BYTES)
        config = _config({}, layout.hf, wanted, new_head=True)
        index = _index(layouts, {}) if len(layouts) > 1 else {}
        return SavePlan(tuple(layouts), {"config.json": config, **index}, {})
    folder = find_checkpoint(str(source)).folder
    stored = read_stored(stored_files(folder))
    entries, new_head = _entries_of_source(layout, stored, wanted)
    layouts = [FileLayout.of(file, group) for file, group in entries.items()]
    config = (folder / "config.json").read_bytes()
    if new_head or wanted is not None:
        config = _config(json.loads(config), layout.hf, wanted, new_head=new_head)
    texts = {"config.json": config}
    if (folder / INDEX).is_file():
        texts |= _index(layouts, json.loads((folder / INDEX).read_text()).get("metadata") or {})
    side = {
        str(file.relative_to(folder)): file
        for pattern in SIDE_FILES
        for file in sorted(folder.glob(pattern))
        if file.is_file()
    }
    return SavePlan(tuple(layouts), texts, side)


def _entries_of_source(
    layout: HfLayout, stored: Mapping[str, Stored], dtype: torch.dtype | None
) -> tuple[dict[str, list[Entry]], bool]:
    """File name -> entries in the source's order, and whether the model has or lacks a head of it."""
    matched = {param: layout.present(param, stored) for param in layout.shards}
    items = {item.name: item for found in matched.values() for items in found for item in items}
    entries: dict[str, list[Entry]] = {}
    for name, where in stored.items():
        if name in items:
            kept = where.dtype if dtype is None or not where.dtype.is_floating_point else dtype
            entries.setdefault(where.file.name, []).append(_entry(items[name], kept))
    common = Counter(where.dtype for where in stored.values()).most_common(1)[0][0]
    added = [
        _entry(item, dtype or common)
        for param, found in matched.items()
        if not found
        for item in layout.canonical(param)
    ]
    entries[next(reversed(entries))] += added
    return entries, bool(added)


def _entry(item: Item, dtype: torch.dtype) -> Entry:
    return Entry(item.name, dtype, item.shape, item.param, item.start)


def _index(layouts: list[FileLayout], metadata: dict[str, Any]) -> dict[str, bytes]:
    """model.safetensors.index.json, as transformers writes it."""
    entries = {entry.name: layout.name for layout in layouts for entry in layout.entries}
    size = sum(entry.nbytes for layout in layouts for entry in layout.entries)
    index = {"metadata": metadata | {"total_size": size}, "weight_map": entries}
    return {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def _config(config: dict[str, Any], hf: Any, dtype: torch.dtype | None, *, new_head: bool) -> bytes:
    """config.json with the model's class and head where they are not the source's, and the dtype."""
    own = json.loads(hf.config.to_json_string(use_diff=True))
    config = dict(config or own)
    if new_head:
        config["architectures"] = [class_name(hf)]
        config |= {key: own[key] for key in ("id2label", "label2id", "pad_token_id") if key in own}
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype)[len("torch.") :]
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def tensors_plan(
    tensors: Mapping[str, Tensor], *, stem: str = "optimizer", max_bytes: int = FILE_BYTES
) -> SavePlan:
    """Lay out named tensors (optimizer state, fp32 masters) as `stem`.safetensors, global shapes."""
    entries = [
        Entry(name, tensor.dtype, tuple(tensor.shape), name, 0) for name, tensor in tensors.items()
    ]
    return SavePlan(tuple(split_by_size(stem, entries, max_bytes)), {}, {})


def take_snapshot(model: Any, plan: SavePlan) -> Snapshot:
    """Copy this rank's ranges to host memory, in the dtypes of the files. No communication.

    model: what the plan was made from, a model (its `.hf`) or a mapping of tensors. The snapshot
    owns its memory: about the bytes of the checkpoint over the number of ranks.
    """
    return Snapshot(plan, list(_chunks(_shards_of(model), plan, own=True)), _is_lead(model))


def write_snapshot(
    snapshot: Snapshot,
    out_dir: str | Path,
    moved: Callable[[], None] = lambda: None,
    *,
    put: Put = write_ranges,
) -> dict[str, Tally]:
    """Write this rank's bytes into the files under `out_dir` and fsync them. No communication.

    The checkpoint is complete when every rank has returned. Returns what it wrote, by path, hashed on the way.
    moved: called after each piece. put: how this rank's ranges get there. Raises OSError naming the file.
    """
    return _write(iter(snapshot.chunks), snapshot.plan, Path(out_dir), snapshot.lead, moved, put)


def stream_snapshot(
    model: Any,
    plan: SavePlan,
    out_dir: str | Path,
    moved: Callable[[], None] = lambda: None,
    *,
    put: Put = write_ranges,
) -> dict[str, Tally]:
    """`take_snapshot` and `write_snapshot` in one, parameter by parameter: extra memory is one shard."""
    chunks = _chunks(_shards_of(model), plan, own=False)
    return _write(chunks, plan, Path(out_dir), _is_lead(model), moved, put)


def save_checkpoint(
    model: Any,
    source_path: str | Path | None,
    out_dir: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    dtype: str | torch.dtype | None = None,
) -> None:
    """Write `model.hf` as a Hugging Face checkpoint like `source_path` (see `save_plan`) and wait.

    Streams parameter by parameter: extra memory is one shard. group: the ranks of the model, which
    leave together once all bytes are on disk; None returns when this rank's are.
    """
    stream_snapshot(model, save_plan(model, source_path, dtype=dtype), out_dir)
    if group is not None:
        dist.barrier(group)


def save_tensors(
    tensors: Mapping[str, Tensor],
    out_dir: str | Path,
    *,
    stem: str = "optimizer",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write named tensors (DTensors as their global tensors) as safetensors, each rank its ranges.

    `load_tensors` reads them back at any number of ranks. group: as in `save_checkpoint`.
    """
    stream_snapshot(tensors, tensors_plan(tensors, stem=stem), out_dir)
    if group is not None:
        dist.barrier(group)


def narrowed_tensors(model: Any, plan: SavePlan) -> dict[str, Tensor]:
    """Parameters that the plan's files hold in another dtype than the model does, by name.

    What an exact resume needs besides the checkpoint: the fp32 masters of a bf16 one. They go through
    `save_tensors` and, filled in place, `load_tensors`.
    """
    stored = {entry.param: entry.dtype for layout in plan.layouts for entry in layout.entries}
    hf = getattr(model, "hf", model)
    named = ((clean_name(name), value) for name, value in hf.named_parameters())
    return {name: value for name, value in named if stored[name] != value.dtype}


def _shards_of(model: Any) -> dict[str, LocalShard]:
    return tensor_shards(model) if isinstance(model, Mapping) else model_shards(model)


def _is_lead(model: Any) -> bool:
    return is_lead(
        model.values() if isinstance(model, Mapping) else getattr(model, "hf", model).parameters()
    )


def _chunks(
    shards: Mapping[str, LocalShard], plan: SavePlan, *, own: bool
) -> Iterator[tuple[int, int, Tensor]]:
    """(file number, byte position, CPU tensor) of every range this rank writes, file by file."""
    for number, layout in enumerate(plan.layouts):
        for entry, offset in zip(layout.entries, layout.offsets, strict=True):
            shard = shards[entry.param]
            a, b = shard.overlap(entry.start, entry.numel)
            if a < b and shard.writer:
                part = shard.view(entry.start + a, b - a)
                if own or part.device.type != "cpu" or part.dtype != entry.dtype:
                    part = torch.empty(b - a, dtype=entry.dtype).copy_(part)
                yield number, offset + a * entry.dtype.itemsize, part


def _write(
    chunks: Iterator[tuple[int, int, Tensor]],
    plan: SavePlan,
    out_dir: Path,
    lead: bool,
    moved: Callable[[], None],
    put: Put,
) -> dict[str, Tally]:
    """Nobody waits for anybody: each rank creates the files it needs, and ranges do not meet."""
    if put is write_ranges:
        out_dir.mkdir(parents=True, exist_ok=True)
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    if lead:
        for layout in plan.layouts:
            write_header(out_dir / layout.name, layout, tallies[str(out_dir / layout.name)])
        small = plan.texts | {name: file.read_bytes() for name, file in plan.side_files.items()}
        for name, data in small.items():
            write_whole(out_dir / name, data, tallies[str(out_dir / name)])

    def pieces(of_file: Iterator[tuple[int, int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        for _, position, tensor in of_file:
            yield position, tensor
            moved()

    for number, of_file in groupby(chunks, key=lambda chunk: chunk[0]):
        path = out_dir / plan.layouts[number].name
        put(path, pieces(of_file), tallies[str(path)])
    if lead:
        sync_folder(out_dir)
    return dict(tallies)
