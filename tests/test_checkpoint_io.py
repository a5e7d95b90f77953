"""Checkpoints in and out on one rank: names, bytes, dtypes, and what is refused. ranks/ has the rest."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from sharded import build
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.core_model_loading import revert_weight_conversion

from fsdprl.checkpoint_io import (
    hf_items,
    load_tensors,
    load_weights,
    narrowed_tensors,
    save_checkpoint,
    save_plan,
    save_tensors,
    take_snapshot,
    write_snapshot,
)
from fsdprl.errors import UserError

SEVERAL_FILES = "20KB"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


def copy_of(source: Path, out: Path) -> Path:
    return Path(shutil.copytree(source, out))


def loaded(path: Path, **settings: str) -> SimpleNamespace:
    model = build(path, **settings)
    load_weights(model, path)
    return model


@pytest.mark.parametrize("shard", ["5GB", SEVERAL_FILES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen2", "qwen3_moe"])
def test_load_then_save_gives_the_same_bytes(kind, dtype, shard, tmp_path):
    source = tiny.checkpoint(kind, dtype=dtype, shard=shard)
    model = loaded(source)
    assert all(p.dtype == torch.float32 for p in model.hf.parameters())
    save_checkpoint(model, source, tmp_path)
    names = sorted(file.name for file in source.iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) > (shard != "5GB")
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen3_moe"])
def test_trained_weights_reload_in_transformers(kind, tmp_path):
    source = tiny.checkpoint(kind, shard=SEVERAL_FILES)
    model = loaded(source)
    with torch.no_grad():
        for i, parameter in enumerate(model.hf.parameters()):
            parameter.add_(i + 1)
    save_checkpoint(model, source, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert same(dict(again.named_parameters()), dict(model.hf.named_parameters()))
    assert not same(dict(again.named_parameters()), dict(before.named_parameters()))


def test_weights_equal_what_transformers_loads():
    source = tiny.checkpoint("qwen3_moe", dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert same(dict(loaded(source).hf.named_parameters()), dict(reference.named_parameters()))


def test_a_tied_head_is_written_if_the_source_has_it(tmp_path):
    source = copy_of(tiny.checkpoint("qwen2_tied"), tmp_path / "source")
    tensors = tensors_of(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    model = loaded(source)
    with torch.no_grad():
        model.hf.lm_head.weight.mul_(2)
    save_checkpoint(model, source, tmp_path / "out")
    saved = tensors_of(tmp_path / "out")
    assert saved.keys() == tensors.keys()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(saved[name], 2 * tensors[name])
    tensors["lm_head.weight"][3, 1] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight must equal .* tie_word_embeddings"):
        load_weights(model, source)


def test_a_checkpoint_with_fused_experts_keeps_them(tmp_path):
    published = tiny.checkpoint("qwen3_moe")
    source = copy_of(published, tmp_path / "source")
    fused = dict(AutoModelForCausalLM.from_pretrained(published).named_parameters())
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    save_file({k: v.detach() for k, v in fused.items()}, source / "model.safetensors")
    model = loaded(source)
    assert same(dict(model.hf.named_parameters()), fused)
    save_checkpoint(model, source, tmp_path / "out")
    assert same(tensors_of(tmp_path / "out"), tensors_of(source))


MOE = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 30,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen2_moe": {"num_experts": 3},
    "qwen3_moe": {"num_experts": 3, "head_dim": 8},
    "mixtral": {"num_local_experts": 3},
    "olmoe": {"num_experts": 3},
    "phimoe": {"num_local_experts": 3},
    "deepseek_v3": {
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
        **{"v_head_dim": 4, "n_shared_experts": 1},
    },
    "gpt_oss": {"num_local_experts": 3, "head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_of_experts(family, tmp_path):
    """Names and bytes against transformers' own writer, which converts back by its own table."""
    config = AutoConfig.for_model(family, **{**MOE, **FAMILIES[family]})
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for buffer in reference.buffers():
        if buffer.is_floating_point():
            buffer.normal_()
    reference.save_pretrained(tmp_path / "source")
    stored = tensors_of(tmp_path / "source")
    model = loaded(tmp_path / "source")
    assert same(dict(model.hf.named_parameters()), dict(reference.named_parameters()))
    shapes = {item.name: item.shape for item in hf_items(model)}
    assert shapes == {name: tuple(value.shape) for name, value in stored.items()}
    save_checkpoint(model, tmp_path / "source", tmp_path / "out")
    assert same(tensors_of(tmp_path / "out"), stored)
    save_checkpoint(model, None, tmp_path / "new")
    assert same(tensors_of(tmp_path / "new"), stored)
    assert revert_weight_conversion(reference, dict(reference.state_dict())).keys() == shapes.keys()


def test_without_a_source(tmp_path, monkeypatch):
    source = tiny.checkpoint("qwen2_tied")
    model = loaded(source)
    monkeypatch.setattr("fsdprl.checkpoint_save.FILE_BYTES", 20_000)
    save_checkpoint(model, None, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 22_000 for file in files)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == "Qwen2ForCausalLM"
    assert same(tensors_of(tmp_path), tensors_of(source))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(source).values())


def test_another_dtype(tmp_path):
    source = tiny.checkpoint("qwen3")
    save_checkpoint(loaded(source), source, tmp_path, dtype="bfloat16")
    want = {name: value.bfloat16() for name, value in tensors_of(source).items()}
    assert same(tensors_of(tmp_path), want)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_value_head_on_a_policy_checkpoint(tmp_path):
    source = tiny.checkpoint("qwen3", shard=SEVERAL_FILES)
    model = build(source, kind="value")
    assert load_weights(model, source) == ["score.weight"]
    assert model.hf.score.weight.isnan().all()
    assert not any(p.isnan().any() for p in model.hf.model.parameters())
    torch.nn.init.normal_(model.hf.score.weight)
    save_checkpoint(model, source, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert same(dict(again.named_parameters()), dict(model.hf.named_parameters()))
    resumed = build(tmp_path, kind="value")
    assert load_weights(resumed, tmp_path) == []
    assert same(dict(resumed.hf.named_parameters()), dict(model.hf.named_parameters()))
    with pytest.raises(UserError, match=r"lacks lm_head\.weight"):
        load_weights(build(source), tmp_path)


def test_a_reward_checkpoint_round_trips(tmp_path):
    source = tiny.checkpoint("llama", head="reward")
    model = build(source, kind="reward")
    assert load_weights(model, source) == []
    save_checkpoint(model, source, tmp_path)
    for file in source.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_checkpoint_of_the_bare_base_model(tmp_path):
    source = tiny.checkpoint("qwen2_tied")
    bare = AutoModel.from_pretrained(source)
    bare.save_pretrained(tmp_path / "bare")
    assert "layers.0.mlp.up_proj.weight" in tensors_of(tmp_path / "bare")
    model = loaded(tmp_path / "bare")
    assert same(dict(model.hf.model.named_parameters()), dict(bare.named_parameters()))


def test_a_snapshot_is_not_touched_by_training(tmp_path):
    source = tiny.checkpoint("qwen3_moe")
    model = loaded(source)
    snapshot = take_snapshot(model, save_plan(model, source))
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.zero_()
    write_snapshot(snapshot, tmp_path)
    assert same(tensors_of(tmp_path), tensors_of(source))


def test_a_save_over_a_longer_leftover(tmp_path):
    source = tiny.checkpoint("qwen3")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1_000_000)
    save_checkpoint(loaded(source), source, tmp_path)
    want = (source / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == want


def test_masters_that_the_checkpoint_narrows(tmp_path):
    source = tiny.checkpoint("qwen2", dtype=torch.bfloat16)
    model = loaded(source)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.mul_(1.001)  # no bf16 number any more
    plan = save_plan(model, source)
    save_checkpoint(model, source, tmp_path)
    save_tensors(narrowed_tensors(model, plan), tmp_path / "trainer", stem="masters")
    again = build(tmp_path)
    load_weights(again, tmp_path)
    assert not same(dict(again.hf.named_parameters()), dict(model.hf.named_parameters()))
    load_tensors(narrowed_tensors(again, plan), tmp_path / "trainer", stem="masters")
    assert same(dict(again.hf.named_parameters()), dict(model.hf.named_parameters()))
    assert narrowed_tensors(model, save_plan(model, source, dtype="float32")) == {}


def test_named_tensors(tmp_path):
    tensors = {
        "step": torch.tensor(7.0),
        "a.exp_avg": torch.randn(5, 3, dtype=torch.float64),
        "a.flags": torch.tensor([True, False, True]),
        "b": torch.arange(4, dtype=torch.int32),
    }
    save_tensors(tensors, tmp_path)
    assert same(load_file(tmp_path / "optimizer.safetensors"), tensors)
    empty = {name: torch.zeros_like(value) for name, value in tensors.items()}
    assert load_tensors(empty, tmp_path) is empty
    assert same(empty, tensors)
    with pytest.raises(UserError, match="lacks c"):
        load_tensors({**empty, "c": torch.zeros(1)}, tmp_path)
    with pytest.raises(UserError, match=r"has unexpected b, a\.flags"):
        load_tensors({name: empty[name] for name in ("step", "a.exp_avg")}, tmp_path)
    with pytest.raises(UserError, match=r"b is \[4\] in .*optimizer.safetensors.* has \[5\]"):
        load_tensors({**empty, "b": torch.zeros(5, dtype=torch.int32)}, tmp_path)
    with pytest.raises(UserError, match=r"no other\.safetensors"):
        load_tensors(empty, tmp_path, stem="other")


@pytest.fixture
def broken(tmp_path):
    """A copy of a good checkpoint to break, and a model to load it into."""
    source = copy_of(tiny.checkpoint("qwen3", shard=SEVERAL_FILES), tmp_path / "broken")
    return source, build(source)


def rewrite(source: Path, change) -> None:
    """Pass the tensors through `change` into one file without an index."""
    tensors = change(tensors_of(source))
    for file in (*source.glob("*.safetensors"), *source.glob("*.index.json")):
        file.unlink()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def test_missing_tensors_are_named(broken):
    source, model = broken
    rewrite(source, lambda t: {k: v for k, v in t.items() if "layers.1.mlp" not in k})
    with pytest.raises(UserError, match=r"broken lacks model\.layers\.1\.mlp\.gate_proj\.weight, "):
        load_weights(model, source)


def test_unexpected_tensors_are_named_up_to_five(broken):
    source, model = broken
    rewrite(source, lambda t: t | {f"extra.{i}": torch.zeros(1) for i in range(7)})
    with pytest.raises(UserError, match=r"extra\.4 \(model\.safetensors\) and 2 more"):
        load_weights(model, source)


def test_wrong_shapes_are_named(broken):
    source, model = broken
    rewrite(source, lambda t: t | {"model.norm.weight": torch.zeros(31)})
    with pytest.raises(UserError, match=r"norm\.weight is \[31\] in .*model\.safetensors.*\[32\]"):
        load_weights(model, source)


@pytest.mark.parametrize("cut", [1, 5_000])
def test_a_truncated_file_is_named(broken, cut):
    source, model = broken
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(UserError, match=rf"{file.name}: truncated or damaged"):
        load_weights(model, source)


def test_a_missing_file_is_named(broken):
    source, model = broken
    file = sorted(source.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(UserError, match=rf"index\.json names {file.name}, which is missing"):
        load_weights(model, source)


def test_files_without_their_index(broken):
    source, model = broken
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        load_weights(model, source)


def test_quantized_weights_are_refused(broken):
    source, model = broken
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(source, lambda t: t | {name: t[name].to(torch.float8_e4m3fn)})
    with pytest.raises(UserError, match=r"up_proj\.weight has dtype F8_E4M3: quantized"):
        load_weights(model, source)


def test_pickled_weights_are_refused(broken):
    source, model = broken
    for file in (*source.glob("*.safetensors"), *source.glob("*.index.json")):
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*save_pretrained"):
        load_weights(model, source)


def test_code_of_the_checkpoint_is_refused(broken):
    source, model = broken
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="auto_map"):
        load_weights(model, source)
