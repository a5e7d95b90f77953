"""Sampling filters, per-row randomness, inverse-CDF draws: against hand computation and vLLM's order."""

import math

import numpy as np
import pytest
import torch

from fsdprl.engines import Sampling
from fsdprl.engines.decoding import choose, filter_logits, mix64, uniforms
from fsdprl.errors import UserError

MASK = (1 << 64) - 1


def sampling(**given) -> Sampling:
    return Sampling(max_new_tokens=1, **given)


def filtered(logits: list[float], seen: list[bool] | None = None, **given) -> list[float]:
    mask = None if seen is None else torch.tensor([seen])
    return filter_logits(torch.tensor([logits]), sampling(**given), mask)[0].tolist()


def mix_in_python(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def test_mix64_gives_the_published_splitmix64_sequence():
    # First outputs for seed 1234567, as in the reference implementation's published test vector.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + i * 0x9E3779B97F4A7C15) & MASK for i in (1, 2, 3)]
    signed = torch.tensor(np.array(states, dtype=np.uint64).view(np.int64))
    assert [value & MASK for value in mix64(signed).tolist()] == published


def test_uniforms_equal_integer_arithmetic_in_python():
    seeds = [0, 1, 7, (1 << 62) + 12345, (1 << 63) - 1]
    positions = [0, 1, 2, 511, 100_000]
    got = uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist()
    for seed, position, value in zip(seeds, positions, got, strict=True):
        state = (mix_in_python(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK
        assert value == (mix_in_python(state) >> 40) / 2**24


def test_uniforms_look_uniform_and_unrelated():
    # neighbouring seeds and positions, which is what a run uses
    seeds, positions = torch.meshgrid(torch.arange(500), torch.arange(400), indexing="ij")
    u = uniforms(seeds.flatten(), positions.flatten()).double().view(500, 400)
    assert float(u.min()) >= 0.0 and float(u.max()) < 1.0
    count = u.numel()
    assert abs(float(u.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / count)
    bins = torch.histc(u.float(), bins=100, min=0, max=1).double()
    chi2 = float(((bins - count / 100) ** 2 / (count / 100)).sum())
    assert chi2 < 99 + 5 * math.sqrt(2 * 99)
    for other in (u.roll(1, 0), u.roll(1, 1), u.roll((1, 1), (0, 1))):
        correlation = float(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(count)


def test_uniforms_leave_torch_random_state_alone():
    before = torch.get_rng_state()
    uniforms(torch.arange(10), torch.arange(10))
    assert torch.equal(torch.get_rng_state(), before)


def test_choose_takes_the_token_whose_cdf_interval_holds_the_uniform():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(6, 1)
    uniform = torch.tensor([0.0, 0.05, 0.15, 0.31, 0.61, 0.9999999])
    token, logp = choose(logits, uniform)
    assert token.tolist() == [0, 0, 1, 2, 3, 3]
    probability = torch.tensor([0.1, 0.1, 0.2, 0.3, 0.4, 0.4])
    torch.testing.assert_close(logp, probability.log(), atol=1e-6, rtol=0)


def test_choose_never_takes_an_excluded_token():
    excluded = -math.inf
    logits = torch.tensor([[excluded, 0.0, excluded, 0.0, excluded, excluded]])
    uniform = torch.tensor([0.0, 0.25, 0.49999997, 0.5, 0.75, 1 - 2**-24])
    token, logp = choose(logits.repeat(6, 1), uniform)
    assert token.tolist() == [1, 1, 1, 3, 3, 3]
    torch.testing.assert_close(logp, torch.full((6,), math.log(0.5)), atol=1e-6, rtol=0)


def test_choose_stays_inside_whatever_the_total_rounds_to():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 50, generator=generator) * 3
    logits[:, 40:] = -math.inf
    token, logp = choose(logits, torch.full((4096,), 1 - 2**-24))
    assert int(token.max()) < 40
    assert bool(torch.isfinite(logp).all())


def test_choose_greedy_is_the_argmax_with_its_plain_log_prob():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    token, logp = choose(logits, None)
    assert token.tolist() == [1]
    torch.testing.assert_close(logp, logits.log_softmax(-1)[:, 1])


def test_samples_follow_the_distribution():
    probability = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    count = 100_000
    seeds = torch.arange(count)
    token, _ = choose(probability.log().repeat(count, 1), uniforms(seeds, torch.zeros_like(seeds)))
    share = torch.bincount(token, minlength=6) / count
    spread = (probability * (1 - probability) / count).sqrt()
    assert bool(((share - probability).abs() < 5 * spread).all())


def test_temperature_divides_the_logits():
    assert filtered([1.0, -2.0], temperature=0.5) == [2.0, -4.0]


def test_temperature_zero_leaves_logits_and_ignores_filters():
    assert filtered([1.0, -2.0, 0.5], temperature=0.0, top_k=1, top_p=0.1) == [1.0, -2.0, 0.5]


def test_top_k_keeps_the_k_largest():
    out = filtered([0.0, 3.0, 1.0, 2.0], top_k=2)
    assert out == [-math.inf, 3.0, -math.inf, 2.0]
    assert filtered([0.0, 1.0], top_k=-1) == [0.0, 1.0]
    assert filtered([0.0, 1.0], top_k=5) == [0.0, 1.0]


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    kept = [value > -math.inf for value in filtered(logits, top_p=0.75)]
    assert kept == [False, True, False, True]  # 0.5 is short of 0.75, 0.5 + 0.3 reaches it
    kept = [value > -math.inf for value in filtered(logits, top_p=0.9)]
    assert kept == [True, True, False, True]
    kept = [value > -math.inf for value in filtered(logits, top_p=0.001)]
    assert kept == [False, True, False, False]


def test_min_p_is_relative_to_the_most_likely_token():
    logits = [math.log(p) for p in (0.5, 0.3, 0.12, 0.08)]
    kept = [value > -math.inf for value in filtered(logits, min_p=0.2)]
    assert kept == [True, True, True, False]  # 0.2 * 0.5 = 0.1


def test_filters_run_in_vllms_order():
    # temperature 0.5 squares the odds: 16 : 4 : 1 over 21, so min_p 0.1 drops the last token;
    # before temperature (4 : 2 : 1) it would have stayed. top_p then sees 16 : 4 over 20.
    logits = [math.log(4.0), math.log(2.0), 0.0]
    assert [v > -math.inf for v in filtered(logits, temperature=0.5, min_p=0.1)] == [
        True,
        True,
        False,
    ]
    both = filtered(logits, temperature=0.5, min_p=0.1, top_p=0.79)
    assert [v > -math.inf for v in both] == [True, False, False]
    unfiltered = filtered(logits, temperature=0.5, top_p=0.79)
    assert [v > -math.inf for v in unfiltered] == [True, True, False]  # 16 / 21 = 0.76 falls short


def test_repetition_penalty_pushes_seen_tokens_down_on_either_side_of_zero():
    seen = [True, True, False]
    assert filtered([2.0, -2.0, 1.0], seen, repetition_penalty=2.0) == [1.0, -4.0, 1.0]
    greedy = filtered([2.0, -2.0, 1.5], seen, repetition_penalty=2.0, temperature=0.0)
    assert greedy == [1.0, -4.0, 1.5]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("stop", ("",)),
        ("stop", "a bare string"),
    ],
)
def test_sampling_out_of_range_names_the_flag(name, value):
    with pytest.raises(UserError, match="--" + name.replace("_", "-")):
        Sampling(**{"max_new_tokens": 1, name: value})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("drawn", [True, False])
def test_rows_that_are_not_finite_say_so_in_their_log_probs(bad: float, drawn: bool):
    logits = torch.zeros(3, 5)
    logits[1] = bad
    logits[2, 3] = math.inf
    token, logp = choose(logits, torch.tensor([0.5, 0.5, 0.5]) if drawn else None)
    assert torch.isfinite(logp).tolist() == [True, False, False]
    assert bool((token >= 0).all()) and bool((token < 5).all())
