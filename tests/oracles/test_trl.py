"""Our losses against TRL's trainers, in float64 on random ragged batches: their `_compute_loss` on log-probs we choose.

Runs where trl can be imported: pip install trl. Written against trl 1.16. Differences that are TRL's:

- Its sigmoid ignores label_smoothing; ours is cDPO (Mitchell 2023). aot, exo_pair and robust take it in both.
- Its exo_pair holds label_smoothing in float32: the tolerance is 1e-7 there.
- bco_pair has no shift; ours may (`shift`, the paper's delta).
- sft is a mean over the chosen tokens of the batch; ours is one over each pair's, so that a pair's loss does not depend
  on the other pairs. Equal where the chosen completions are equally long; that is what is compared.
- The alpha-divergence is computed in float32, and refuses float64: compared in float32.
- use_weighting (WPO) cannot be trained with hinge there: it multiplies in place what relu's gradient needs.
- KTO's baseline is a mean over the ranks' means, ours over the rows; equal where ranks have as many rows.
- ld_alpha, rpo_alpha: TRL has no rpo_alpha any more (it is sigmoid + sft with weights); ld_alpha agrees.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdprl import coupled, losses, preference, surrogates, weights
from fsdprl.heads import head_logp, head_top
from tests.oracles.ragged import Ragged, reduced, same

trl = pytest.importorskip("trl", reason="trl is not installed", exc_type=ImportError)
SEEDS = pytest.mark.parametrize("seed", range(4))


class Accelerator:
    """One process."""

    device, num_processes = torch.device("cpu"), 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def unwrap_model(self, model: Any) -> Any:
        return model


class Model:
    """A model whose log-probs are given."""

    training, is_gradient_checkpointing = True, False

    def __init__(self, table: Tensor, collision: Tensor | None = None) -> None:
        self.table = table
        self.collision = torch.zeros_like(table) if collision is None else collision

    def __call__(self, **_: Any) -> Any:
        zeros = torch.zeros_like(self.table)
        return SimpleNamespace(
            log_probs=self.table,
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
            log_sum_sq_probs=self.collision,
        )


def trainer(**fields: Any) -> Any:
    """What a trainer's _compute_loss reads of itself."""
    common: dict[str, Any] = {
        "accelerator": Accelerator(), "_metrics": defaultdict(lambda: defaultdict(list)),
        "aux_loss_enabled": False, "_total_train_tokens": 0, "_tp_size": 1, "precompute_ref_logps": False,
    }  # fmt: skip
    return SimpleNamespace(**common | fields)


def inputs(rows: Ragged) -> dict[str, Tensor]:
    """A prompt of one token before every completion."""
    mask = torch.cat([torch.zeros(len(rows.mask), 1), rows.mask.double()], dim=1).long()
    return {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}


def their_dpo(
    logp: Tensor, ref: Tensor, rows: Ragged, collision: Tensor | None = None, **options: Any
) -> Tensor:
    from trl import DPOTrainer

    fields = {
        "beta": 0.3, "label_smoothing": 0.0, "ld_alpha": None, "f_divergence_type": "reverse_kl", "loss_weights": [1.0],
        "f_alpha_divergence_coef": 0.5, "use_weighting": False,
        "args": SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
    } | options  # fmt: skip
    tables = [table.masked_fill(~rows.mask, 0.0) for table in (logp, ref)]
    policy = Model(tables[0], collision)
    them = trainer(ref_model=Model(tables[1]), **fields)
    them.model = policy
    return DPOTrainer._compute_loss(them, policy, inputs(rows), False)


def halves(rows: Ragged) -> tuple[Tensor, Tensor]:
    """chosen and unit, [N]: TRL's batch is all chosen, then all rejected."""
    count = len(rows.mask) // 2
    return torch.arange(2 * count) < count, torch.arange(2 * count) % count


def our_dpo(logp: Tensor, ref: Tensor, rows: Ragged, **options: Any) -> Tensor:
    chosen, unit = map(rows.spread, halves(rows))
    columns = (rows.pack(logp), rows.pack(ref), chosen, unit, rows.segment)
    result = preference.dpo_loss(*columns, **{"beta": 0.3} | options)
    return reduced(result, weights.row_mean(rows.lengths).to(logp), rows.segment)


def compare(
    seed: int, ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-10
) -> None:
    """tolerance: above 1e-6 also compares in float32."""
    dtype = torch.float32 if tolerance > 1e-6 else torch.float64
    rows = Ragged.of(seed)
    ref = rows.logps().to(dtype)
    same(
        lambda logp: our_dpo(logp, ref, rows, **ours),
        lambda logp: their_dpo(logp, ref, rows, **theirs),
        rows.near(ref).to(dtype),
        rows.mask,
        tolerance,
    )


@SEEDS
@pytest.mark.parametrize(
    "name",
    [
        "sigmoid",
        "sigmoid_norm",
        "hinge",
        "ipo",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
    ],
)
def test_dpo_losses(name: str, seed: int):
    compare(seed, {"losses": [name]}, {"loss_types": [name]})


@SEEDS
@pytest.mark.parametrize("name", ["robust", "exo_pair"])
def test_losses_with_label_smoothing(name: str, seed: int):
    options = {"label_smoothing": 0.1}
    tolerance = 1e-7 if name == "exo_pair" else 1e-10
    compare(seed, {"losses": [name], **options}, {"loss_types": [name], **options}, tolerance)


def test_their_sigmoid_ignores_label_smoothing():
    compare(0, {}, {"loss_types": ["sigmoid"], "label_smoothing": 0.3})


@SEEDS
def test_mixture_of_losses(seed: int):
    mixed = ["sigmoid", "bco_pair", "hinge"]
    compare(
        seed,
        {"losses": mixed, "loss_weights": [0.8, 0.2, 1.5]},
        {"loss_types": mixed, "loss_weights": [0.8, 0.2, 1.5]},
    )


@SEEDS
@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_ld_alpha(alpha: float, seed: int):
    compare(seed, {"ld_alpha": alpha}, {"loss_types": ["sigmoid"], "ld_alpha": alpha})


@SEEDS
@pytest.mark.parametrize("name", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_f_divergences(loss: str, name: str, seed: int):
    tolerance = 1e-5 if name == "alpha_divergence" else 1e-10
    theirs = {"loss_types": [loss], "f_divergence_type": name}
    compare(seed, {"losses": [loss], "f_divergence": name}, theirs, tolerance)


def test_sft_where_lengths_agree():
    rows = Ragged.of(0)
    mask = torch.ones_like(rows.mask)
    rows = Ragged(mask, torch.arange(len(mask)).repeat_interleave(mask.shape[1]), rows.draw)
    ref = rows.logps()
    same(
        lambda logp: our_dpo(logp, ref, rows, losses=["sft"]),
        lambda logp: their_dpo(logp, ref, rows, loss_types=["sft"]),
        rows.near(ref),
        mask,
    )


@SEEDS
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_losses_that_sort_the_batch(name: str, smoothing: float, seed: int):
    rows = Ragged.of(seed)
    ref = rows.logps()
    chosen, unit = halves(rows)

    def ours(logp: Tensor) -> Tensor:
        now, before = ((x.detach() * rows.mask).sum(1) for x in (logp, ref))
        options: dict[str, float] = {"beta": 0.3, "label_smoothing": smoothing}
        columns = [rows.pack(logp), rows.pack(ref)]
        if name == "aot":
            target = coupled.aot_targets(now, before, chosen, unit)
            samples = map(rows.spread, (target, chosen, unit))
            result = coupled.aot_loss(*columns, *samples, rows.segment, **options)
        else:
            target = coupled.aot_unpaired_targets(now - before, chosen)
            samples = map(rows.spread, (target, chosen))
            result = coupled.aot_unpaired_loss(*columns, *samples, rows.segment, **options)
        return reduced(result, weights.row_mean(rows.lengths), rows.segment)

    same(
        ours,
        lambda logp: their_dpo(logp, ref, rows, loss_types=[name], label_smoothing=smoothing),
        rows.near(ref),
        rows.mask,
    )


@SEEDS
@pytest.mark.parametrize("name", ["sigmoid", "ipo", "nca_pair"])
def test_wpo(name: str, seed: int):
    rows = Ragged.of(seed)
    ref, collision = rows.logps(), rows.logps()
    chosen, unit = map(rows.spread, halves(rows))
    weight = weights.row_mean(rows.lengths)

    def ours(logp: Tensor) -> Tensor:
        columns = (*map(rows.pack, (logp, collision, ref)), chosen, unit, rows.segment)
        return reduced(
            preference.dpo_wpo_loss(*columns, losses=[name], beta=0.3), weight, rows.segment
        )

    def theirs(logp: Tensor) -> Tensor:
        return their_dpo(logp, ref, rows, collision, loss_types=[name], use_weighting=True)

    same(ours, theirs, rows.near(ref), rows.mask)


def test_collision_is_theirs():
    """log sum_v p(v)^2 out of chunks of the LM head."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw) for n in (12, 50))
    target, names = torch.randint(50, (12,), generator=draw), ("entropy", "log_sum_sq_probs")
    theirs = ChunkedLogProbFunction.apply(hidden, weight, None, target, 0.7, 16, None, 1.0, names)
    ours = head_logp(
        hidden,
        weight,
        None,
        target,
        torch.full((12,), 0.7),
        chunk_tokens=5,
        also=("entropy", "collision"),
    )
    made = (ours[0], ours[1]["entropy"], ours[1]["collision"])
    torch.testing.assert_close(made, theirs[:3], rtol=1e-5, atol=1e-5)


@SEEDS
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto(loss: str, seed: int):
    from trl import KTOTrainer

    rows = Ragged.of(seed)
    ref = rows.logps()
    good = rows.numbers() > 0
    good[0], good[1] = True, False
    other = torch.roll(ref, 1, 0)  # log-probs of mismatched answers; only their mean gap enters
    gap = 0.1 + 0.2 * seed
    baseline = gap * float(rows.lengths.double().mean()) if loss == "kto" else 0.0

    def theirs(logp: Tensor) -> Tensor:
        mismatched = torch.where(rows.mask, other, 0.0)
        table, reference = (x.masked_fill(~rows.mask, 0.0) for x in (logp, ref))
        batch = inputs(rows) | {"label": good}
        them = trainer(
            beta=0.3, loss_type=loss, calculate_KL=loss == "kto", desirable_weight=1.3, undesirable_weight=0.7,
            args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
            ref_model=Model(reference),
        )  # fmt: skip
        policy = them.model = Model(table)
        sums = {
            id(policy): mismatched.sum(1) + gap * rows.lengths.double(),
            id(them.ref_model): mismatched.sum(1),
        }
        them._compute_kl_logps = lambda model, _: sums[id(model)] if loss == "kto" else None
        return KTOTrainer._compute_loss(them, policy, batch, False)

    def ours(logp: Tensor) -> Tensor:
        result = coupled.kto_loss(
            rows.pack(logp), rows.pack(ref), rows.spread(good), rows.segment, beta=0.3, baseline=baseline,
            desirable_weight=1.3, undesirable_weight=0.7,
        )  # fmt: skip
        return reduced(result, weights.row_mean(rows.lengths), rows.segment)

    same(ours, theirs, rows.near(ref), rows.mask)


GRPO = {
    "grpo": weights.sequence_mean,
    "bnpo": weights.token_mean,
    "dr_grpo": lambda tokens: weights.fixed_length(tokens, 16),
    "dapo": weights.token_mean,
    "cispo": weights.token_mean,
    "sapo": weights.sequence_mean,
}


@SEEDS
@pytest.mark.parametrize("delta", [None, 1.4])
@pytest.mark.parametrize(
    ("loss", "level"), [("grpo", "sequence"), *((loss, "token") for loss in GRPO)]
)
def test_grpo_losses(loss: str, level: str, delta: float | None, seed: int):
    """Every loss_type with its normalisation, token and sequence ratios, the two-sided clip, and the KL term."""
    from trl import GRPOTrainer

    rows = Ragged.of(seed)
    old, ref = rows.logps(), rows.logps()
    advantage, tokens = rows.numbers(), int(rows.mask.sum())
    high = 1.28 if loss == "cispo" else 0.28

    def ours(logp: Tensor) -> Tensor:
        columns = (rows.pack(logp), rows.pack(old), rows.spread(advantage))
        if loss == "cispo":
            term = losses.cispo_loss(*columns, ratio_low=0.0, ratio_high=high)
        elif loss == "sapo":
            term = surrogates.sapo_loss(*columns, tau_positive=1.3, tau_negative=1.7)
        elif level == "token":
            term = losses.clipped_surrogate(*columns, clip_low=0.2, clip_high=high, dual_clip=delta)
        else:
            term = losses.gspo_surrogate(
                *columns, rows.segment, clip_low=0.2, clip_high=high, dual_clip=delta
            )
        term = losses.combine(term, losses.kl_penalty(rows.pack(logp), rows.pack(ref), coef=0.04))
        return reduced(term, GRPO[loss](rows.lengths), rows.segment)

    def theirs(logp: Tensor) -> Tensor:
        them = trainer(
            loss_type=loss, importance_sampling_level=level, beta=0.04, epsilon_low=0.2, epsilon_high=high,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, max_completion_length=16,
            args=SimpleNamespace(
                delta=delta, use_bias_correction_kl=False, steps_per_generation=1, sapo_temperature_pos=1.3,
                sapo_temperature_neg=1.7,
            ),
            vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        )  # fmt: skip
        them.model = SimpleNamespace(training=True)
        ids = torch.zeros(rows.mask.shape, dtype=torch.int64)
        batch = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "advantages": advantage,
            "completion_mask": rows.mask.double(), "old_per_token_logps": old, "ref_per_token_logps": ref,
            "num_items_in_batch": torch.tensor(tokens),
        }  # fmt: skip
        return GRPOTrainer._compute_loss(them, None, batch)

    same(ours, theirs, rows.near(old), rows.mask)


@SEEDS
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_gkd(beta: float, seed: int, monkeypatch: pytest.MonkeyPatch):
    """Over all words, through the chunked head: the divergence of each token, and the student's gradients."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    gkd = pytest.importorskip("trl.experimental.gkd", exc_type=ImportError)
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    tokens, words, temperature = 13, 29, 0.7
    hidden, weight = noise(tokens, 8).requires_grad_(), noise(words, 8).requires_grad_()
    teacher, above = noise(tokens, 6), noise(words, 6)
    heat, target = torch.full((tokens,), temperature, dtype=torch.float64), torch.zeros(tokens)
    ids, logp_teacher = head_top(teacher, above, None, heat, words, chunk_tokens=5)
    _, made = head_logp(hidden, weight, None, target.long(), heat, chunk_tokens=5, choices_SK=ids)
    mine = losses.gkd_loss(made["logp_top"], logp_teacher, beta=beta)[0]
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        (hidden @ weight.T)[None], (teacher @ above.T)[None], beta=beta, temperature=temperature, reduction="none"
    )  # fmt: skip
    torch.testing.assert_close(mine, theirs[0].sum(1), rtol=1e-9, atol=1e-11)
    wrt = (hidden, weight)
    for own, other in zip(
        *(torch.autograd.grad(it.sum(), wrt) for it in (mine, theirs)), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-10)
