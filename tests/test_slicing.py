"""Answers in slices, with the built-in engine: the same words, limits and log-probs as in one piece."""

from types import SimpleNamespace
from typing import Any

import pytest
import solo
import tiny
import torch
from test_conversing import SAMPLING, worker
from transformers import AutoModelForCausalLM

from fsdprl import rollout, slicing
from fsdprl.engines import Request
from fsdprl.models import pack
from fsdprl.rows import samples_of
from fsdprl.stream import weight_stream
from fsdprl.worker import Worker

MOST, COUNT = 40, 20
NONE = torch.zeros(0, dtype=torch.int64)


def asked(numbers: range, first: int = 0) -> dict[str, Any]:
    """Two answers to each of these prompts, in rows from `first` on."""
    texts = [f"q{i}" + "ab!x"[i % 4] * (i % 9) for i in numbers]
    ids = [torch.tensor(tiny.tokenizer()(t)["input_ids"], dtype=torch.int32) for t in texts]
    return {
        "first_row": [first + 2 * i for i in range(len(ids))], "lengths": torch.tensor([len(i) for i in ids]),
        "ids": torch.cat(ids) if ids else NONE.int(), "infos": [{"prompt": text} for text in texts],
        "seeds": torch.tensor([1000 + 2 * i + k for i in numbers for k in (0, 1)], dtype=torch.int64), "n": 2,
    }  # fmt: skip


def a_slice(made: Worker, begun: torch.Tensor, splits: int, numbers: range = range(0), **more: Any):
    settings = SAMPLING | {"max_new_tokens": torch.tensor(MOST)} | more
    return slicing.generate_slice(
        made, **asked(numbers, 2 * numbers.start), begun=begun, splits=splits, sampling=settings, version=0,
    )  # fmt: skip


def sliced(made: Worker, splits: int, **more: Any) -> list[int]:
    """All prompts in slices, half of them begun one slice later; how many slices each row had."""
    begun, slices = NONE, [0] * 2 * COUNT
    for call in range(splits + 1):
        new = {0: range(COUNT // 2), 1: range(COUNT // 2, COUNT)}.get(call, range(0))
        row_ids = [*range(2 * new.start, 2 * new.stop), *begun.tolist()]
        found = a_slice(made, begun, splits, new, **more)
        for row_id, length in zip(row_ids, found["length"].tolist(), strict=True):
            slices[row_id] += 1
            limit = slices[row_id] * MOST // splits
            assert length <= limit and len(made.store.rows[row_id].mask) > length
        begun = torch.tensor(row_ids, dtype=torch.int64)[found["unfinished"]]
    assert not len(begun)
    return slices


def whole(made: Worker, **more: Any) -> None:
    settings = SAMPLING | {"max_new_tokens": torch.tensor(MOST)} | more
    rollout.generate(made, **asked(range(COUNT)), sampling=settings, version=0)


def rows_of(made: Worker) -> list[Any]:
    found = []
    for _, row in sorted(made.store.rows.items()):
        info = {name: value for name, value in row.info.items() if name != "seed"}
        found.append((row.ids.tolist(), row.mask.tolist(), row.loss_tokens, info))
    return found


@pytest.mark.parametrize("splits", [1, 3, 7, MOST])
def test_greedy_answers_are_the_same_in_any_number_of_slices(splits: int):
    one, some = worker(), worker()
    whole(one, temperature=0.0)
    slices = sliced(some, splits, temperature=0.0)
    assert rows_of(some) == rows_of(one)
    ends = [len(row.ids) - row.info["prompt_length"] for row in one.store.rows.values()]
    assert slices == [1 + sum(k * MOST // splits < end for k in range(1, splits)) for end in ends]
    logps = [
        torch.cat([row.columns["logp_sampler"] for _, row in sorted(made.store.rows.items())])
        for made in (one, some)
    ]
    assert (logps[0] - logps[1]).abs().max() < 1e-5
    (sample,) = samples_of(some, [5])
    assert sample.response and sample.length == some.store.rows[5].loss_tokens
    assert {row.info["truncated"] for row in some.store.rows.values()} == {True, False}


def test_what_goes_on_depends_on_its_seed_and_its_words_only():
    one, few = worker(), worker(slots=3)
    sliced(one, 4)
    sliced(few, 4)
    assert rows_of(one) == rows_of(few)
    alone = worker()  # one prompt, from its first slice to its last
    begun = NONE
    for call in range(4):
        found = a_slice(alone, begun, 4, range(7, 8) if call == 0 else range(0))
        begun = (torch.tensor([14, 15]) if call == 0 else begun)[found["unfinished"]]
    assert rows_of(alone) == rows_of(one)[14:16]
    first = worker()
    a_slice(first, NONE, 1, range(COUNT))
    assert rows_of(first) != rows_of(one)  # later slices are drawn with seeds of their own
    ends = [(a, b) for a, b in zip(rows_of(first), rows_of(one), strict=True) if a[2] > 10]
    assert ends and all(
        a[0][: len(a[0]) - a[2] + 10] == b[0][: len(a[0]) - a[2] + 10] for a, b in ends
    )


def test_every_slice_of_every_answer_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch):
    requests: list[Request] = []

    def noted(*given: Any) -> Request:
        requests.append(Request(*given))
        return requests[-1]

    monkeypatch.setattr(slicing, "Request", noted)
    slices = sliced(worker(), 4)
    seeds = {request.seed for request in requests}
    assert len(seeds) == len(requests) == sum(slices) and set(range(1000, 1040)) < seeds


def test_tokens_keep_the_log_probs_of_the_weights_that_drew_them():
    made, checkpoints = worker(), [tiny.checkpoint(), tiny.checkpoint(seed=5)]
    found = a_slice(made, NONE, 2, range(COUNT))
    begun = torch.arange(2 * COUNT)[found["unfinished"]]
    other = AutoModelForCausalLM.from_pretrained(checkpoints[1], dtype=torch.float32)
    stream = weight_stream(SimpleNamespace(hf=other), dtype=torch.float32, bucket_bytes=1 << 20)  # type: ignore[arg-type]
    made.engine.update_weights(stream, 0)
    assert len(begun) > 5
    assert not a_slice(made, begun, 2)["unfinished"].any()
    rows = made.store.select(begun.tolist())
    with torch.no_grad():
        packed = pack([(row.ids, row.mask, 1.3) for row in rows], solo.CPU)
        logps = [solo.load(path)(packed)[0] for path in checkpoints]
    sampled = torch.cat([row.columns["logp_sampler"] for row in rows])
    early = torch.cat([torch.arange(row.loss_tokens) < MOST // 2 for row in rows])
    assert early.any() and (~early).any()
    for mine, logp, others in ((early, *logps), (~early, *logps[::-1])):
        assert (sampled - logp)[mine].abs().max() < 5e-5
        assert (sampled - others)[mine].abs().max() > 0.1


def test_the_engines_own_limit_is_an_end_as_well():
    made = worker(max_model_len=25)
    slices = sliced(made, 4, temperature=1.8)
    for row in made.store.rows.values():
        room = 25 - row.info["prompt_length"]
        assert row.loss_tokens <= room and row.info["truncated"] == (
            row.loss_tokens == room and row.ids[-1] != tiny.tokenizer().eos_token_id
        )
    assert max(slices) == 3


def test_an_answer_longer_than_a_limit_that_has_shrunk_is_over():
    made = worker()
    found = a_slice(made, NONE, 2, range(COUNT))
    begun = torch.arange(2 * COUNT)[found["unfinished"]]
    later = a_slice(made, begun, 2, max_new_tokens=torch.tensor(10))
    assert later["length"].tolist() == [20] * len(begun)
    assert later["truncated"].all() and not later["unfinished"].any()


def test_slices_are_even_parts():
    assert [slicing.slice_end(length, 10, 3) for length in (0, 2, 3, 5, 6, 9)] == [
        3,
        3,
        6,
        6,
        10,
        10,
    ]
    assert [slicing.slice_end(length, 4, 4) for length in range(4)] == [1, 2, 3, 4]
    assert slicing.slice_end(0, 7, 1) == 7


def test_other_weights_than_those_meant_are_refused():
    with pytest.raises(ValueError, match="version 0, not 3"):
        slicing.generate_slice(
            worker(), **asked(range(1)), begun=NONE, splits=2, sampling=SAMPLING, version=3
        )
