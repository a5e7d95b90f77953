"""Packed attention against dense attention with an explicit mask, and what it costs."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tracking import TensorTracker
from transformers import Gemma2Config, Qwen3Config

from fsdprl import attention
from fsdprl.attention import packed_attention, plan_segments, refuse_unsupported
from fsdprl.errors import UserError

CPU = torch.device("cpu")
RAGGED = (3, 5, 1, 9, 30, 31, 25, 300, 300, 257)


def heads(tokens, count, size=8, dtype=torch.float64):
    """[1, heads, T, size] over memory [T, heads, size], as a projection leaves it."""
    return torch.randn(1, tokens, count, size, dtype=dtype).transpose(1, 2).requires_grad_()


def band(lengths, window=None):
    """bool [T, T]: what each token of the pack may see."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ago = torch.arange(len(segment))[:, None] - torch.arange(len(segment))
    seen = (segment[:, None] == segment) & (ago >= 0)
    return seen if window is None else seen & (ago < window)


def dense(query, key, value, lengths, window=None):
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=band(lengths, window), scale=0.3, enable_gqa=True
    )
    return out.transpose(1, 2)


def packed(query, key, value, lengths, window=None):
    plan = plan_segments(lengths, CPU)
    return packed_attention(
        nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, segments=plan
    )[0]


@pytest.mark.parametrize("lengths", [RAGGED, (7, 7, 7), (300, 10, 400), (1,), (2, 1, 1, 2)])
@pytest.mark.parametrize("window", [None, 4, 64])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_equals_dense_attention_with_its_gradients(lengths, window, key_heads, monkeypatch):
    monkeypatch.setattr(attention, "WINDOW_BLOCK", 100)  # several blocks, the last one short
    torch.manual_seed(0)
    inputs = [heads(sum(lengths), n) for n in (4, key_heads, key_heads)]
    got, want = packed(*inputs, lengths, window), dense(*inputs, lengths, window)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(want)
    grads = [torch.autograd.grad(out, inputs, cotangent) for out in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_plan_covers_every_token_once_with_bounded_padding(lengths):
    plan = plan_segments(lengths, CPU)
    total = sum(lengths)
    padded = sum(rows * length for rows, length in plan.groups)
    short = [n for n in lengths if n < attention.LONGEST_GROUPED]
    assert padded - total <= sum(max(0.25 * n, 8) for n in short)
    if plan.gather is None:
        assert padded == total
        return
    assert len(plan.gather) == padded
    assert torch.equal(plan.gather[plan.scatter], torch.arange(total))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    parts = plan.gather.split([rows * length for rows, length in plan.groups])
    for part, (rows, _) in zip(parts, plan.groups, strict=True):
        assert (segment[part].view(rows, -1) == segment[part].view(rows, -1)[:, :1]).all()


def test_many_short_rows_share_a_few_calls():
    torch.manual_seed(0)
    lengths = torch.randint(8, 41, (512,)).tolist()
    inputs = [heads(sum(lengths), n, dtype=torch.float32) for n in (4, 2, 2)]
    with TensorTracker() as seen:
        packed(*inputs, lengths).sum().backward()
    calls = seen.calls["_scaled_dot_product_flash_attention_for_cpu"]
    assert calls == len(plan_segments(lengths, CPU).groups) <= 8


@pytest.mark.parametrize("length", [64, 300])
def test_cost_is_the_sum_of_the_rows(length):
    """No tensor is larger than the inputs, and twice the rows make twice the elements."""
    made = []
    for rows in (8, 16, 32):
        lengths = (length,) * rows
        inputs = [heads(sum(lengths), n, dtype=torch.float32) for n in (4, 2, 2)]
        with TensorTracker() as seen:
            packed(*inputs, lengths).sum().backward()
        assert seen.largest <= inputs[0].numel() < sum(lengths) ** 2
        made.append(seen.elements)
    assert made[1] / made[0] == pytest.approx(2, rel=0.05)
    assert made[2] / made[1] == pytest.approx(2, rel=0.05)


def test_window_of_a_long_row_costs_the_window():
    inputs = [heads(4096, n, dtype=torch.float32) for n in (4, 2, 2)]
    with TensorTracker() as seen:
        packed(*inputs, (4096,), window=64).sum().backward()
    assert seen.largest <= max(inputs[0].numel(), 512 * (512 + 63))


@pytest.mark.parametrize(
    "asked",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"position_bias": torch.zeros(1)},
        {"is_causal": False},
        {"dropout": 0.1},
    ],
)
def test_refuses_what_it_does_not_compute(asked):
    layer = nn.Module()
    layer.config = Qwen3Config(architectures=["StrangeForCausalLM"])
    inputs = [heads(4, n) for n in (4, 2, 2)]
    with pytest.raises(UserError, match=rf"StrangeForCausalLM.*{next(iter(asked))}"):
        packed_attention(layer, *inputs, None, segments=plan_segments([4], CPU), **asked)


def test_refuses_a_mask_and_a_missing_plan():
    inputs = [heads(4, n) for n in (4, 2, 2)]
    with pytest.raises(UserError, match="attention_mask"):
        mask = torch.ones(1, 1, 4, 4)
        packed_attention(nn.Module(), *inputs, mask, segments=plan_segments([4], CPU))
    with pytest.raises(UserError, match="hand keyword arguments down"):
        packed_attention(nn.Module(), *inputs, None)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Gemma2Config(architectures=["Gemma2ForCausalLM"]), "Gemma2ForCausalLM caps its attention"),
        (
            Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]),
            "linear_attention",
        ),
    ],
)
def test_refuses_configurations_by_name(config, named):
    with pytest.raises(UserError, match=named):
        refuse_unsupported(config)
    refuse_unsupported(Qwen3Config())


def by_token(query_THD, key_TKD, value_TKD, seen_TT, scale):
    """Attention written out, for the accelerators' kernels that are not here."""
    repeats = query_THD.shape[1] // key_TKD.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key_TKD, value_TKD))
    scores = torch.einsum("qhd,khd->hqk", query_THD, key) * scale
    weights = scores.masked_fill(~seen_TT, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("window", [None, 4])
def test_fusion_kernel_is_called_as_documented(window, monkeypatch):
    """A stand-in computes what Ascend's documentation says of the arguments it is given."""

    def npu_fusion_attention(
        query, key, value, head_num, layout, *, atten_mask, scale, keep_prob, **rest
    ):
        assert (head_num, layout, keep_prob) == (query.shape[1], "TND", 1.0)
        assert torch.equal(atten_mask, torch.ones(2048, 2048).triu(1).bool())
        assert rest["actual_seq_qlen"] == rest["actual_seq_kvlen"]
        ends = torch.tensor((0, *rest["actual_seq_qlen"]))
        lengths = ends.diff().tolist()
        if rest["sparse_mode"] == 3:
            seen = band(lengths)
        else:
            assert rest["sparse_mode"] == 4 and rest["next_tockens"] == 0
            seen = band(lengths, rest["pre_tockens"] + 1)
        return by_token(query, key, value, seen, scale), None, None

    module = types.SimpleNamespace(npu_fusion_attention=npu_fusion_attention)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(attention, "_kernel", lambda query, value: attention._fusion)
    inputs = [heads(12, n) for n in (4, 2, 2)]
    got = packed(*inputs, (7, 5), window)
    torch.testing.assert_close(got, dense(*inputs, (7, 5), window))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("told", [True, False])
def test_varlen_kernel_is_called_as_documented(window, told, monkeypatch):
    """torch's varlen_attn: window (left, right) with -1 for unbounded, left excluding the token."""

    def attend(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size, grouped):
        assert torch.equal(cu_q, cu_k) and cu_q.dtype == torch.int32
        lengths = cu_q.diff().tolist()
        assert max_q == max_k == max(lengths) and window_size[1] == 0 and grouped
        seen = band(lengths, None if window_size[0] == -1 else window_size[0] + 1)
        return by_token(query, key, value, seen, scale)

    def varlen_213(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        return attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, enable_gqa)

    def varlen_211(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        return attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, True)

    monkeypatch.setattr(attention, "_varlen_attn", lambda: varlen_213 if told else varlen_211)
    monkeypatch.setattr(attention, "_kernel", lambda query, value: attention._varlen)
    inputs = [heads(12, n) for n in (4, 2, 2)]
    got = packed(*inputs, (7, 5), window)
    torch.testing.assert_close(got, dense(*inputs, (7, 5), window))
