"""Store and exchange encoding: rows by id, compact columns, bytes there and back."""

import pytest
import torch

from fsdprl.exchange import decode_rows, encode_rows
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
