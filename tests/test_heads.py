"""The chunked head against the plain one, and what it holds in memory."""

import pytest
import torch
from tracking import TensorTracker

from fsdprl.heads import head_logp, head_top

TOKENS, WORDS, HIDDEN = 23, 101, 16


def inputs(dtype=torch.float64, tokens=TOKENS, words=WORDS, hidden=HIDDEN, bias=True):
    torch.manual_seed(0)
    made = [torch.randn(tokens, hidden, dtype=dtype), torch.randn(words, hidden, dtype=dtype)]
    made.append(torch.randn(words, dtype=dtype))
    tensors = [x.requires_grad_() for x in made]
    return (*tensors[:2], tensors[2] if bias else None), torch.randint(0, words, (tokens,))


ALL = ("entropy", "collision")


def plain(hidden, weight, bias, target, temperature):
    """Log-probs, entropies and collisions through the whole [S, V]."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    every = (logits / temperature[:, None]).log_softmax(-1)
    entropy, collision = -(every.exp() * every).sum(-1), every.exp().square().sum(-1).log()
    return every.gather(1, target[:, None]).squeeze(1), entropy, collision


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_whole_softmax_with_its_gradients(chunk, bias):
    tensors, target = inputs(bias=bias)
    temperature = torch.rand(TOKENS, dtype=torch.float64) + 0.3
    wrt = [x for x in tensors if x is not None]
    logp, others = head_logp(*tensors, target, temperature, chunk_tokens=chunk, also=ALL)
    got, want = (logp, *others.values()), plain(*tensors, target, temperature)
    weights = torch.randn(2, TOKENS, dtype=torch.float64)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert not got[2].requires_grad
    for name in ALL:  # each alone is what it is beside the other
        alone = head_logp(*tensors, target, temperature, chunk_tokens=chunk, also=[name])[1]
        assert alone.keys() == {name} and torch.equal(alone[name], others[name])
    grads = [torch.autograd.grad((weights * torch.stack(o[:2])).sum(), wrt) for o in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_gradcheck_without_entropy():
    tensors, target = inputs(tokens=7, words=11, hidden=3)
    ones = torch.ones(7, dtype=torch.float64)

    def logp(*tensors):
        return head_logp(*tensors, target, ones, chunk_tokens=3)[0]

    assert torch.autograd.gradcheck(logp, tensors)
    assert torch.equal(logp(*tensors), head_logp(*tensors, target, None, chunk_tokens=3)[0])


def test_an_entropy_without_gradient_leaves_that_of_log_probs():
    tensors, target = inputs(bias=False)
    wrt, found = tensors[:2], []
    for also in ((), ("entropy",)):
        logp, _ = head_logp(*tensors, target, None, chunk_tokens=5, also=also)
        found.append(torch.autograd.grad(logp.sum(), wrt))
    assert all(map(torch.equal, *found))
    entropy = head_logp(*tensors, target, None, chunk_tokens=5, also=["entropy"])[1]["entropy"]
    want = plain(*tensors, target, torch.ones(TOKENS, dtype=torch.float64))[1]
    for mine, theirs in zip(
        *(torch.autograd.grad(it.sum(), wrt) for it in (entropy, want)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_hand_computed():
    """Two words with logits ln 3 and 0 at temperature 1: p = 3/4, two draws agree 5 times of 8; at
    temperature 1/2: 9/10, 41 of 50."""
    hidden = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    weight = torch.tensor([[3.0], [1.0]], dtype=torch.float64).log()
    target, temperature = torch.tensor([0, 1]), torch.tensor([1.0, 0.5])
    logp, others = head_logp(hidden, weight, None, target, temperature, chunk_tokens=1, also=ALL)
    assert logp.exp().tolist() == pytest.approx([0.75, 0.1])
    assert others["entropy"].tolist() == pytest.approx([0.562335144618808, 0.325082973391448])
    assert others["collision"].exp().tolist() == pytest.approx([0.625, 0.82])


@pytest.mark.parametrize("chunk", [3, 1000])
def test_log_probs_of_more_words_with_their_gradients(chunk):
    """Those of the target among them, one of them twice, beside an entropy."""
    tensors, target = inputs()
    temperature = torch.rand(TOKENS, dtype=torch.float64) + 0.3
    choices = torch.stack([target, target.flip(0), torch.zeros_like(target)], 1)
    logits = (tensors[0] @ tensors[1].T + tensors[2]) / temperature[:, None]
    every, weights = logits.log_softmax(-1), torch.randn(TOKENS, 4, dtype=torch.float64)
    found = head_logp(
        *tensors, target, temperature, chunk_tokens=chunk, also=["entropy"], choices_SK=choices
    )
    entropy, top = found[1]["entropy"], found[1]["logp_top"]
    want_top = every.gather(1, choices)
    torch.testing.assert_close(top, want_top, rtol=1e-12, atol=1e-12)
    picked = every.gather(1, target[:, None])
    torch.testing.assert_close(found[0], picked[:, 0], rtol=1e-12, atol=1e-12)
    mine = (torch.cat([found[0][:, None], top], 1) * weights).sum() + 2 * entropy.sum()
    want = (torch.cat([picked, want_top], 1) * weights).sum()
    want = want - 2 * (every.exp() * every).sum()
    for got, theirs in zip(*(torch.autograd.grad(it, tensors) for it in (mine, want)), strict=True):
        torch.testing.assert_close(got, theirs, rtol=1e-11, atol=1e-12)


def test_the_likeliest_words():
    tensors, _ = inputs()
    temperature = torch.full((TOKENS,), 0.5, dtype=torch.float64)
    every = (2 * (tensors[0] @ tensors[1].T + tensors[2])).log_softmax(-1)
    ids, logp = head_top(*tensors, temperature, 7, chunk_tokens=5)
    want, where = every.topk(7, dim=1)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), where) and not logp.requires_grad
    torch.testing.assert_close(logp, want.detach(), rtol=1e-12, atol=1e-12)
    assert head_top(*tensors, None, 10**6, chunk_tokens=5)[0].shape == (TOKENS, WORDS)
    none = (tensors[0][:0], *tensors[1:])
    assert [it.shape for it in head_top(*none, None, 7, chunk_tokens=5)] == [(0, 7), (0, 7)]


def test_two_draws_of_a_certain_word_agree():
    """Its probability rounds to 1 and the others' squares to 0: the log is 0, not NaN."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[300.0], [0.0], [-300.0]])
    target = torch.tensor([0])
    _, others = head_logp(hidden, weight, None, target, None, chunk_tokens=4, also=["collision"])
    assert others["collision"].tolist() == [0.0]


def test_half_precision_works_in_float32_and_accumulates_wide():
    """bfloat16 in, float32 out; a weight gradient summed over 64 chunks stays as exact as one."""
    tensors, target = inputs(torch.bfloat16, tokens=64, bias=True)
    logp, _ = head_logp(*tensors, target, None, chunk_tokens=1)
    assert logp.dtype == torch.float32
    many = torch.autograd.grad(logp.sum(), tensors[1])[0]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = torch.autograd.grad(plain(*exact, target, torch.ones(64))[0].sum(), exact[1])[0]
    assert many.dtype == torch.bfloat16
    assert float((many.double() - want).norm() / want.norm()) < 0.01


def test_no_tokens_stay_connected():
    tensors, target = inputs(tokens=0)
    logp, others = head_logp(*tensors, target, None, chunk_tokens=4, also=ALL)
    (logp.sum() + others["entropy"].sum()).backward()
    assert logp.shape == others["entropy"].shape == others["collision"].shape == (0,)
    assert all(float(x.grad.abs().sum()) == 0.0 for x in tensors)


@pytest.mark.parametrize("also", [(), ("entropy",), ("collision",)])
def test_peak_memory_has_no_tokens_times_vocabulary(also):
    """V = 150,000: no tensor above chunk x V or V x H, and twice the tokens do not raise the peak."""
    words, hidden, chunk = 150_000, 16, 8
    peaks = []
    for tokens in (64, 128):
        tensors, target = inputs(torch.float32, tokens, words, hidden, bias=False)
        with TensorTracker() as seen:
            logp, others = head_logp(*tensors, target, None, chunk_tokens=chunk, also=also)
            (logp.sum() + (others["entropy"].sum() if "entropy" in also else 0.0)).backward()
        assert seen.largest <= words * max(chunk, hidden)
        peaks.append(seen.peak)
    weight, one_chunk = 4 * words * hidden, 4 * words * chunk
    print(f"peak {peaks[0] / 1e6:.1f} MB; [S, V] alone would be {4 * 128 * words / 1e6:.1f} MB")
    # the weight, its gradient, and one chunk's logits (a second for the entropy)
    assert peaks[0] <= 2 * weight + (2.1 if also else 1.1) * one_chunk
    assert peaks[1] - peaks[0] <= 64 * (hidden + 8) * 8
