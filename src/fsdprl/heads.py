"""Log-probabilities, and what else is one number a token, from the LM head: in chunks, recomputed in backward.

Of S loss tokens and V words, no [S, V] tensor exists in forward or backward: at most a few
[chunk, V] ones at a time. The head's weight gradient is accumulated once, in place.

Shapes: S loss tokens, C tokens of a chunk, V words, H hidden size, K words of each token.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def head_logp(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_S: Tensor,
    temperature_S: Tensor | None,
    *,
    chunk_tokens: int,
    also: Collection[str] = (),
    choices_SK: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probability [S] of each target under p = softmax(logits / temperature), and what `also` names of p.

    also: "entropy", in nats, and "collision", log sum_v p(v)^2: the log-probability that two draws
    agree. choices: more words of each token; "logp_top" [S, K] are then their log-probabilities.
    Temperature None is 1 everywhere, and cheaper. The matrix product runs in the type of
    `hidden_SH`; what follows in float32 (float64 for a float64 model). Log-probabilities and entropy
    are differentiable in hidden, weight and bias, once; collision is not. S may be 0: the results
    are empty and still connected to the graph.
    """
    words_SK = target_S[:, None]
    if choices_SK is not None:
        words_SK = torch.cat([words_SK, choices_SK.to(target_S)], 1)
    logp, logp_top, *others = _ChunkedHead.apply(
        hidden_SH,
        weight_VH,
        bias_V,
        words_SK,
        temperature_S,
        chunk_tokens,
        "entropy" in also,
        "collision" in also,
    )
    beside: dict[str, Tensor] = {"entropy": others[0], "collision": others[1]}
    found = {name: beside[name] for name in also}
    return logp, found | ({} if choices_SK is None else {"logp_top": logp_top})


@torch.no_grad()
def head_top(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    temperature_S: Tensor | None,
    count: int,
    *,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest words (all, if there are fewer): ids, int32 [S, K], and log-probabilities [S, K]."""
    parts = []
    for start in range(0, max(len(hidden_SH), 1), chunk_tokens):
        span = slice(start, start + chunk_tokens)
        logits = _logits(hidden_SH, weight_VH, bias_V, temperature_S, span)
        logp, ids = logits.topk(min(count, logits.shape[1]), dim=1)
        parts.append((ids.int(), logp - logits.logsumexp(1, keepdim=True)))
    ids, logp = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logp)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, span: slice
) -> Tensor:
    """Tempered logits [C, V] of one chunk in float32 or float64, owned by the caller."""
    logits = F.linear(hidden[span], weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature is None else logits.div_(temperature[span, None])


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        words: Tensor,
        temperature: Tensor | None,
        chunk_tokens: int,
        entropy: bool,
        collision: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        temperature = None if temperature is None else temperature.to(wide)
        logp = hidden.new_empty(words.shape, dtype=wide)
        normalisers = logp.new_empty(len(words))
        entropies, collisions = torch.zeros_like(normalisers), torch.zeros_like(normalisers)

        def chunk(span: slice) -> None:
            logits = _logits(hidden, weight, bias, temperature, span)
            picked = logits.gather(1, words[span])
            normalisers[span] = torch.logsumexp(logits, dim=1)
            logp[span] = picked - normalisers[span, None]
            if entropy or collision:
                logits.sub_(normalisers[span, None])
            if entropy:
                entropies[span] = -logits.exp().mul_(logits).sum(1)
            if collision:  # the likeliest word's share is not lost to underflow
                collisions[span] = torch.logsumexp(logits.mul_(2), dim=1)

        for start in range(0, len(words), chunk_tokens):
            chunk(slice(start, start + chunk_tokens))
        ctx.save_for_backward(hidden, weight, bias, words, temperature, normalisers, entropies)
        ctx.chunk_tokens = chunk_tokens
        ctx.mark_non_differentiable(collisions)
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs no gradient
        first, others = logp[:, 0].clone(), logp[:, 1:].clone()  # FSDP wants no views
        return first, others, entropies, collisions

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Any, ...]:
        grad_first, grad_others, grad_entropy, _ = grad_outputs
        hidden, weight, bias, words, temperature, normalisers, entropies = ctx.saved_tensors
        grad_logp = normalisers.new_zeros(words.shape)
        if grad_first is not None:
            grad_logp[:, 0] = grad_first
        if grad_others is not None:
            grad_logp[:, 1:] = grad_others
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # half precision would lose the small gradients of later chunks: accumulate wide, cast once
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None

        def chunk(span: slice) -> None:
            grad_logits = _grad_logits(
                _logits(hidden, weight, bias, temperature, span).sub_(normalisers[span, None]),
                words[span],
                grad_logp[span],
                None if grad_entropy is None else (grad_entropy[span], entropies[span]),
            )
            if temperature is not None:
                grad_logits.div_(temperature[span, None])
            if grad_bias is not None:
                grad_bias.add_(grad_logits.sum(0))
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[span])
            if grad_weight is not None:
                _accumulate(grad_weight, grad_logits, hidden[span])

        # a function a chunk: its tensors are gone before the next chunk's are made
        for start in range(0, len(words), ctx.chunk_tokens):
            chunk(slice(start, start + ctx.chunk_tokens))
        grads = [(grad_hidden, hidden), (grad_weight, weight), (grad_bias, bias)]
        cast = [None if grad is None else grad.to(like.dtype) for grad, like in grads]
        return (*cast, None, None, None, None, None)


def _grad_logits(
    logp_CV: Tensor,
    words_CK: Tensor,
    grad_logp_CK: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient [C, V] in the tempered logits z, made in the place of all words' log-probs.

    d logp / dz = onehot - p and d entropy / dz = -p (log p + entropy), with p = softmax(z).
    """
    if of_entropy is None:
        grad = logp_CV.exp_().mul_(-grad_logp_CK.sum(1, keepdim=True))
    else:
        grad_entropy_C, entropy_C = of_entropy
        p = logp_CV.exp()
        logp_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None])
        grad = logp_CV.add_(grad_logp_CK.sum(1, keepdim=True)).mul_(p).neg_()
    return grad.scatter_add_(1, words_CK, grad_logp_CK)


def _accumulate(grad_weight: Tensor, grad_logits_CV: Tensor, hidden_CH: Tensor) -> None:
    if grad_weight.dtype == hidden_CH.dtype:
        grad_weight.addmm_(grad_logits_CV.T, hidden_CH)
    else:
        grad_weight += grad_logits_CV.T @ hidden_CH
