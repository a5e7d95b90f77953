"""The weight stream and its checksums on one rank: order, buckets, damage. ranks/ has real shards."""

import pytest
import tiny
import torch
from safetensors.torch import load_file
from sharded import build
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fsdprl.checkpoint_io import load_weights
from fsdprl.stream import Bucket, part_checksum, shard_checksums, tensor_checksum, weight_stream


@pytest.fixture(scope="module")
def moe():
    source = tiny.checkpoint("qwen3_moe", num_hidden_layers=3)
    model = build(source)
    load_weights(model, source)
    return model, load_file(source / "model.safetensors")


def nbytes(bucket: Bucket) -> int:
    return sum(value.nbytes for _, value in bucket.tensors)


@pytest.mark.parametrize("bucket_bytes", [1, 9_000, 1 << 30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_stream_is_the_checkpoint(moe, dtype, bucket_bytes):
    model, stored = moe
    pairs = weight_stream_pairs(model, dtype, bucket_bytes)
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)) and set(names) == stored.keys()
    for name, value in pairs:
        assert torch.equal(value, stored[name].to(getattr(torch, dtype))), name
        assert value.dtype == getattr(torch, dtype)


def test_a_tied_weight_comes_once():
    source = tiny.checkpoint("qwen2_tied")
    model = build(source)
    load_weights(model, source)
    names = [n for b in weight_stream(model, dtype="float32") for n, _ in b.tensors]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_above_a_bucket_come_in_parts_where_that_is_allowed(moe, dtype):
    model, stored = moe
    kept = dict(weight_stream_pairs(model, dtype, 1 << 30))
    large, limit = "model.embed_tokens.weight", 1500
    row = kept[large].nbytes // len(kept[large])
    assert kept[large].nbytes > 3 * limit
    buckets = list(
        weight_stream(model, dtype=dtype, bucket_bytes=limit, divisible={large, "lm_head.weight"})
    )
    parts = [part for bucket in buckets for part in bucket.parts if part.name == large]
    assert all(part.rows.nbytes <= max(limit, row) for part in parts)
    firsts = [part.first_row for part in parts]
    assert firsts == [0, *torch.tensor([len(part.rows) for part in parts]).cumsum(0)[:-1].tolist()]
    assert torch.equal(torch.cat([part.rows for part in parts]), kept[large])
    shares = sum(part_checksum(part.rows, part.first_row) for part in parts)
    assert (shares - tensor_checksum(kept[large])) % 2**64 == 0
    whole = {name for bucket in buckets for name, _ in bucket.tensors}
    assert whole == stored.keys() - {part.name for bucket in buckets for part in bucket.parts}


def weight_stream_pairs(model, dtype, bucket_bytes):
    buckets = weight_stream(model, dtype=dtype, bucket_bytes=bucket_bytes)
    return [pair for bucket in buckets for pair in bucket.tensors]


def test_large_buckets_end_with_layers(moe):
    model, _ = moe
    layer = sum(
        p.nbytes for name, p in model.hf.named_parameters() if name.startswith("model.layers.0.")
    )
    buckets = list(weight_stream(model, dtype="float32", bucket_bytes=2 * layer))
    assert all(bucket.layer_end and nbytes(bucket) <= 2 * layer for bucket in buckets)
    seen: set[str] = set()
    for bucket in buckets:
        numbers = {name.split(".")[2] for name, _ in bucket.tensors if ".layers." in name}
        assert not numbers & seen
        seen |= numbers
    assert seen == {"0", "1", "2"} and len(buckets) < 5


def test_a_layer_larger_than_a_bucket_is_split(moe):
    model, _ = moe
    buckets = list(weight_stream(model, dtype="float32", bucket_bytes=5000))
    largest = max(value.nbytes for bucket in buckets for _, value in bucket.tensors)
    assert all(nbytes(bucket) <= max(5000, largest) for bucket in buckets)
    open_layers: set[str] = set()
    for bucket, after in zip(buckets, [*buckets[1:], Bucket([], True)], strict=True):
        last, following = bucket.tensors[-1][0], after.tensors[0][0] if after.tensors else ""
        continues = ".layers." in last and last.split(".")[:3] == following.split(".")[:3]
        assert bucket.layer_end is not continues, (last, following)
        open_layers |= {last} if continues else set()
    assert open_layers, "no layer was split: the test shows nothing"


def test_persistent_buffers_keep_their_dtype():
    config = AutoConfig.for_model(
        "deepseek_v3",
        **{"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8, "vocab_size": 30},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 8},
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
        **{"v_head_dim": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    )
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    hf.get_buffer(name).normal_()
    got = dict(p for b in weight_stream(hf, dtype="bfloat16") for p in b.tensors)
    assert torch.equal(got[name], hf.get_buffer(name)) and got[name].dtype == torch.float32
    assert got["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert shard_checksums(hf, dtype="bfloat16")[name] == tensor_checksum(got[name])


def by_hand(tensor: Tensor) -> int:
    """The definition in Python integers, for rows of 8-byte multiples and for columns of 4 bytes."""
    word = 8 if tensor.dim() > 1 else tensor.dtype.itemsize
    total = 0
    for row, values in enumerate(tensor):
        data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        words = (data[i : i + word] for i in range(0, len(data), word))
        total += (2 * row + 1) * sum(int.from_bytes(w, "little", signed=True) for w in words)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4), (5, 2, 8), (300, 1024), (6,)])
def test_checksums_by_hand(shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert tensor_checksum(tensor) == by_hand(tensor)
    strided = torch.stack([tensor, tensor], -1)[..., 0]
    assert not strided.is_contiguous() and tensor_checksum(strided) == by_hand(tensor)


def test_checksums_of_unaligned_and_odd_tensors():
    line = torch.randn(50)
    assert tensor_checksum(line[1:49].view(4, 12)) == by_hand(line[1:49].view(4, 12))
    assert isinstance(tensor_checksum(torch.tensor(2.5)), int)
    assert tensor_checksum(torch.zeros(0, 4)) == 0
    assert tensor_checksum(torch.tensor([[True, False, True]])) == 2


def test_every_shard_checksum_is_that_of_the_whole(moe):
    model, stored = moe
    for dtype in (torch.float32, torch.bfloat16):
        want = {name: tensor_checksum(value.to(dtype)) for name, value in stored.items()}
        assert shard_checksums(model, dtype=dtype) == want


def flip(tensor: Tensor, byte: int, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("damage", ["stale", "lost", "cut", "altered", "moved", "swapped"])
def test_damage_shows_in_the_checksums(moe, damage):
    """What an engine would compute from a damaged stream differs, in that tensor only."""
    model, _ = moe
    sent = shard_checksums(model, dtype="bfloat16")
    arrived = {n: v.clone() for b in weight_stream(model, dtype="bfloat16") for n, v in b.tensors}
    hurt = {NAME}
    if damage == "stale":
        arrived[NAME].mul_(1.01)
    elif damage == "lost":
        del arrived[NAME]
    elif damage == "cut":
        arrived[NAME][-1] = 0
    elif damage == "altered":
        flip(arrived[NAME], 5, 7)
    elif damage == "moved":
        arrived[NAME] = arrived[NAME].roll(1, 0)
    else:
        other = NAME.replace("up", "gate")
        arrived[NAME], arrived[other] = arrived[other], arrived[NAME]
        hurt |= {other}
    received = {name: tensor_checksum(value) for name, value in arrived.items()}
    assert {name for name in sent if sent[name] != received.get(name)} == hurt


def test_no_single_bit_is_lost():
    """A flipped bit shows wherever it is, also a high one in a row with an even number."""
    tensor = torch.randn(4, 3, dtype=torch.float32)
    whole = tensor_checksum(tensor)
    for byte in range(tensor.nbytes):
        for bit in range(8):
            flip(tensor, byte, bit)
            assert tensor_checksum(tensor) != whole, (byte, bit)
            flip(tensor, byte, bit)
    assert tensor_checksum(tensor) == whole
