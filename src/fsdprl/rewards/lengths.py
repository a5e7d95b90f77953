"""Rewards on how long an answer is, in engine tokens, and on how often it repeats itself."""

import math

from fsdprl.rewards.math import math_accuracy
from fsdprl.rewards.numeric import numeric_match
from fsdprl.rewards.text import exact_match
from fsdprl.sample import Sample

_CORRECT = {"accuracy": math_accuracy, "numeric": numeric_match, "exact": exact_match}


def soft_overlong(
    sample: Sample, *, cache_length: int, max_length: int = 0, factor: float = 1.0
) -> float:
    """A penalty that grows over the last `cache_length` tokens before `max_length`: 0 to -factor.

    -factor clamp((length - (max_length - cache_length)) / cache_length, 0, 1). max_length 0: the sampler's
    max_new_tokens. DAPO (arXiv:2503.14476), equation 13; ms-swift does not clamp, so that a longer answer than
    max_length costs more than 1 there. Raises ValueError unless 0 < cache_length < max_length.
    """
    limit = max_length or sample.max_new_tokens
    if not 0 < cache_length < limit:
        raise ValueError(f"cache_length {cache_length} must lie between 0 and {limit}")
    exceed = sample.length - (limit - cache_length)
    return 0.0 - factor * min(max(exceed / cache_length, 0.0), 1.0)


def cosine(
    sample: Sample,
    *,
    min_len_wrong: float = -0.5,
    max_len_wrong: float = 0.0,
    min_len_correct: float = 1.0,
    max_len_correct: float = 0.5,
    max_length: int = 0,
    correct: str = "accuracy",
) -> float | None:
    """A correct answer pays more the shorter it is, a wrong one costs less the longer it is (Yeo et al. 2025,
    arXiv:2502.03373).

    b - (b - a) (1 - cos(pi t / T)) / 2 falls from b = min_len_* at t = 0 tokens to a = max_len_* at t = T. t is
    clamped to T: unclamped, as in ms-swift, a correct answer of 2 T tokens would be worth 1.0 again. max_length: T,
    0 for the sampler's max_new_tokens. correct: what says whether an answer is right: accuracy, numeric or exact;
    None (not applicable) where that is. Raises ValueError without a T or for another `correct`.
    """
    limit = max_length or sample.max_new_tokens
    if limit <= 0 or correct not in _CORRECT:
        raise ValueError(
            f"cosine: max_length {limit} must be positive, correct {correct!r} one of {', '.join(_CORRECT)}"
        )
    right = _CORRECT[correct](sample)
    if right is None:
        return None
    short, long = min_len_wrong, max_len_wrong
    if right >= 1.0:
        short, long = min_len_correct, max_len_correct
    done = min(sample.length, limit) / limit
    return short - (short - long) * (1.0 - math.cos(math.pi * done)) / 2.0


cosine.warm_up = math_accuracy.warm_up  # type: ignore[attr-defined]


def repetition(sample: Sample, *, n_grams: int = 3, max_penalty: float = -1.0) -> float:
    """max_penalty * (1 - distinct / all) over the n-grams of the response's lower-case words; 0.0 below n words.

    Words are what white space separates, as in ms-swift: Chinese text without spaces is one word and never
    penalised. Raises ValueError for a positive max_penalty or n_grams below 1.
    """
    if max_penalty > 0 or n_grams < 1:
        raise ValueError(
            f"repetition: max_penalty {max_penalty} must not be positive, n_grams {n_grams} >= 1"
        )
    words = sample.response.lower().split()
    if len(words) < n_grams:
        return 0.0
    grams = list(zip(*(words[start:] for start in range(n_grams)), strict=False))
    return 0.0 + max_penalty * (1.0 - len(set(grams)) / len(grams))
