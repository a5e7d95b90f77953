"""Store and exchange encoding: rows by id, compact columns, bytes there and back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdprl.exchange import decode_rows, encode_rows
from fsdprl.rows import samples_of
from fsdprl.store import Row, Store


def row(length: int, prompt: int, **columns: torch.Tensor) -> Row:
    mask = torch.arange(length) >= prompt
    return Row(
        torch.arange(length, dtype=torch.int32),
        mask,
        {"prompt": "p", "prompt_length": prompt},
        dict(columns),
    )


def test_columns_cover_loss_tokens_only_and_come_back_in_row_order():
    store = Store()
    store.put(7, row(5, 2))
    store.put(3, row(3, 1))
    store.put(4, row(2, 2))  # no loss tokens at all
    store.set_column("logp", [7, 4, 3], torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert store.column("logp", [3, 7]).tolist() == [4.0, 5.0, 1.0, 2.0, 3.0]
    assert store.column("logp", [4]).tolist() == []
    assert store.segments([7, 4, 3]).tolist() == [0, 0, 0, 2, 2]


def test_wrong_shapes_are_refused():
    store = Store()
    with pytest.raises(ValueError, match="first token"):
        store.put(0, Row(torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="int32"):
        store.put(0, Row(torch.zeros(2), torch.zeros(2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="column 'logp'"):
        store.put(0, row(4, 2, logp=torch.zeros(4)))
    store.put(0, row(4, 2))
    with pytest.raises(ValueError, match="for 2 loss tokens"):
        store.set_column("x", [0], torch.zeros(3))
    with pytest.raises(KeyError, match="no token column 'y'"):
        store.column("y", [0])


def test_columns_of_several_numbers_a_token():
    store = Store()
    store.put(7, row(5, 2))
    store.put(4, row(2, 2))  # no loss tokens at all
    store.put(3, row(3, 1))
    values = torch.arange(10.0).view(5, 2)
    store.set_column("top", [7, 4, 3], values)
    assert store.column("top", [3, 7]).tolist() == [[6, 7], [8, 9], [0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="for 3 loss tokens"):
        store.set_column("top", [7], torch.zeros(2, 3))
    store.set_column("ids", [7, 4, 3], values.int())
    for i, back in decode_rows(encode_rows([(i, store.rows[i]) for i in (4, 3, 7)])):
        for name in ("top", "ids"):
            want = store.rows[i].columns[name]
            assert torch.equal(back.columns[name], want) and back.columns[name].dtype == want.dtype
    store.rows[3].columns["top"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="column 'top' has types"):
        encode_rows([(i, store.rows[i]) for i in (3, 7)])


def test_set_column_does_not_keep_the_packed_tensor_alive():
    store = Store()
    store.put(0, row(4, 2))
    store.put(1, row(1000, 1))
    store.set_column("logp", [0, 1], torch.zeros(2 + 999))
    assert store.rows[0].columns["logp"].untyped_storage().nbytes() == 2 * 4


def test_free_by_spans():
    store = Store()
    for i in range(10):
        store.put(i, row(3, 1))
    store.free([(0, 3), (8, 1000)])
    assert sorted(store.rows) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_survive_the_wire_bit_for_bit(dtype: torch.dtype):
    torch.manual_seed(0)
    sent = [
        (11, row(5, 2, logp=torch.randn(3, dtype=dtype))),
        (12, row(4, 4)),
        (2**40, row(3, 1, a=torch.randn(2))),
    ]
    sent[1][1].columns["empty"] = torch.zeros(0)
    received = decode_rows(encode_rows(sent))
    assert [i for i, _ in received] == [11, 12, 2**40]
    for (_, a), (_, b) in zip(sent, received, strict=True):
        assert torch.equal(a.ids, b.ids) and torch.equal(a.mask, b.mask) and a.info == b.info
        assert list(a.columns) == list(b.columns)
        assert all(
            torch.equal(a.columns[n], b.columns[n]) and a.columns[n].dtype == b.columns[n].dtype
            for n in a.columns
        )
    whole = {row.ids.untyped_storage().nbytes() for _, row in received}
    assert whole == {row.ids.nbytes for _, row in received}, "a row keeps other rows' memory alive"


def test_a_column_of_two_types_does_not_travel():
    rows = [(1, row(2, 1, a=torch.zeros(1))), (2, row(2, 1, a=torch.zeros(1).double()))]
    with pytest.raises(ValueError, match=r"column 'a' has types \['float32', 'float64'\]"):
        encode_rows(rows)


def test_a_response_is_decoded_once():
    asked: list[list[int]] = []

    class Tokenizer:
        def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
            assert skip_special_tokens
            asked.extend(ids)
            return ["" if row == [4] else f"says {row}" for row in ids]

    store = Store()
    for name, length in ((1, 4), (2, 6), (3, 5)):
        store.put(name, row(length, 4 if name == 3 else 3))
    worker: Any = SimpleNamespace(store=store, state={"tokenizer": Tokenizer()})
    for names in ([1, 2], [2, 3, 1], [3]):
        samples = samples_of(worker, names)
        texts = {1: "says [3]", 2: "says [3, 4, 5]", 3: ""}
        assert [sample.response for sample in samples] == [texts[name] for name in names]
        assert [sample.row for sample in samples] == names
    assert asked == [[3], [3, 4, 5], [4]]
    # ... on its rank: what another gets has no text yet
    ((_, there),) = decode_rows(encode_rows([(1, store.rows[1])]))
    assert there.text is None and there.loss_tokens == 1
