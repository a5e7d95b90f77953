"""Messages: every dtype survives, nothing executes, strangers are dropped, bytes are counted."""

import time
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
import zmq

from fsdprl.functions import FunctionRef
from fsdprl.wire import Line, Wire, decode, encode

TOKEN = b"0123456789abcdef"
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3)])
def test_tensors_keep_dtype_shape_and_bits(dtype, shape):
    count = int(np.prod(shape))
    sent = (torch.arange(count) % 2 if dtype == torch.bool else torch.arange(count)).to(dtype)
    sent = sent.reshape(shape)
    arrived = decode(encode({"column": sent}))["column"]
    assert arrived.dtype == dtype and arrived.shape == sent.shape and torch.equal(arrived, sent)


def test_special_values_and_views_travel_exactly():
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-320], dtype=torch.float64)
    arrived = decode(encode(values))
    assert torch.equal(arrived.view(torch.int64), values.view(torch.int64))
    grid = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(decode(encode(grid.t()[1:])), grid.t()[1:])
    assert torch.equal(decode(encode(grid.requires_grad_())), grid)


def test_what_arrives_owns_its_memory():
    sent = torch.zeros(3)
    arrived = decode(encode(sent))
    arrived += 1
    array = decode(encode(np.zeros((2, 2), np.int32)))
    array += 1
    assert sent.tolist() == [0, 0, 0] and array.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float32", "float64"])
def test_numpy_arrays_and_scalars(dtype):
    sent = np.arange(6).reshape(2, 3).astype(dtype)
    arrived = decode(encode(sent))
    assert arrived.dtype == sent.dtype and np.array_equal(arrived, sent)
    assert decode(encode(sent[1, 2])) == sent[1, 2]


@dataclass
class Point:
    x: int
    name: str


def test_plain_data_dataclasses_and_function_names():
    value = {"a": [1, 2.5, None, True, "text", b"raw"], "nested": {"k": (1, 2)}}
    assert decode(encode(value)) == {**value, "nested": {"k": [1, 2]}}
    assert decode(encode(Point(1, "p"))) == {"x": 1, "name": "p"}
    ref = FunctionRef("m", "f", {"k": 1})
    assert FunctionRef(**decode(encode(ref))) == ref


@pytest.mark.parametrize("value", [object(), lambda: 0, Exception("x"), {1, object()}])
def test_anything_else_is_refused_before_it_is_sent(value):
    with pytest.raises(TypeError):
        encode(value)


@pytest.mark.parametrize("name", ["object", "complex64", "Tensor", "load", "str"])
@pytest.mark.parametrize("code", [1, 2])
def test_foreign_extensions_are_refused(code, name):
    hostile = msgspec.msgpack.Ext(code, msgspec.msgpack.encode((name, (1,), b"12345678")))
    with pytest.raises(ValueError, match="not ours"):
        decode(msgspec.msgpack.encode(hostile))


def receive(wire: Wire, timeout_s: float = 10.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if (reply := wire.receive()) is not None:
            return reply
        time.sleep(0.01)
    raise AssertionError("nothing arrived")


def test_a_round_trip_counts_its_bytes():
    wire = Wire("127.0.0.1", TOKEN, 2)
    line = Line(wire.endpoint, TOKEN, 1)
    line.reply(0, 0.0, b"hi")
    assert receive(wire) == (1, 0, 0.0, b"hi")
    assert wire.received == 16 + 8 + 8 + len(b"hi")
    body = encode({"x": torch.arange(3)})
    assert wire.send([1], 7, "rows.free", [body]) == wire.sent == 16 + 8 + 8 + 40 + len(body)
    assert line.receive() == (7, "rows.free", body)
    line.reply(7, 1.5, encode(None))
    assert receive(wire) == (1, 7, 1.5, encode(None))
    assert wire.endpoint.startswith("tcp://127.0.0.1:")
    line.close()
    wire.close()


def test_strangers_are_dropped_and_counted():
    wire = Wire("127.0.0.1", TOKEN, 1)
    wrong = b"fedcba9876543210"
    impostor = Line(wire.endpoint, wrong, 0)  # wrong token: another identity too
    impostor.reply(0, 0.0, b"evil")
    knows_identity = Line(wire.endpoint, TOKEN, 0)
    knows_identity.token = wrong  # the right identity, the wrong token in the message
    knows_identity.reply(0, 0.0, b"evil")
    anonymous = zmq.Context().socket(zmq.DEALER)
    anonymous.set(zmq.LINGER, 0)
    anonymous.connect(wire.endpoint)
    anonymous.send_multipart([b"", b"garbage", b"\x80"])
    end = time.monotonic() + 10
    while wire.dropped < 3 and time.monotonic() < end:
        assert wire.receive() is None
        time.sleep(0.01)
    assert wire.dropped == 3 and wire.received == 0
    knows_identity.token = TOKEN
    knows_identity.reply(1, 0.0, b"good")
    assert receive(wire)[3] == b"good"
    for line in (impostor, knows_identity):
        line.close()
    anonymous.close()
    wire.close()


def test_a_rank_drops_what_is_not_from_its_controller():
    wire = Wire("127.0.0.1", TOKEN, 1)
    line = Line(wire.endpoint, TOKEN, 0)
    line.reply(0, 0.0, b"")
    receive(wire)
    wire.token = b"fedcba9876543210"
    wire.send([0], 1, "shutdown", [b"evil"])
    wire.token = TOKEN
    wire.send([0], 2, "ping", [b"good"])
    assert line.receive() == (2, "ping", b"good")
    assert line.dropped == 1
    line.close()
    wire.close()
