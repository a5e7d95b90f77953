"""A transformers model over packed rows: policy (log-probs), value and reward (scores).

transformers' own modelling code runs unchanged, with our attention function; this file packs rows,
picks the hidden states that predict loss tokens, applies the head, and builds the model: empty,
sharded, then filled, then checked against its own unpacked forward.

Shapes: T tokens of a microbatch, S loss tokens, R rows, H hidden size, L tokens of one row.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from fsdprl.attention import IMPLEMENTATION, architecture, plan_segments, refuse_unsupported
from fsdprl.checkpoint_files import NO_CODE, find_checkpoint
from fsdprl.checkpoint_io import load_weights
from fsdprl.errors import UserError
from fsdprl.heads import head_logp, head_top
from fsdprl.options import ShardingOptions
from fsdprl.parallel import parallelize, reshard
from fsdprl.routing import experts_per_token, router_balance

Kind = Literal["policy", "value", "reward"]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest mean difference, in nats, between the packed and the model's own log-probs at load. A
row that sees another row, or a cap or scale left out, is off by a multiple of it."""


@dataclass(frozen=True, eq=False)
class Packed:
    """One microbatch: rows back to back, without padding. Tensors are on the model's device."""

    ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], counting from 0 in each row."""
    lengths: tuple[int, ...]
    """Tokens of each row; (1,) for the dummy token of no rows."""
    target: Tensor
    """int64 [S], packed index of each loss token; the hidden state before it predicts it."""
    temperature: Tensor
    """float64 [S], sampling temperature of each loss token's row."""
    tempered: bool
    """Whether any temperature differs from 1."""
    rows: int
    """R; 0 for the dummy microbatch."""


def pack(rows: Sequence[tuple[Tensor, Tensor, float]], device: torch.device) -> Packed:
    """Pack rows (ids [L], loss mask [L], temperature) in this order.

    No rows give one dummy token and S = 0: the forward and backward run, with every collective
    they contain, and add nothing. The first token of a row has no prefix and cannot be a loss token.
    """
    real = len(rows)
    if not rows:
        rows = [(torch.zeros(1), torch.zeros(1, dtype=torch.bool), 1.0)]
    lengths = torch.tensor([len(ids) for ids, _, _ in rows])
    assert int(lengths.min()) > 0, "an empty row"
    starts = lengths.cumsum(0) - lengths
    row_T = torch.arange(len(rows)).repeat_interleave(lengths)
    mask_T = torch.cat([mask for _, mask, _ in rows])
    assert not bool(mask_T[starts].any()), "the first token of a row has no prefix"
    target_S = mask_T.nonzero().squeeze(1)
    temperature_R = torch.tensor([t for _, _, t in rows], dtype=torch.float64)
    return Packed(
        ids=torch.cat([ids for ids, _, _ in rows]).to(device, torch.int64),
        positions=(torch.arange(len(row_T)) - starts[row_T]).to(device),
        lengths=tuple(lengths.tolist()),
        target=target_S.to(device),
        temperature=temperature_R[row_T[target_S]].to(device),
        tempered=bool((temperature_R != 1.0).any()),
        rows=real,
    )


class PackedModel(nn.Module):
    """A transformers model (`.hf`) with one root forward over packed rows.

    Everything that touches weights happens inside forward (or `unpacked`), because this module is
    the FSDP root: its hooks gather the embeddings and the head around those two methods only.
    """

    def __init__(self, hf: Any, kind: Kind, dtype: torch.dtype, head_chunk_tokens: int) -> None:
        super().__init__()
        self.hf = hf
        self.kind: Kind = kind
        self.dtype = dtype
        """The type of the forward computation; parameters may be wider."""
        self.head_chunk_tokens = head_chunk_tokens
        self.eval()

    @property
    def hf_config(self) -> Any:
        return self.hf.config

    def train(self, mode: bool = True) -> "PackedModel":
        """Gradients need no mode, and dropout stays off: log-probs must repeat exactly."""
        super().train(mode)
        self.hf.eval()
        return self

    def forward(
        self,
        packed: Packed,
        *,
        also: Collection[str] = (),
        choices_SK: Tensor | None = None,
        top: int = 0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """policy: (log-probs [S], {name: [S]} of "entropy", "collision" and "balance" as far as `also`
        names them), float32 or float64; see head_logp. balance: the row's router_balance on each of its
        loss tokens; UserError for a model without routers. choices: words of each loss token, whose
        log-probs are "logp_top" [S, K]. top: no log-probs of the tokens, but those of the likeliest
        words at each, and {"top_ids": which these are}.

        value: (value [S] of the state before each loss token, {}). reward: (score [R], {}) at the
        last token of each row. Differentiable; empty results stay connected to the graph.
        """
        routers = "balance" in also
        output = self._body(
            packed.ids,
            routers=routers and experts_per_token(self.hf.config) > 0,
            position_ids=packed.positions[None],
            segments=plan_segments(packed.lengths, packed.ids.device),
        )
        hidden_TH = output.last_hidden_state[0]
        if self.kind == "reward":
            ends = torch.tensor(packed.lengths).cumsum(0)[: packed.rows] - 1
            return self._score(hidden_TH[ends.to(hidden_TH.device)]), {}
        hidden_SH = hidden_TH.index_select(0, packed.target - 1)
        if self.kind == "value":
            return self._score(hidden_SH), {}
        head = self.hf.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        temperature = packed.temperature if packed.tempered else None
        chunk = {"chunk_tokens": self.head_chunk_tokens}
        if top:
            ids, logp_top = head_top(hidden_SH, weight, bias, temperature, top, **chunk)
            return logp_top, {"top_ids": ids}
        if choices_SK is not None:  # a teacher's output layer may be padded to more words than ours
            choices_SK = choices_SK.clamp(max=len(weight) - 1)
        logp, beside = head_logp(
            hidden_SH,
            weight,
            bias,
            packed.ids[packed.target],
            temperature,
            also=[name for name in also if name != "balance"],
            choices_SK=choices_SK,
            **chunk,
        )
        return logp, beside | ({"balance": self._balance(output, packed)} if routers else {})

    def unpacked(self, ids_L: Tensor) -> Tensor:
        """What forward must agree with, computed for one row [L] alone in transformers' own way.

        policy: log-probs [L - 1] of ids[1:]; value: values [L - 1] before each of them; reward:
        score [1]. Temperature 1; the whole [L, V] logits exist, so keep the row short.
        """
        config = self.hf.config
        config._attn_implementation = "sdpa"
        try:
            if self.kind == "policy":
                logits = self.hf(input_ids=ids_L[None], use_cache=False).logits[0, :-1]
                logp = logits.to(_wide(self.dtype)).log_softmax(-1)
                return logp.gather(1, ids_L[1:, None]).squeeze(1)
            if self.kind == "reward":
                return (
                    self.hf(input_ids=ids_L[None], use_cache=False).logits[0].to(_wide(self.dtype))
                )
            return self._score(self._body(ids_L).last_hidden_state[0, :-1])
        finally:
            config._attn_implementation = IMPLEMENTATION

    def _body(self, ids: Tensor, *, routers: bool = False, **arguments: Any) -> Any:
        """What the model without its head makes: last_hidden_state [1, T, H] and, if asked for, each
        layer's router_logits [T, E]. A cache or an attention mask would be silently wrong here."""
        if routers or getattr(self.hf.config, "output_router_logits", False):
            arguments["output_router_logits"] = routers
        return self.hf.base_model(
            input_ids=ids[None], attention_mask=None, use_cache=False, **arguments
        )

    def _balance(self, output: Any, packed: Packed) -> Tensor:
        """Each row's router_balance on its loss tokens, [S]. A loss of it must depend on the log-probs too,
        be it 0 times: FSDP gathers a layer for backward when its output's gradient comes by."""
        chosen = experts_per_token(self.hf.config)
        balance_R = router_balance(output.router_logits, packed.lengths, chosen)
        row_T = torch.arange(len(packed.lengths)).repeat_interleave(torch.tensor(packed.lengths))
        return balance_R[row_T.to(packed.target.device)[packed.target]]

    def _score(self, hidden: Tensor) -> Tensor:
        # one label: the sum only drops the dimension, and unlike a view FSDP can hook it safely
        return self.hf.score(hidden).to(_wide(self.dtype)).sum(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def load_model(
    path: str | Path,
    *,
    kind: Kind = "policy",
    options: ShardingOptions,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: str,
    seed: int,
    trainable: bool = True,
) -> PackedModel:
    """Build a checkpoint's model, sharded over `mesh`. Collective over the mesh's ranks.

    dtype: the type of the forward computation. A trainable model keeps float32 masters (float64
    for float64); a frozen one keeps only `dtype` and takes no gradients. seed: of a value or reward
    head that the checkpoint does not have.

    Raises UserError for what is no usable checkpoint, for an unsupported architecture, for a frozen
    reward model without a score head, and where packed and own log-probs differ.
    """
    folder = find_checkpoint(str(path)).folder
    compute = DTYPES[dtype]
    stored = _wide(compute) if trainable else compute
    hf = empty_model(folder, kind=kind, dtype=stored, device=device)
    model = PackedModel(hf, kind, compute, options.head_chunk_tokens)
    model.requires_grad_(trainable)
    parallelize(model, mesh, options, compute)
    # parameters only: buffers (rotary frequencies) were computed for real, and to_empty would
    # leave garbage in them
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    fresh = load_weights(model, folder)
    if fresh and kind == "reward" and not trainable:
        raise UserError(
            f"{folder} lacks {', '.join(fresh)}: it is no reward model; train one with "
            f"recipes/reward_model.py, or give one saved as a sequence classifier with one label"
        )
    for name in fresh:
        _initialise(hf.get_parameter(name), hf.config, kind, seed)
    check_packing(model, folder)
    return model


def empty_model(
    folder: str | Path,
    *,
    kind: Kind = "policy",
    dtype: torch.dtype,
    device: torch.device,
    attention: str = IMPLEMENTATION,
) -> Any:
    """The transformers model with parameters on the meta device and real buffers on the CPU.

    device: where it will live. attention: name of the attention function it will call.
    Raises UserError for an unsupported architecture.
    """
    config = AutoConfig.from_pretrained(folder, **NO_CODE)
    refuse_unsupported(config)
    auto: Any = AutoModelForCausalLM
    if kind != "policy":
        auto = AutoModelForSequenceClassification
        declared = (config.architectures or [""])[0]
        if declared.endswith("ForSequenceClassification") and config.num_labels != 1:
            raise UserError(
                f"{folder}: {declared} has {config.num_labels} labels; a {kind} model has one"
            )
        config.num_labels = 1
    if device.type == "npu" or dtype == torch.float64:
        config._experts_implementation = "eager"  # the grouped product has no kernel for them
    try:
        with init_empty_weights(include_buffers=False):
            hf = auto.from_config(config, dtype=dtype, attn_implementation=attention, **NO_CODE)
    except ValueError as error:
        raise UserError(f"{folder}: transformers cannot build this model: {error}") from None
    if not getattr(hf, "_supports_flash_attn", False):
        # such models tell their attention all they need to know; others rely on masks
        raise UserError(
            f"{architecture(hf)} does not support flash attention in transformers, so its rows "
            f"cannot be packed: this architecture is not supported"
        )
    hf.tie_weights()  # init_empty_weights makes two parameters of a tied one
    for parameter in hf.parameters():  # some architectures keep a few in a type of their own
        parameter.data = parameter.data.to(dtype)
    return hf


@torch.no_grad()
def _initialise(parameter: Tensor, config: Any, kind: Kind, seed: int) -> None:
    """Draw a head that the checkpoint lacks; the same numbers whatever the number of ranks."""
    std = getattr(config.get_text_config(), "initializer_range", 0.02)
    if kind == "value":
        # near 0: values of the usual spread, about 1, would be the noise of the first advantages
        std /= parameter.shape[-1] ** 0.5
    generator = torch.Generator().manual_seed(seed)
    full = torch.empty(parameter.shape, dtype=torch.float64).normal_(0.0, std, generator=generator)
    full = full.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        full = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(full)


@torch.no_grad()
def check_packing(model: PackedModel, folder: Path | str) -> None:
    """Compare two packed short rows with the model's own forward of each. Collective.

    Raises UserError naming the architecture, on every rank alike, if they differ.
    """
    device = next(model.parameters()).device
    rows = _check_rows(model, device)
    first = [(ids, torch.arange(len(ids)) > 0, 1.0) for ids in rows]
    with torch.compiler.set_stance("force_eager"):
        got = model(pack([(ids.cpu(), mask, t) for ids, mask, t in first], device))[0]
        want = torch.cat([model.unpacked(ids) for ids in rows])
    reshard(model)
    difference = float((got - want).abs().mean())
    if not difference <= TOLERANCE[model.dtype]:
        raise UserError(
            f"{folder}: {architecture(model.hf)} gives other results for packed rows than for the "
            f"same rows alone (mean difference {difference:.3g}, at most "
            f"{TOLERANCE[model.dtype]:g} in {str(model.dtype).removeprefix('torch.')}): rows leak "
            f"into each other or its head does more than a linear map. It is not supported"
        )


def _check_rows(model: PackedModel, device: torch.device) -> list[Tensor]:
    """Two rows of 11 and 6 random tokens, the padding token not among them."""
    text = model.hf_config.get_text_config()
    allowed = torch.tensor([i for i in range(min(text.vocab_size, 1000)) if i != text.pad_token_id])
    picks = torch.randint(len(allowed), (17,), generator=torch.Generator().manual_seed(0))
    return list(allowed[picks].to(device).split([11, 6]))
