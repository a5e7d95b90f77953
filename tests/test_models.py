"""Packed models against transformers' own forward of each row alone."""

import threading

import pytest
import solo
import tiny
import torch
from torch.distributed.tensor import DTensor
from tracking import TensorTracker
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GraniteConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from fsdprl import models
from fsdprl.attention import plan_segments
from fsdprl.errors import UserError
from fsdprl.models import pack
from fsdprl.options import ShardingOptions
from fsdprl.parallel import copies, decoder_layers

LENGTHS = (30, 5, 17, 2, 300, 16, 17)
EXACT = {"float32": 1e-5, "float64": 1e-10}


def alone(model, rows, dtype=torch.float64):
    """Log-probs [S] and entropies [S] of each row by itself, in transformers' own forward."""
    logp, entropy = [], []
    for ids, mask, temperature in rows:
        logits = model(input_ids=ids.long()[None], use_cache=False).logits[0, :-1]
        every = (logits / temperature).log_softmax(-1)
        logp.append(every.gather(1, ids[1:, None].long()).squeeze(1)[mask[1:]])
        entropy.append(-(every.exp() * every).sum(-1)[mask[1:]])
    return torch.cat(logp), torch.cat(entropy)


def gradients(model):
    """Whole gradients by transformers' parameter names."""
    named = getattr(model, "hf", model).named_parameters()
    whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in named}
    model.zero_grad()
    return whole


def assert_same_gradients(mine, theirs, tolerance):
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        scale = float(grad.abs().max()) or 1.0
        torch.testing.assert_close(mine[name], grad, rtol=0, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_equals_each_row_alone_with_its_gradients(kind, dtype):
    path = tiny.checkpoint(kind)
    model, own = solo.load(path, dtype=dtype), solo.reference(path, dtype)
    rows = solo.rows(*LENGTHS, temperature=0.7)
    logp, others = model(pack(rows, solo.CPU), also=("entropy",))
    entropy = others["entropy"]
    want, want_entropy = alone(own, rows)
    assert logp.dtype == getattr(torch, dtype)
    torch.testing.assert_close(logp, want, rtol=0, atol=EXACT[dtype])
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=EXACT[dtype])
    weights = torch.linspace(-1, 1, len(logp), dtype=logp.dtype)
    (weights * (logp + 0.3 * entropy)).sum().backward()
    (weights * (want + 0.3 * want_entropy)).sum().backward()
    assert_same_gradients(gradients(model), gradients(own), EXACT[dtype])


def test_sliding_window_equals_each_row_alone():
    sliding = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    path = tiny.checkpoint("qwen3", **sliding)
    own, rows = solo.reference(path), solo.rows(30, 5, 17)
    assert own.config.layer_types == ["full_attention", "sliding_attention"]
    logp, _ = solo.load(path)(pack(rows, solo.CPU))
    torch.testing.assert_close(logp, alone(own, rows)[0], rtol=0, atol=1e-5)


def test_half_precision_computes_in_it_over_float32_masters():
    path = tiny.checkpoint("qwen3")
    model, rows = solo.load(path, dtype="bfloat16"), solo.rows(*LENGTHS)
    logp, _ = model(pack(rows, solo.CPU))
    logp.sum().backward()
    assert logp.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    own = solo.reference(path)
    error = (logp - alone(own, rows)[0]).detach().abs()
    assert 1e-4 < float(error.mean()) < 0.2
    frozen = solo.load(path, dtype="bfloat16", trainable=False)
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in frozen.parameters())
    for name, buffer in own.named_buffers():
        assert torch.equal(frozen.hf.get_buffer(name), buffer), name
    with torch.no_grad():
        torch.testing.assert_close(frozen(pack(rows, solo.CPU))[0], logp.detach())


def test_everything_is_materialised_and_shards_are_back_after_inference():
    path = tiny.checkpoint("qwen2_tied")
    model, own = solo.load(path), solo.reference(path)
    assert model.hf.lm_head.weight is model.hf.model.embed_tokens.weight
    for name, buffer in own.named_buffers():
        assert torch.equal(model.hf.get_buffer(name), buffer), name
    with torch.no_grad():
        model(solo.packed(5, 6))
    for (name, mine), theirs in zip(model.hf.named_parameters(), own.parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        assert torch.equal(mine.full_tensor(), theirs), name


def test_value_of_the_state_before_each_loss_token():
    path = tiny.checkpoint("llama", head="reward")
    model, rows = solo.load(path, kind="value"), solo.rows(9, 4, 30)
    own = AutoModelForSequenceClassification.from_pretrained(path)
    values, others = model(pack(rows, solo.CPU))
    want = [
        own.score(own.model(ids.long()[None], use_cache=False).last_hidden_state[0])[:-1, 0]
        for ids, _, _ in rows
    ]
    want = torch.cat([w[mask[1:]] for w, (_, mask, _) in zip(want, rows, strict=True)])
    assert others == {}
    torch.testing.assert_close(values, want, rtol=0, atol=1e-5)
    values.square().sum().backward()
    want.square().sum().backward()
    assert_same_gradients(gradients(model), gradients(own), 1e-5)


def test_reward_is_the_score_at_the_last_token():
    path = tiny.checkpoint("qwen3", head="reward")
    model, rows = solo.load(path, kind="reward", trainable=False), solo.rows(9, 1, 30)
    own = AutoModelForSequenceClassification.from_pretrained(path)
    own.config.pad_token_id = None  # its padding rule would skip a last token that is <|endoftext|>
    want = [own(input_ids=ids.long()[None], use_cache=False).logits[0, 0] for ids, _, _ in rows]
    torch.testing.assert_close(model(pack(rows, solo.CPU))[0], torch.stack(want), rtol=0, atol=1e-5)
    assert model(solo.packed())[0].shape == (0,)


def test_a_missing_value_head_is_drawn_from_the_seed():
    path = tiny.checkpoint("qwen3")
    heads = [
        solo.load(path, kind="value", seed=seed).hf.score.weight.full_tensor() for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert 0.5 < heads[0].std().item() / (0.2 / 32**0.5) < 2  # initializer_range over sqrt(hidden)
    reward = solo.load(path, kind="reward", seed=1).hf.score.weight.full_tensor()
    assert 0.1 < reward.std().item() < 0.4
    with pytest.raises(UserError, match="no reward model"):
        solo.load(path, kind="reward", trainable=False)


@pytest.mark.parametrize("kind", ["policy", "value", "reward"])
@pytest.mark.parametrize("architecture", ["qwen2_tied", "qwen3_moe"])
def test_no_rows_run_everything_and_add_nothing(kind, architecture):
    model = solo.load(tiny.checkpoint(architecture), kind=kind)
    empty = pack([], solo.CPU)
    assert (empty.rows, len(empty.ids), len(empty.target)) == (0, 1, 0)
    result, _ = model(empty)
    assert result.shape == (0,)
    (result.sum() * 3.0).backward()
    grads = gradients(model)
    assert all(float(grad.abs().sum()) == 0.0 for grad in grads.values() if grad is not None)
    assert sum(grad is not None for grad in grads.values()) == len(grads)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_activation_checkpointing_changes_nothing(architecture):
    """Also when the plans of two microbatches are mixed and backward runs in another thread."""
    path = tiny.checkpoint(architecture)
    grads = []
    for recompute in (False, True):
        model = solo.load(path, activation_checkpointing=recompute)
        first, second = model(solo.packed(9, 4))[0], model(solo.packed(3, 12, 5))[0]
        with torch.no_grad():
            model(solo.packed(7))
        backward = threading.Thread(
            target=lambda a, b: (a.sum() - b.sum()).backward(), args=(first, second)
        )
        backward.start()
        backward.join()
        grads.append(gradients(model))
    assert_same_gradients(grads[1], grads[0], 1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_balance_is_transformers_load_balancing_loss_of_each_row_and_layer(recompute):
    path = tiny.checkpoint("qwen3_moe")
    model, own = (
        solo.load(path, dtype="float64", activation_checkpointing=recompute),
        solo.reference(path, "float64"),
    )
    rows = solo.rows(30, 5, 17)
    logp, beside = model(pack(rows, solo.CPU), also=("balance", "entropy"))
    assert beside.keys() == {"balance", "entropy"}
    want = []
    for ids, mask, _ in rows:
        said = own(input_ids=ids.long()[None], use_cache=False, output_router_logits=True)
        layers = [load_balancing_loss_func((logits,), 4, 2) for logits in said.router_logits]
        want += [torch.stack(layers).mean().double()] * int(mask.sum())  # float32 in there
    assert len(said.router_logits) == 2
    torch.testing.assert_close(beside["balance"], torch.stack(want), rtol=0, atol=2e-6)
    weights = torch.linspace(-1, 1, len(want), dtype=torch.float64)
    ((weights * beside["balance"]).sum() + 0.0 * logp.sum()).backward()
    (weights * torch.stack(want)).sum().backward()
    mine, theirs = gradients(model), gradients(own)
    routers = [name for name in theirs if name.endswith("gate.weight")]
    assert len(routers) == 2
    for name in routers:
        scale = float(theirs[name].abs().max())
        assert scale > 1e-6
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-5 * scale)


def test_balance_without_rows_and_without_routers():
    model = solo.load(tiny.checkpoint("qwen3_moe"))
    _, beside = model(pack([], solo.CPU), also=("balance",))
    assert beside["balance"].shape == (0,)
    with pytest.raises(UserError, match="--router-aux-coef: qwen2 is no mixture of experts"):
        solo.load(tiny.checkpoint("qwen2"))(solo.packed(4), also=("balance",))


def test_activation_checkpointing_keeps_less():
    alive = []
    for recompute in (False, True):
        model = solo.load(tiny.checkpoint("qwen3"), activation_checkpointing=recompute)
        with TensorTracker() as seen:
            result, _ = model(solo.packed(100, 100))
        alive.append(seen.alive)
        del result
    assert alive[1] < 0.6 * alive[0]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_change_nothing(recompute, monkeypatch):
    """With the compiler's own graphs but eager kernels, to keep the test short."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compiled(f, backend="aot_eager"))
    path = tiny.checkpoint("qwen3", num_hidden_layers=4)
    results = []
    for compile_ in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = solo.load(path, compile=compile_, activation_checkpointing=recompute)
        logps = [model(solo.packed(*lengths))[0] for lengths in ((9, 4), (3, 30), (7, 8, 9))]
        torch.cat(logps).sum().backward()
        results.append((torch.cat(logps), gradients(model)))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 8, graphs  # two pieces a layer, static then dynamic, layers alike
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-5)
    assert_same_gradients(results[1][1], results[0][1], 1e-5)


def test_no_tensor_grows_with_the_square_of_the_pack():
    """Forward and backward of 64 and 128 rows: no T x T, no [T, V], and linear work."""
    model = solo.load(tiny.checkpoint("qwen3"), head_chunk_tokens=64)
    model(solo.packed(5)).__getitem__(0).sum().backward()
    made = []
    for count in (64, 128):
        batch = solo.packed(*[64] * count)
        tokens = len(batch.ids)
        with TensorTracker() as seen:
            model(batch)[0].sum().backward()
        widest = 4 * 16  # query heads x head size, the widest activation of the model
        assert seen.largest <= tokens * widest < tokens * len(tiny.tokenizer()) < tokens**2
        made.append(seen.elements)
    assert made[1] / made[0] == pytest.approx(2, rel=0.05)


def test_dropout_stays_off():
    model = solo.load(tiny.checkpoint("qwen3", attention_dropout=0.5))
    model.train()
    batch = solo.packed(9, 5)
    assert torch.equal(model(batch)[0], model(batch)[0])


def test_pack_by_hand():
    rows = [
        (torch.tensor([5, 6, 7]), torch.tensor([False, False, True]), 1.0),
        (torch.tensor([8, 9]), torch.tensor([False, True]), 0.5),
    ]
    batch = pack(rows, solo.CPU)
    assert batch.ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.target.tolist() == [2, 4]
    assert batch.temperature.tolist() == [1.0, 0.5]
    assert (batch.lengths, batch.rows, batch.tempered) == ((3, 2), 2, True)


def test_decoder_layers_in_order():
    model = solo.load(tiny.checkpoint("qwen3", num_hidden_layers=3))
    assert [layer.self_attn.layer_idx for layer in decoder_layers(model.hf)] == [0, 1, 2]


def test_load_check_catches_rows_that_leak(monkeypatch):
    def leaking(lengths, device):
        return plan_segments([sum(lengths)], device)

    monkeypatch.setattr(models, "plan_segments", leaking)
    with pytest.raises(UserError, match="Qwen3ForCausalLM gives other results for packed rows"):
        solo.load(tiny.checkpoint("qwen3"))


def test_load_check_catches_a_head_that_scales(tmp_path):
    """Granite divides its logits: a real architecture that a plain linear head gets wrong."""
    config = GraniteConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        logits_scaling=8.0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="GraniteForCausalLM gives other results"):
        solo.load(tmp_path)


def test_refuses_a_reward_model_of_several_labels():
    path = tiny.checkpoint("qwen3", head="reward", num_labels=3)
    with pytest.raises(UserError, match="has 3 labels"):
        solo.load(path, kind="reward")


def test_small_models_are_whole_on_every_rank():
    assert copies(ShardingOptions(), 999_999, 4) == 4
    assert copies(ShardingOptions(), 1_000_000, 4) == 1
    assert copies(ShardingOptions(min_num_params=0), 10, 4) == 1
    assert copies(ShardingOptions(replicate=2), 10, 4) == 2, "who asks for copies gets as many"
