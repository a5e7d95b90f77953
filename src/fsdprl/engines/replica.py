"""The built-in engine's own copy of the model: built empty, filled only from the weight stream."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdprl.attention import architecture
from fsdprl.engines.arrivals import Arrivals, Expected
from fsdprl.engines.kvcache import IMPLEMENTATION, Decode, KVCache, Prefill
from fsdprl.errors import UserError
from fsdprl.hf_layout import Item, hf_items
from fsdprl.models import empty_model
from fsdprl.stream import Bucket

CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Mean difference of log-probs, relative to the largest logit where that is above 1, at which the
engine's forward counts as another model than transformers' own. Half precision is that wide
because a mixture's routing may flip; scaled or capped logits are further off."""


class Replica:
    """A transformers causal LM that decodes through `cached_attention`."""

    def __init__(
        self, path: str, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        """Build the model of the checkpoint folder `path` without its weights.

        Raises UserError for an architecture whose state the engine cannot cache.
        """
        self.hf = empty_model(path, dtype=dtype, device=device, attention=IMPLEMENTATION)
        refuse_windows(self.hf.config, max_model_len)
        self.hf.requires_grad_(False).eval()
        self.dtype, self.device = dtype, device
        self.allocate()
        for module in self.hf.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self.items: list[Item] = hf_items(self.hf)
        self.body: nn.Module = self.hf.get_decoder()
        self.head: nn.Module = self.hf.get_output_embeddings()
        self.vocabulary: int = self.head.weight.shape[0]  # type: ignore[assignment]
        self.weight_bytes = sum(p.nbytes for p in self.hf.parameters())
        self.cache = self._probe()
        self.checked = False

    def allocate(self) -> None:
        """Give every parameter memory on the device. Zeros: on CPU they cost none until written."""
        fresh: dict[int, nn.Parameter] = {}
        for module in self.hf.modules():
            for name, old in module.named_parameters(recurse=False):
                if id(old) not in fresh:
                    empty = torch.zeros(old.shape, dtype=old.dtype, device=self.device)
                    fresh[id(old)] = nn.Parameter(empty, requires_grad=False)
                setattr(module, name, fresh[id(old)])

    def drop(self) -> None:
        """Give the weights' memory back; only their shapes stay."""
        fresh: dict[int, nn.Parameter] = {}
        for module in self.hf.modules():
            for name, old in module.named_parameters(recurse=False):
                if id(old) not in fresh:
                    fresh[id(old)] = nn.Parameter(old.to("meta"), requires_grad=False)
                setattr(module, name, fresh[id(old)])

    def move(self, device: torch.device) -> None:
        """Move the weights to host memory or back."""
        for parameter in self.hf.parameters():
            parameter.data = parameter.data.to(device)

    def load(self, buckets: Iterator[Bucket]) -> dict[str, int]:
        """Fill the replica; returns the checksum of every tensor as it now stands in the replica.

        Raises EngineError naming the parameter that is missing, unexpected, doubled, of the wrong
        shape or type, or not finite.
        """
        holders = dict(self.hf.named_parameters()) | dict(self.hf.named_buffers())
        places = {
            item.name: holders[item.param].data.view(-1)[item.start : item.start + item.numel]
            for item in self.items
        }
        arrivals = Arrivals(
            {item.name: Expected(item.shape, places[item.name].dtype) for item in self.items}
        )

        def fill(bucket: Bucket) -> None:
            for name, tensor in bucket.tensors:
                arrivals.take(name, places[name].view(tensor.shape).copy_(tensor))
            for part in bucket.parts:
                rows = places[part.name].view(-1, *part.rows.shape[1:])
                rows = rows.narrow(0, part.first_row, len(part.rows))
                arrivals.take_part(part.name, part.first_row, rows.copy_(part.rows))

        for bucket in arrivals.of(buckets):
            fill(bucket)
            del bucket  # gone before the next one is made
        return arrivals.checksums

    def prefill(self, ids: Tensor, last: Tensor) -> tuple[Prefill, Tensor]:
        """Whole prompts, ids int64 [P, T] padded on the right; logits float32 [P, V] at index `last`."""
        plan = Prefill()
        positions = torch.arange(ids.shape[1], device=ids.device)[None, :]
        hidden = self._hidden(ids, positions, plan)
        rows = torch.arange(len(ids), device=ids.device)
        return plan, self.logits(hidden[rows, last])

    def decode(self, token: Tensor, length: Tensor, columns: int, ragged: bool) -> Tensor:
        """One new token of each of the first B slots; its last hidden state [B, hidden].

        token, length: int64 [B], the token to append and how many are cached before it.
        """
        plan = Decode(self.cache, length, columns, ragged)
        return self._hidden(token[:, None], length[:, None], plan)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """The head on hidden states [B, hidden]: float32 [B, V]."""
        return self.head(hidden).float()

    def _hidden(self, ids: Tensor, positions: Tensor, plan: Prefill | Decode) -> Tensor:
        return self.body(
            input_ids=ids, position_ids=positions, use_cache=False, cache_plan=plan
        ).last_hidden_state

    @torch.inference_mode()
    def _probe(self) -> KVCache:
        """A forward on zero weights shows what there is to cache, or that it cannot be done."""
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        last = torch.tensor([1], device=self.device)
        plan, logits = self.prefill(ids, last)
        shapes = {(x.shape[1], x.shape[3]) for x in [*plan.keys, *plan.values]}
        layers = self.hf.config.get_text_config().num_hidden_layers
        if len(shapes) != 1 or len(plan.keys) != layers:
            raise UserError(
                f"{architecture(self.hf)} does not attend alike in all of its {layers} layers; the "
                f"built-in engine cannot cache that: use --engine.kind vllm"
            )
        assert logits.shape == (1, self.vocabulary)
        ((heads, head_dim),) = shapes
        return KVCache(layers, heads, head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def self_check(self) -> None:
        """Compare prefill and decode with transformers' own forward on two short rows, once.

        Finds architectures that do something to their logits or positions after or around what the
        engine runs. Raises UserError naming the architecture.
        """
        if self.checked:
            return
        lengths, steps = (5, 2), 3
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (2, max(lengths) + steps), generator=generator)
        ids = ids.to(self.device)
        own = self._decoded(ids, lengths, steps)
        self.hf.config._attn_implementation = "eager" if self.device.type == "npu" else "sdpa"
        theirs = []
        for row, length in enumerate(lengths):
            out = self.hf(input_ids=ids[row : row + 1, : length + steps], use_cache=False)
            theirs.append(out.logits[0, length - 1 : length + steps].float())
        self.hf.config._attn_implementation = IMPLEMENTATION
        reference = torch.stack(theirs)
        scale = max(1.0, float(reference.abs().max()))
        off = float((own.log_softmax(-1) - reference.log_softmax(-1)).abs().mean()) / scale
        if not off <= CHECK_TOLERANCE[self.dtype]:
            raise UserError(
                f"{architecture(self.hf)}: the built-in engine's log-probs are {off:.2g} off those of "
                f"transformers' own forward on two short rows, so it cannot serve this architecture: "
                f"use --engine.kind vllm"
            )
        self.checked = True

    def _decoded(self, ids: Tensor, lengths: tuple[int, ...], steps: int) -> Tensor:
        """Logits [rows, 1 + steps, V] of ragged rows: one prefill, then a token at a time."""
        length = torch.tensor(lengths, device=ids.device)
        rows = torch.arange(len(lengths), device=ids.device)
        plan, logits = self.prefill(ids[:, : max(lengths)], length - 1)
        self.cache.open(len(lengths), max(lengths) + steps)
        self.cache.place(plan, rows, 0)
        found = [logits]
        for step in range(steps):
            columns = max(lengths) + step + 1
            hidden = self.decode(ids[rows, length + step], length + step, columns, ragged=True)
            found.append(self.logits(hidden))
        return torch.stack(found, dim=1)


def refuse_windows(config: Any, max_model_len: int) -> None:
    """Raise UserError for a sliding window that a sequence could outgrow, or too few positions."""
    text = config.get_text_config()
    name = (config.architectures or [type(config).__name__])[0]
    kinds = getattr(text, "layer_types", None) or []
    window = getattr(text, "sliding_window", None) or 0
    slides = "sliding_attention" in kinds or (not kinds and window > 0)
    if slides and window < max_model_len:
        raise UserError(
            f"{name} attends within a sliding window of {window} tokens, fewer than the "
            f"{max_model_len} of --max-prompt-length and --max-new-tokens together: shorten them, or "
            f"use --engine.kind vllm"
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise UserError(
            f"--max-prompt-length and --max-new-tokens together are {max_model_len} tokens, but {name} "
            f"has {limit} positions (max_position_embeddings in its config.json)"
        )
