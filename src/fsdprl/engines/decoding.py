"""From logits to tokens: sampling filters, per-row randomness, processed log-probs.

Filters run in vLLM's order, so that both engines draw from the same distribution: repetition
penalty, temperature, min_p, top_k, top_p. The log-prob of a token is that of the distribution it
was drawn from (after temperature and filters, renormalised). At temperature 0 the token is the
argmax and its log-prob that of temperature 1 after the repetition penalty, as vLLM's
`processed_logprobs` has it.

Shapes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from fsdprl.engines import Sampling

GREEDY_BELOW = 1e-5  # a temperature under this is greedy (vLLM's threshold)

# Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators" (2014), SplitMix64. The
# constants are its 64-bit ones, written as the signed integers that torch.int64 holds.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own is arithmetic on int64 and would smear the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def mix64(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 [B]; products wrap modulo 2^64 on every device."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform number in [0, 1) of each row: a pure function of (seed, position).

    There is no state to advance, so a row's draws cannot depend on its batch, its rank or the
    order of the requests, and torch's global generator is never touched.

    seeds, positions: int64 [B]; position is the ordinal of the token being drawn. Returns
    float32 [B] with 24 random bits, which float32 holds exactly.
    """
    bits = mix64(mix64(seeds) + (positions + 1) * _GAMMA)
    return _shift_right(bits, 40).to(torch.float32) * (1.0 / (1 << 24))


def filter_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Logits [B, V] float32 after penalty, temperature and filters; changed in place.

    seen: bool [B, V], tokens that occur in the row's prompt or answer so far; needed with
    `repetition_penalty` != 1 (Keskar et al. 2019, "CTRL", section 4.1) only.
    Excluded tokens are -inf; at least one token always stays.
    """
    if sampling.repetition_penalty != 1.0:
        assert seen is not None
        penalty = sampling.repetition_penalty
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, penalised, logits)
    if sampling.temperature < GREEDY_BELOW:
        return logits
    if sampling.temperature != 1.0:
        logits = logits.div_(sampling.temperature)
    if sampling.min_p > 0.0:
        floor = logits.amax(dim=-1, keepdim=True) + torch.tensor(sampling.min_p).log().item()
        logits = logits.masked_fill_(logits < floor, -torch.inf)
    vocabulary = logits.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill_(logits < least, -torch.inf)
    if sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_p)
    return logits


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest most likely tokens whose probability reaches top_p (Holtzman et al. 2019)."""
    rising, order = logits.sort(dim=-1)
    tail = rising.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    tail[:, -1] = False
    return logits.masked_fill_(tail.scatter(-1, order, tail), -torch.inf)


def choose(logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw a token of each row from softmax(logits) by inverse CDF.

    One uniform number a row, whatever V is. Rounding noise in the logits (another batch shape,
    another rank) can only change a token whose edge in the CDF lies within that noise of the
    uniform.

    logits: float32 [B, V], already filtered, each row's maximum finite. uniform: float32 [B], or
    None for the argmax. Returns token ids int64 [B] and their log-probs float32 [B], of which those of
    rows with a maximum that is not finite are not finite, either.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    mass = (logits - peak).exp_()
    log_total = mass.sum(dim=-1, keepdim=True).log_()
    if uniform is None:
        token = logits.argmax(dim=-1, keepdim=True)
    else:
        edges = mass.cumsum(dim=-1)
        total = edges[:, -1:]
        # Below the last edge even after rounding: past it lies no token, on it a token of no mass.
        target = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
        token = torch.searchsorted(edges, target, right=True)
        token = token.clamp_(max=logits.shape[-1] - 1)  # NaN lies behind all edges
    logp = logits.gather(-1, token) - peak - log_total
    return token.squeeze(-1), logp.squeeze(-1)
