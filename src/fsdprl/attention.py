"""Attention over a packed row: every segment attends causally within itself, and nowhere else.

T tokens of R rows lie back to back in one row of a batch of one. Left to itself, SDPA would mask
T x T scores of which only the blocks on the diagonal count; here the cost is the sum over the rows,
whatever they are packed with. Three kernels do it:

- grouped (CPU, any accelerator in float32): rows of similar length are padded to one length on the
  right and attend as a batch. A causal mask hides the padding from every real token by itself.
- varlen (CUDA, half precision): torch's variable-length flash attention.
- fusion (NPU): torch_npu's fused attention in TND layout.

The plan is made once a microbatch and travels to the layers as a keyword argument. It is not kept
in a global: with activation checkpointing the layers run again inside backward, perhaps in another
thread and after the next microbatch's plan was made, but a checkpointed call keeps its arguments.

Shapes: T tokens, R rows, P padded tokens, H query heads, K key heads, D head size.
"""

import functools
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from fsdprl.errors import UserError

IMPLEMENTATION = "fsdprl_packed"
"""The name under which transformers knows packed_attention."""

LONGEST_GROUPED = 256
"""Tokens from which a row attends alone: its scores then dwarf the cost of one more call."""
STRETCH = 1.25
"""A row is padded to at most this many times its length ..."""
SLACK = 8
"""... or by this many tokens, so that very short rows still share a call."""
WINDOW_BLOCK = 512
"""Fewest queries of one call under a sliding window."""


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """How the rows of one microbatch reach the attention kernel."""

    lengths: tuple[int, ...]
    """Tokens of each row, in packed order."""
    ends: tuple[int, ...]
    """Cumulative lengths."""
    groups: tuple[tuple[int, int], ...]
    """(rows, padded length) of each call of the grouped kernel, in padded order."""
    gather: Tensor | None
    """int64 [P], packed position of each padded token; None if the padded order is the packed."""
    scatter: Tensor | None
    """int64 [T], padded position of each packed token; None likewise."""
    offsets: Tensor
    """int32 [R + 1], where rows start, for the varlen kernel."""


def plan_segments(lengths: Sequence[int], device: torch.device) -> SegmentPlan:
    """Plan the attention of rows with these lengths (each at least 1), packed in this order."""
    ends = torch.tensor(lengths).cumsum(0)
    starts = (ends - torch.tensor(lengths)).tolist()
    grouped = _group(lengths)
    parts: list[Tensor] = []
    real: list[Tensor] = []
    for rows in grouped:
        longest = max(lengths[row] for row in rows)
        own = torch.tensor([lengths[row] for row in rows])[:, None]
        offset = torch.arange(longest)[None, :]
        first = torch.tensor([starts[row] for row in rows])[:, None]
        # padding repeats the row's last token: finite, and hidden behind it
        parts.append((first + torch.minimum(offset, own - 1)).flatten())
        real.append((offset < own).flatten())
    gather = torch.cat(parts)
    positions = torch.arange(int(ends[-1]))
    scatter = torch.empty_like(positions)
    kept = torch.cat(real)
    scatter[gather[kept]] = torch.arange(len(gather))[kept]
    in_order = torch.equal(gather, positions)
    return SegmentPlan(
        lengths=tuple(lengths),
        ends=tuple(ends.tolist()),
        groups=tuple((len(rows), max(lengths[row] for row in rows)) for rows in grouped),
        gather=None if in_order else gather.to(device),
        scatter=None if in_order else scatter.to(device),
        offsets=F.pad(ends, (1, 0)).to(device, torch.int32),
    )


def _group(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers of each call: similar lengths together, groups and rows in packed order."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        similar = longest <= max(STRETCH * lengths[row], lengths[row] + SLACK)
        if groups and (longest == lengths[row] or (similar and longest < LONGEST_GROUPED)):
            groups[-1].append(row)
        else:
            groups.append([row])
    return sorted(sorted(rows) for rows in groups)


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: SegmentPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' layers call.

    query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]. `sliding_window`: a token
    sees itself and the window - 1 tokens before it. Raises UserError naming the architecture where
    it asks for something that the kernels do not compute, or does not pass the plan on.
    """
    _refuse_unknown(module, others, dropout, attention_mask)
    if segments is None or query.shape[0] != 1:
        raise UserError(
            f"{architecture(module)} does not hand keyword arguments down to its attention, "
            f"so its rows cannot be packed: this architecture is not supported"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    longest = max(segments.lengths)
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    tokens_qkv = [x[0].transpose(0, 1) for x in (query, key, value)]
    kernel = _kernel(query, value)
    return kernel(*tokens_qkv, segments, scale, window)[None], None


def _kernel(query: Tensor, value: Tensor) -> Any:
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type == "npu" and query.dtype != torch.float64:
        return _fusion
    fits = query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    if query.device.type == "cuda" and half and fits and _varlen_attn() is not None:
        return _varlen
    return _grouped


def _grouped(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    plan: SegmentPlan,
    scale: float,
    window: int | None,
) -> Tensor:
    sizes = [rows * length for rows, length in plan.groups]

    def padded(x: Tensor) -> list[Tensor]:
        heads = x.shape[1]
        flat = x.reshape(x.shape[0], -1)
        if plan.gather is not None:
            flat = flat.index_select(0, plan.gather)
        # split, not slices: the gradient of each slice would be as large as the whole
        return [
            part.view(rows, length, heads, -1).transpose(1, 2)
            for part, (rows, length) in zip(flat.split(sizes), plan.groups, strict=True)
        ]

    outputs = [
        _attend(q, k, v, scale, window).transpose(1, 2).flatten(0, 1).flatten(1)
        for q, k, v in zip(padded(query_THD), padded(key_TKD), padded(value_TKD), strict=True)
    ]
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if plan.scatter is not None:
        out = out.index_select(0, plan.scatter)
    return out.view(query_THD.shape[0], query_THD.shape[1], -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of a batch [rows, heads, length, D], banded if a window is given."""
    grouped_heads = query.shape[1] != key.shape[1]
    if grouped_heads and query.device.type != "cpu":
        # off the CPU only half-precision flash kernels know grouped heads: the rest would
        # fall back to materialised scores
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        grouped_heads = False
    attend = functools.partial(
        F.scaled_dot_product_attention, scale=scale, enable_gqa=grouped_heads
    )
    length = query.shape[2]
    if window is None or window >= length:
        return attend(query, key, value, is_causal=True)
    block = max(window, WINDOW_BLOCK)
    outputs = []
    for number, part in enumerate(query.split(block, dim=2)):
        start = number * block
        stop = start + part.shape[2]
        first = max(0, start - window + 1)
        ago = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(
            first, stop, device=query.device
        )
        seen = slice(first, stop)
        mask = (ago >= 0) & (ago < window)
        outputs.append(attend(part, key[:, :, seen], value[:, :, seen], attn_mask=mask))
    return torch.cat(outputs, dim=2)


def _varlen(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    plan: SegmentPlan,
    scale: float,
    window: int | None,
) -> Tensor:
    longest = max(plan.lengths)
    attend = _varlen_attn()
    assert attend is not None
    # torch 2.11 takes grouped heads as they are; later versions want to be told
    flags = inspect.signature(attend).parameters
    told = {"enable_gqa": query_THD.shape[1] != key_TKD.shape[1]} if "enable_gqa" in flags else {}
    return attend(
        query_THD.contiguous(),
        key_TKD.contiguous(),
        value_TKD.contiguous(),
        plan.offsets,
        plan.offsets,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **told,
    )


@functools.cache
def _varlen_attn() -> Any:
    """torch's varlen_attn if this version has one with windows (2.11 on), else None."""
    try:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None
    return attend if "window_size" in inspect.signature(attend).parameters else None


def _fusion(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    plan: SegmentPlan,
    scale: float,
    window: int | None,
) -> Tensor:
    """torch_npu.npu_fusion_attention over back-to-back rows (layout TND).

    sparse_mode 3 is causal from the lower right, 4 a band; both take the 2048 x 2048 triangle as
    the compressed form of the whole mask (Ascend documentation of npu_fusion_attention).
    """
    band = {} if window is None else {"pre_tockens": window - 1, "next_tockens": 0}
    return importlib.import_module("torch_npu").npu_fusion_attention(
        query_THD.contiguous(),
        key_TKD.contiguous(),
        value_TKD.contiguous(),
        query_THD.shape[1],
        "TND",
        atten_mask=_triangle(query_THD.device),
        scale=scale,
        keep_prob=1.0,
        actual_seq_qlen=plan.ends,
        actual_seq_kvlen=plan.ends,
        sparse_mode=3 if window is None else 4,
        **band,
    )[0]


@functools.cache
def _triangle(device: torch.device) -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def architecture(module: nn.Module) -> str:
    """The name users know a model by: its configuration's first architecture, or its class."""
    config = getattr(module, "config", None)
    return (getattr(config, "architectures", None) or [type(module).__name__])[0]


def refuse_unsupported(config: Any) -> None:
    """Raise UserError naming the architecture and the field, from its configuration alone.

    What the load-time check on short rows could miss: caps that small logits hardly feel, chunks
    and recurrent states.
    """
    text = config.get_text_config()
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    known = {"full_attention", "sliding_attention"}
    for field, reason in {
        "attn_logit_softcapping": "caps its attention scores",
        "final_logit_softcapping": "caps its logits",
        "attention_chunk_size": "attends in chunks",
        "is_encoder_decoder": "has an encoder",
    }.items():
        if getattr(text, field, None):
            raise UserError(f"{name} {reason} ({field} in its config.json): not supported")
    unknown = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - known)
    if unknown:
        raise UserError(
            f"{name} has layers of type {', '.join(unknown)} (layer_types in its config.json), whose "
            f"state would leak from row to row of a pack: only softmax attention is supported"
        )


def _refuse_unknown(
    module: nn.Module, others: dict[str, Any], dropout: float, attention_mask: Tensor | None
) -> None:
    wanted = [
        name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None
    ]
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        wanted.append("is_causal=False")
    if dropout:
        wanted.append(f"dropout={dropout}")
    if attention_mask is not None:
        wanted.append("attention_mask")
    if wanted:
        raise UserError(
            f"{architecture(module)} asks its attention for {', '.join(wanted)}, "
            f"which packed attention does not compute: this architecture is not supported"
        )


# No mask function is registered beside it: transformers then makes no mask at all.
AttentionInterface.register(IMPLEMENTATION, packed_attention)
