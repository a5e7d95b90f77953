"""Run by test_checkpoint_ranks.py under torchrun: load, save, stream and named tensors on real shards.

checkpoint_ranks.py WORK_DIR, where WORK_DIR/<name>/source are checkpoints
"""

import gc
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sharded import build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fsdprl import stream
from fsdprl.checkpoint_io import (
    load_tensors,
    load_weights,
    save_checkpoint,
    save_plan,
    save_tensors,
    take_snapshot,
    write_snapshot,
)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made under it that are alive, and their peak. Not what the allocator
    keeps and not the process's: only what the code under test holds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if is_plain(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in known and id(storage) not in self.seen:
                    self.seen.add(id(storage))
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.freed, id(storage), storage.nbytes())
        return out

    def freed(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.now -= nbytes


def is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def stored(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def check_load(model, source: Path, mesh: DeviceMesh) -> None:
    auto = AutoModelForCausalLM
    if model.kind == "reward":
        auto = AutoModelForSequenceClassification
    reference = dict(auto.from_pretrained(source, dtype=torch.float32).named_parameters())
    shares = [(p.to_local().numel(), p.numel()) for p in model.hf.parameters()]
    mine, whole = (sum(numbers) for numbers in zip(*shares, strict=True))
    assert mine < 0.75 * whole or mesh.size(-1) == 1
    for name, parameter in model.hf.named_parameters():
        assert torch.equal(parameter.full_tensor(), reference.pop(name)), name
    assert not reference


def check_stream(model, source: Path, mesh: DeviceMesh) -> None:
    group = mesh.get_group("shard")
    for dtype, bucket_bytes in ((torch.float32, 3000), (torch.bfloat16, 1 << 20)):
        want = {name: value.to(dtype) for name, value in stored(source).items()}
        buckets = list(weights(model, dtype, bucket_bytes, group))
        got = dict(pair for bucket in buckets for pair in bucket.tensors)
        assert got.keys() == want.keys(), got.keys() ^ want.keys()
        for name in want:
            assert got[name].dtype == dtype and torch.equal(got[name], want[name]), name
        if mesh.size(-1) > 1:  # kept to the end of the stream, they still own their memory
            storages = {value.untyped_storage().data_ptr() for value in got.values()}
            assert len(storages) == len(got)
        sums = stream.shard_checksums(model, dtype=dtype, group=group)
        assert sums == {name: stream.tensor_checksum(value) for name, value in want.items()}
        check_parts(model, want, dtype, group)
        check_one_change(model, sums, dtype, mesh)
        load_weights(model, source)


def check_parts(model, want: dict, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Rows of every large tensor put together are the tensor, whatever rank they came from."""
    got = {name: torch.full_like(value, float("nan")) for name, value in want.items()}
    seen, sums = dict.fromkeys(want, 0), dict.fromkeys(want, 0)
    for bucket in weights(model, dtype, 300, group, divisible=want.keys()):
        for name, value in bucket.tensors:
            got[name] = value
            seen[name] += len(value)
        for part in bucket.parts:
            got[part.name][part.first_row :][: len(part.rows)] = part.rows
            seen[part.name] += len(part.rows)
            sums[part.name] += stream.part_checksum(part.rows, part.first_row)
    assert seen == {name: len(value) for name, value in want.items()}
    assert sum(value != 0 for value in sums.values()) > 3
    for name, value in want.items():
        assert torch.equal(got[name], value), name
        assert not sums[name] or (sums[name] - stream.tensor_checksum(value)) % 2**64 == 0


def check_one_change(model, sums: dict[str, int], dtype: torch.dtype, mesh: DeviceMesh) -> None:
    """One element on one rank is enough to notice, in its replica."""
    leader = mesh.mesh.flatten()[0].item()
    if dist.get_rank() == leader:
        with torch.no_grad():
            next(iter(model.hf.parameters())).to_local().view(-1)[5] += 1
    changed = stream.shard_checksums(model, dtype=dtype)
    different = {name for name in sums if sums[name] != changed[name]}
    same_replica = not any(mesh.get_coordinate()[:-1])
    assert different == ({"model.embed_tokens.weight"} if same_replica else set())


def weights(model, dtype, bucket_bytes, group=None, **options):
    return stream.weight_stream(
        model, dtype=dtype, bucket_bytes=bucket_bytes, group=group, **options
    )


def check_small_buffers(model, source: Path) -> None:
    """Gathers that cut tensors, rows and elements' alignment anywhere give the same tensors."""
    kept, stream.GATHER_BYTES = stream.GATHER_BYTES, 200
    try:
        got = dict(p for b in weights(model, torch.bfloat16, 1) for p in b.tensors)
        for name, value in stored(source).items():
            assert torch.equal(got[name], value.bfloat16()), name
    finally:
        stream.GATHER_BYTES = kept


def check_memory(model, source: Path) -> None:
    """What streaming, saving and loading hold is bounded by buckets and shards, not by the model."""
    bucket_bytes = 8000
    whole = sum(value.nbytes for value in stored(source).values())
    largest = max(value.nbytes for value in stored(source).values())
    names = stored(source).keys()
    gc.collect()
    with LiveBytes() as live:
        total = 0
        for bucket in weights(model, torch.float32, bucket_bytes):
            total += sum(value.nbytes for _, value in bucket.tensors)
            del bucket
    assert total == whole
    bound = 3 * max(bucket_bytes, largest)  # the bucket and the two buffers
    assert largest <= live.peak <= bound, (live.peak, bound)
    assert bound < whole / 8, "the test needs a larger model"
    with LiveBytes() as live:
        for bucket in weights(model, torch.float32, bucket_bytes, divisible=names):
            assert sum(value.nbytes for _, value in bucket.tensors) <= bucket_bytes
            del bucket
    assert largest > 1.5 * bucket_bytes and live.peak <= 3.2 * bucket_bytes, live.peak
    with LiveBytes() as live:
        stream.shard_checksums(model, dtype=torch.bfloat16)
    assert live.peak <= bound, live.peak


def check_save(model, folder: Path, case: str, group: dist.ProcessGroup) -> None:
    source = folder / "source"
    save_checkpoint(model, source, folder / f"saved-{case}", group=group)
    snapshot = take_snapshot(model, save_plan(model, source))
    own = sum(chunk.nbytes for _, _, chunk in snapshot.chunks)
    whole = sum(value.nbytes for value in stored(source).values())
    assert own <= whole * (0.75 if group.size() > 1 else 1)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.to_local().zero_()
    write_snapshot(snapshot, folder / f"snapshot-{case}")
    load_weights(model, source)


def check_tensors(work: Path, case: str, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """State written by one rank count is read by another, uneven and empty shards included."""
    one_rank = load_file(work / "state" / "optimizer.safetensors")
    placements = [Replicate(), Shard(0)][-mesh.ndim :]
    state = {
        name: distribute_tensor(torch.zeros_like(value), mesh, placements, src_data_rank=None)
        if value.dim()
        else torch.zeros_like(value)
        for name, value in one_rank.items()
    }
    load_tensors(state, work / "state")
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, one_rank[name]), name
    save_tensors(state, work / f"state-{case}", group=group)


CASES = {
    # 4 ranks in all, so that one launch serves: (mesh ranks, checkpoints)
    "one": ([3], ["tied", "moe"]),
    "two": ([1, 2], ["tied", "untied_large", "bf16", "moe", "reward"]),
    "three": ([0, 1, 2], ["tied", "bf16", "moe"]),  # 100 rows, 4 experts: the last rank has none
    "replicas": ([[0, 1], [2, 3]], ["tied", "moe"]),
}


def main() -> None:
    work = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for case, (ranks, names) in CASES.items():
        axes = ("replicate", "shard") if case == "replicas" else ("shard",)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=axes)
        flat = [rank for row in ranks for rank in (row if isinstance(row, list) else [row])]
        group = dist.new_group(flat)
        if dist.get_rank() in flat:
            check_tensors(work, case, mesh, group)
            for name in names:
                check_model(work / name, case, mesh, group)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def check_model(folder: Path, case: str, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    source = folder / "source"
    model = build(source, mesh=mesh, kind="reward" if folder.name == "reward" else "policy")
    assert load_weights(model, source) == []
    check_load(model, source, mesh)
    with torch.no_grad():  # leaves the root's parameters gathered
        model.hf(input_ids=torch.arange(8)[None])
    assert not all(isinstance(p, DTensor) for p in model.hf.parameters())
    check_save(model, folder, case, group)
    if model.kind == "policy":
        check_stream(model, source, mesh)
        check_small_buffers(model, source)
    if folder.name == "untied_large":
        check_memory(model, source)


if __name__ == "__main__":
    main()
