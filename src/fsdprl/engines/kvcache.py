"""Keys and values of the sequences being decoded, and the attention that reads them.

transformers' own caches grow by concatenation or pad on the left; both copy or waste, and neither
lets one sequence leave while the others go on. Here every sequence has a slot, its tokens stand at
their own positions from column 0 on, and one attention function, registered with transformers,
writes new keys and values in place and attends. The modelling code runs as it is: it hands its
keyword arguments down to the attention function, and that is how the plan of a forward gets there.

Grouped query heads attend as if they were several queries of one key head, so that keys are read
once and never repeated: 5 to 20 times faster on CPU than repeating them.

Shapes: B sequences, P prompts, T tokens of the longest prompt, H query heads, K key heads, D head
size, L columns in use.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from fsdprl.attention import architecture
from fsdprl.errors import UserError

IMPLEMENTATION = "fsdprl_cached"
"""The name under which transformers knows cached_attention."""

CLEARED_COLUMNS = 64
"""Columns made finite at a time: masked scores of arbitrary bits could be NaN."""


@dataclass
class Prefill:
    """A forward over whole prompts, padded on the right: a causal mask alone hides the padding."""

    keys: list[Tensor] = field(default_factory=list)
    """Of each layer, in order: [P, K, T, D]."""
    values: list[Tensor] = field(default_factory=list)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Keep keys and values, attend causally."""
        if module.layer_idx != len(self.keys) or key.shape != value.shape:
            raise UserError(
                f"{architecture(module)} does not keep one key and one value of equal size per head "
                f"and layer; the built-in engine cannot cache that: use --engine.kind vllm"
            )
        self.keys.append(key)
        self.values.append(value)
        grouped = query.shape[1] != key.shape[1]
        if grouped and query.device.type != "cpu":
            # off the CPU, only half-precision kernels know grouped heads
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            grouped = False
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)


class KVCache:
    """Keys and values [layers, 2, slots, columns, K, D] in one buffer that is kept between calls."""

    def __init__(
        self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, self.heads, self.head_dim = layers, heads, head_dim
        self.dtype, self.device = dtype, device
        self.memory = torch.empty(0, dtype=dtype, device=device)
        self.store = self.memory.view(layers, 2, 0, 0, heads, head_dim)
        self.cleared = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * 2 * self.heads * self.head_dim * self.dtype.itemsize

    def open(self, slots: int, columns: int) -> None:
        """Make room for `slots` sequences of up to `columns` tokens; what was there is gone."""
        shape = (self.layers, 2, slots, columns, self.heads, self.head_dim)
        numel = torch.Size(shape).numel()
        if self.memory.numel() < numel:
            self.drop()
            self.memory = torch.empty(numel, dtype=self.dtype, device=self.device)
        self.store = self.memory[:numel].view(shape)
        self.cleared = 0

    def drop(self) -> None:
        """Give the memory back."""
        self.memory = torch.empty(0, dtype=self.dtype, device=self.device)
        self.store = self.memory.view(self.layers, 2, 0, 0, self.heads, self.head_dim)

    def clear_to(self, columns: int) -> None:
        """Make columns [0, columns) finite, without touching what was written since `open`.

        On CPU untouched columns take no memory, so long limits cost only when they are reached.
        """
        if columns > self.cleared:
            stop = min(max(columns, self.cleared + CLEARED_COLUMNS), self.store.shape[3])
            self.store[:, :, :, self.cleared : stop].zero_()
            self.cleared = stop

    def place(self, prompts: Prefill, source: Tensor, slot: int) -> None:
        """Copy prompts `source` int64 [n] into slots [slot, slot + n)."""
        columns = prompts.keys[0].shape[2]
        self.clear_to(columns)
        end = slot + len(source)
        for layer, both in enumerate(zip(prompts.keys, prompts.values, strict=True)):
            for which, states in enumerate(both):
                rows = states.transpose(1, 2).index_select(0, source)
                self.store[layer, which, slot:end, :columns] = rows

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first `columns` tokens of slots `source` to slots `target`, all int64 [n]."""
        used = self.store[:, :, :, :columns]
        used[:, :, target] = used[:, :, source]


class Decode:
    """A forward over one new token of each of the first B slots."""

    def __init__(self, cache: KVCache, lengths: Tensor, columns: int, ragged: bool) -> None:
        """lengths: int64 [B], tokens already cached; columns: the largest of them + 1."""
        cache.clear_to(columns)
        self.cache, self.columns, self.rows = cache, columns, len(lengths)
        self.index = torch.arange(self.rows, device=lengths.device) * cache.store.shape[3] + lengths
        self.mask = None
        if ragged:
            column = torch.arange(columns, device=lengths.device)
            seen = column[None, :] <= lengths[:, None]
            mask = torch.zeros(seen.shape, dtype=cache.dtype, device=lengths.device)
            self.mask = mask.masked_fill_(~seen, -torch.inf)[:, None, None, :]

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Write the new keys and values in place, attend to all of them."""
        store = self.cache.store[module.layer_idx]
        width = store.shape[-2] * store.shape[-1]
        for which, new in enumerate((key, value)):
            store[which].view(-1, width).index_copy_(0, self.index, new.reshape(self.rows, width))
        keys, values = store[:, : self.rows, : self.columns].transpose(2, 3)
        heads = query.shape[1]
        grouped = query.reshape(self.rows, store.shape[-2], -1, store.shape[-1])  # [B, K, H / K, D]
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self.mask, scale=scale
        )
        return out.reshape(self.rows, 1, heads, store.shape[-1])


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cache_plan: Prefill | Decode | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' layers call in the engine's replica.

    query [B, H, t, D], key and value [B, K, t, D]; returns [B, t, H, D]. A sliding window is refused
    where it could be reached, when the engine is built. Raises UserError naming the architecture
    where it asks for something else that is not computed here.
    """
    wanted = [
        name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None
    ]
    if cache_plan is None:
        wanted.append("a cache that its layers do not hand down")
    if wanted or attention_mask is not None:
        raise UserError(
            f"{architecture(module)} needs {', '.join(wanted) or 'a mask of its own'} in its attention; "
            f"the built-in engine cannot serve it: use --engine.kind vllm"
        )
    assert cache_plan is not None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return cache_plan.attend(module, query, key, value, scale), None


# No mask function is registered beside it: transformers then makes no mask at all.
AttentionInterface.register(IMPLEMENTATION, cached_attention)
